"""Declare the options of `replay recompiles`: its own, and those of a replay that it does not set itself."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import typer

from actor_init.spec import UsageError
from replay.campaign.campaign import going_on
from replay.commands.recompiles.policies import (
    MULTIPLE,
    NAMES,
    NUM_BUCKETS,
    Policy,
    RecompilesPlan,
    Result,
    best,
    pays_from,
    sizes_of,
)
from replay.options.option_parsing import Action, Toggle, replay_spec, with_options
from replay.options.spec import check_inputs
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import counted, damaged_files, milliseconds
from replay.processes.launch import refuse_launcher
from replay.processes.pool import RunLimits

# Print what each policy of compiling took, and which to use.
#
# policy     graphs  recompiled  compiling s  padding  ms a pass  s for 1,000
# off             0           0          0.0     0.0%      120.1        121.0
# dynamic         1           0         11.2     0.0%       98.3        109.8
#
# recompiled automatic, 1 time: forward: N: tensor 'hidden_states' size mismatch at index 1. expected N, actual N
# use        dynamic: --compile; off takes less for fewer than 513 passes

MOST_REASONS = 3  # of a policy that are listed


class RecompilesConsole:
    def __init__(
        self, command: str, num_inputs: int, damaged: Sequence[tuple[Path, str]], file: IO[str] | None = None
    ) -> None:
        self._out = open_console(file)
        inputs = f"{counted(num_inputs, 'input')}, twice under each policy"
        print_pairs(self._out, [("command", command), ("inputs", inputs), *damaged_files(damaged)])

    def runs(self, policy: Policy) -> None:
        print_pairs(self._out, [("runs", policy.value)])

    def ended(self, result: Result) -> None:
        if result.error:
            print_pairs(self._out, [("failed", f"{result.policy}: {result.error}")])

    def finish(self, results: Sequence[Result], num_passes: int, written: Path) -> None:
        """Print the table, the guards that failed, and which policy to use."""
        print_line(self._out)
        plain = next((one.fed_tokens for one in results if one.policy is Policy.OFF), 0)
        nets = [one.net_seconds(num_passes) for one in results]
        print_table(
            self._out,
            {
                "setting": [one.policy.value for one in results],
                "graphs": [str(one.num_graphs) for one in results],
                "recompiled": [str(sum(one.recompilations.values())) for one in results],
                "compiling s": [f"{one.compile_seconds:,.1f}" for one in results],
                "padding": [_padding(one, plain) for one in results],
                "ms a pass": [milliseconds(one.pass_seconds) for one in results],
                f"s for {num_passes:,}": ["-" if net is None else f"{net:,.1f}" for net in nets],
            },
        )
        print_line(self._out)
        for one in results:
            reasons = list(one.recompilations.items())
            pairs = [("recompiled", f"{one.policy}, {number} x {reason}") for reason, number in reasons[:MOST_REASONS]]
            rest = len(reasons) - MOST_REASONS
            more = [("", f"{one.policy}: {counted(rest, 'other guard')}, see {written.name}")] if rest > 0 else []
            print_pairs(self._out, [*pairs, *more])
        print_pairs(self._out, [*_advice(results, num_passes), ("written", str(written))])


def _padding(one: Result, plain: int) -> str:
    is_known = plain and one.pass_seconds is not None
    return f"{max(0.0, one.fed_tokens / plain - 1):.1%}" if is_known else "-"


def _advice(results: Sequence[Result], num_passes: int) -> list[tuple[str, str]]:
    """Say which policy to use for so many passes, and from how many on it pays."""
    chosen = best(results, num_passes)
    if chosen is None:
        return [("use", "not known: no policy replayed all inputs twice")]
    if chosen.policy is Policy.OFF:
        compiled = [(first, one) for one in results if (first := pays_from(one, chosen)) is not None]
        first, one = min(compiled, key=lambda pair: pair[0], default=(0, chosen))
        later = f"; {one.policy} takes less from {first:,} passes on" if compiled else "; none of the others is faster"
        return [("use", f"off, no compiling, for {num_passes:,} passes{later}")]
    off = next(one for one in results if one.policy is Policy.OFF)
    first_pass = pays_from(chosen, off)
    than = "" if first_pass is None else f"; off takes less for fewer than {first_pass:,} passes"
    return [("use", f"{chosen.policy}: {chosen.options}{than}")]


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
    go_on: Path | None = typer.Option(  # noqa: B008
        None, "--continue", metavar="PATH", help="Run what a folder of recompiles' lacks, and report all of it."
    ),
    run_limit: float = typer.Option(
        600.0, min=1.0, metavar="X", show_default=False, help="Seconds for each policy. (default: 600)"
    ),
    **given: Any,
) -> Action:
    """Replay the inputs' mix of lengths under policies of torch.compile, and say which to use.

    Each policy runs in processes of its own with an empty compiler cache. Exit code 0 if all of them finished, else 1.
    """
    own = {"policies": policies, "buckets": buckets, "multiple": multiple, "num_passes": num_passes}
    limits = RunLimits(each=run_limit, total=None, at_once=None)
    if go_on is not None:
        return going_on("recompiles", go_on, {**own, **given}, limits)
    words = list(NAMES) if policies is None else [word.strip() for word in policies.split(",")]
    if wrong := [word for word in words if word not in NAMES]:
        raise UsageError(
            f"--policies {wrong[0]!r} is not allowed. Give some of {', '.join(NAMES)}, with commas between"
        )
    plan = RecompilesPlan(
        spec=replay_spec(given),
        policies=[policy for policy in Policy if policy is Policy.OFF or policy.value in words],
        sizes=NUM_BUCKETS if buckets is None else sizes_of(buckets),
        multiple=multiple or MULTIPLE,
        num_passes=num_passes or NUM_PASSES,
    )
    typed = [
        word for name, value in own.items() if value is not None for word in (f"--{name.replace('_', '-')}", str(value))
    ]

    def begin() -> int:
        refuse_launcher("recompiles")
        check_inputs(plan.spec.inputs)
        from replay.commands.recompiles import runs

        return runs.begin(plan, typed, limits)

    return begin
