"""Declare the options of `replay recompiles`: its own, and those of a replay that it does not set itself."""

from functools import partial
from pathlib import Path
from typing import Any

import typer

from actor_init.spec import UsageError
from replay.campaign.campaign_options import (
    continue_option,
    list_words,
    make_begin_action,
    make_continue_action,
    run_limit_option,
)
from replay.commands.recompiles.policies import MULTIPLE, NAMES, NUM_BUCKETS, Policy, RecompilesPlan, parse_buckets
from replay.options.option_parsing import CommandAction, DeclaredOption, add_options, build_replay_spec, json_option
from replay.processes.pool import RunLimits

NUM_PASSES = 1000


def _applies_to_recompiles(option: DeclaredOption) -> bool:
    """Does the option apply to recompiles? It compiles, pads and repeats by itself, and judges nothing."""
    if option.part == "measure":
        return option.field in ("loss", "backward", "timeout", "log_folder")
    return option.part != "state" and option.field not in (
        *("compile", "compile_lengths", "pad_tokens", "uneven", "shuffle_inputs", "random_seed", "epochs", "order"),
        *("pick_inputs", "grad_accumulation", "max_norm", "learning_rate", "lr_warmup_steps"),
    )


@partial(add_options, serves=_applies_to_recompiles)
def recompiles(
    policies: str | None = typer.Option(
        None, metavar="A,B", help=f"Which to try, of {', '.join(NAMES)}. (default: all)"
    ),
    buckets: str | None = typer.Option(
        None,
        metavar="N|N,N,...",
        help=f"How many lengths the policy `buckets` pads to, or these lengths. (default: {NUM_BUCKETS}, chosen so "
        "that the least padding is added)",
    ),
    multiple: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
        help=f"Tokens to a multiple of which the policy `multiple` pads. (default: {MULTIPLE})",
    ),
    num_passes: int | None = typer.Option(
        None, min=1, metavar="N", help=f"Passes of a job over which compiling has to pay. (default: {NUM_PASSES})"
    ),
    continue_: Path | None = continue_option("recompiles"),  # noqa: B008
    run_limit: float = run_limit_option("each policy"),
    json: bool = json_option(),
    **given: Any,
) -> CommandAction:
    """Say which policy of torch.compile suits the inputs' lengths.

    Each policy runs in processes of its own with an empty compiler cache. Exit code 0 if all of them finished, else
    1.
    """
    own_options = {"policies": policies, "buckets": buckets, "multiple": multiple, "num_passes": num_passes}
    limits = RunLimits(run_limit_seconds=run_limit, total_seconds=None, at_once=None)
    if continue_ is not None:
        return make_continue_action("recompiles", continue_, {**own_options, **given}, limits, as_json=json)
    words = list(NAMES) if policies is None else [word.strip() for word in policies.split(",")]
    if wrong := [word for word in words if word not in NAMES]:
        raise UsageError.not_allowed("policies", wrong[0], f"Give some of {', '.join(NAMES)}, with commas between")
    plan = RecompilesPlan(
        spec=build_replay_spec(given),
        policies=[policy for policy in Policy if policy is Policy.OFF or policy.value in words],
        sizes=NUM_BUCKETS if buckets is None else parse_buckets(buckets),
        multiple=multiple or MULTIPLE,
        num_passes=num_passes or NUM_PASSES,
    )
    return make_begin_action("recompiles", plan.spec, plan, list_words(own_options), limits, as_json=json)
