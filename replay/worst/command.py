"""Declare the options of `replay worst`: its own, and those of a replay that it does not set itself."""

from functools import partial
from typing import Any

import typer

from replay.given_paths import check_inputs
from replay.option_parsing import Action, Toggle, replay_spec, with_options
from replay.processes.launch import refuse_launcher
from replay.worst.configuration import parsed

NUM_MEASURED = 12  # inputs


def _serves_worst(toggle: Toggle) -> bool:
    """Does the option apply to worst? It chooses and orders the inputs itself, and judges nothing."""
    if toggle.part == "measure":
        return toggle.field in ("loss", "backward", "step", "timeout", "log_folder", "full_names")
    return toggle.part != "state" and toggle.field not in (
        *("uneven", "shuffle_inputs", "random_seed", "epochs", "order", "pick_inputs"),
    )


@partial(with_options, serves=_serves_worst)
def worst(
    measured: int = typer.Option(
        NUM_MEASURED,
        min=1,
        metavar="N",
        show_default=False,
        help=f"Inputs to measure, from the smallest to the largest. (default: {NUM_MEASURED})",
    ),
    check: bool = typer.Option(
        False, "--check", help="Then run the worst ones and some at random, and compare them with what was predicted."
    ),
    predict: list[str] | None = typer.Option(  # noqa: B008
        None,
        metavar="NAME=N,...",
        help="Also predict another configuration, from num-layers, zero-stage, ranks (of data), tp and ring, as "
        "--predict num-layers=32,ranks=8. May be given more than once.",
    ),
    show: int = typer.Option(10, min=0, metavar="N", show_default=False, help="Inputs to list. (default: 10)"),
    run_timeout: float = typer.Option(
        1800.0, min=1.0, metavar="X", show_default=False, help="Seconds for each run. (default: 1800)"
    ),
    **given: Any,
) -> Action:
    """Rank all inputs by the time and memory that they will take, from a few that are measured.

    Says whether the largest fits this device with these options, and how far the predictions were off on inputs that
    they were not made from. Exit code 0: all fit; 1: one does not, a pass failed, or --check found an error above 5 %
    of a peak or 10 % of a time.
    """
    spec = replay_spec(given)
    others = [parsed(text, spec.actor) for text in predict or []]
    typed = ["--measured", str(measured)] if measured != NUM_MEASURED else []
    typed += ["--check"] if check else []
    typed += [word for text in predict or [] for word in ("--predict", text)]

    def rank_inputs() -> int:
        refuse_launcher("worst")
        check_inputs(spec.inputs)
        from replay.worst import report

        settings = report.Settings(num_measured=measured, num_shown=show, limit=run_timeout, checks=check, typed=typed)
        return report.rank_inputs(spec, settings, others)

    return rank_inputs
