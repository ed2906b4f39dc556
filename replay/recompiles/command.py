"""Declare the options of `replay recompiles`: its own, and those of a replay that it does not set itself."""

from functools import partial
from typing import Any

import typer

from actor_init.spec import UsageError
from replay.given_paths import check_inputs
from replay.option_parsing import Action, Toggle, replay_spec, with_options
from replay.processes.launch import refuse_launcher
from replay.recompiles.policies import MULTIPLE, NAMES, NUM_BUCKETS, Asked, Policy, sizes_of

NUM_PASSES = 1000


def _serves_recompiles(toggle: Toggle) -> bool:
    """Does the option apply to recompiles? It compiles, pads and repeats by itself, and judges nothing."""
    if toggle.part == "measure":
        return toggle.field in ("loss", "backward", "timeout", "log_folder")
    return toggle.part != "state" and toggle.field not in (
        *("compile", "compile_lengths", "pad_tokens", "uneven", "shuffle_inputs", "random_seed", "epochs", "order"),
        *("pick_inputs", "grad_accumulation", "max_norm", "learning_rate", "lr_warmup_steps"),
    )


@partial(with_options, serves=_serves_recompiles)
def recompiles(
    policies: str = typer.Option(
        ",".join(NAMES),
        metavar="A,B",
        show_default=False,
        help=f"Which to try, of {', '.join(NAMES)}. (default: all)",
    ),
    buckets: str = typer.Option(
        str(NUM_BUCKETS),
        metavar="N|N,N,...",
        show_default=False,
        help=f"How many lengths the policy `buckets` pads to, or these lengths. (default: {NUM_BUCKETS}, chosen so "
        "that the least padding is added)",
    ),
    multiple: int = typer.Option(
        MULTIPLE,
        min=1,
        metavar="N",
        show_default=False,
        help=f"Tokens to a multiple of which the policy `multiple` pads. (default: {MULTIPLE})",
    ),
    num_passes: int = typer.Option(
        NUM_PASSES,
        min=1,
        metavar="N",
        show_default=False,
        help=f"Passes of a job over which compiling has to pay. (default: {NUM_PASSES})",
    ),
    policy_timeout: float = typer.Option(
        600.0, min=1.0, metavar="X", show_default=False, help="Seconds for each policy. (default: 600)"
    ),
    **given: Any,
) -> Action:
    """Replay the inputs' mix of lengths under policies of torch.compile, and say which to use.

    Each policy runs in processes of its own with an empty compiler cache. Exit code 0 if all of them finished, else 1.
    """
    words = [word.strip() for word in policies.split(",")]
    if wrong := [word for word in words if word not in NAMES]:
        raise UsageError(
            f"--policies {wrong[0]!r} is not allowed. Give some of {', '.join(NAMES)}, with commas between"
        )
    asked = Asked(
        policies=[policy for policy in Policy if policy.value in words],
        sizes=sizes_of(buckets),
        multiple=multiple,
        num_passes=num_passes,
        limit=policy_timeout,
        typed=[
            *(["--policies", policies] if len(words) < len(NAMES) else []),
            *(["--buckets", buckets] if buckets != str(NUM_BUCKETS) else []),
            *(["--multiple", str(multiple)] if multiple != MULTIPLE else []),
            *(["--num-passes", str(num_passes)] if num_passes != NUM_PASSES else []),
        ],
    )
    spec = replay_spec(given)

    def try_policies() -> int:
        refuse_launcher("recompiles")
        check_inputs(spec.inputs)
        from replay.recompiles import runs

        return runs.try_policies(spec, asked)

    return try_policies
