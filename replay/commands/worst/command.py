"""Declare the options of `replay worst`: its own, and those of a replay that it does not set itself."""

from functools import partial
from pathlib import Path
from typing import Any

import typer

from replay.campaign.going_on import going_on
from replay.commands.worst.configuration import WorstPlan
from replay.options.option_parsing import Action, Toggle, replay_spec, with_options
from replay.options.spec import check_inputs
from replay.processes.launch import refuse_launcher
from replay.processes.pool import RunLimits

NUM_MEASURED = 12  # inputs
NUM_SHOWN = 10


def _serves_worst(toggle: Toggle) -> bool:
    """Does the option apply to worst? It chooses and orders the inputs itself, and judges nothing."""
    if toggle.part == "measure":
        return toggle.field in ("loss", "backward", "step", "timeout", "log_folder", "full_names")
    return toggle.part != "state" and toggle.field not in (
        *("uneven", "shuffle_inputs", "random_seed", "epochs", "order", "pick_inputs"),
    )


@partial(with_options, serves=_serves_worst)
def worst(
    measured: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
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
    show: int | None = typer.Option(None, min=0, metavar="N", help=f"Inputs to list. (default: {NUM_SHOWN})"),
    go_on: Path | None = typer.Option(  # noqa: B008
        None, "--continue", metavar="PATH", help="Run what a folder of worst's lacks, and report all of it."
    ),
    run_limit: float = typer.Option(
        1800.0, min=1.0, metavar="X", show_default=False, help="Seconds for each run. (default: 1800)"
    ),
    **given: Any,
) -> Action:
    """Rank all inputs by the time and memory that they will take, from a few that are measured.

    Says whether the largest fits this device with these options, and how far the predictions were off on inputs that
    they were not made from. Exit code 0: all fit; 1: one does not, a pass failed, or --check found an error above 5 %
    of a peak or 10 % of a time.
    """
    limits = RunLimits(each=run_limit, total=None, at_once=None)
    if go_on is not None:
        own = {"measured": measured, "check": check or None, "predict": predict or None, "show": show}
        return going_on("worst", go_on, {**own, **given}, limits)
    plan = WorstPlan(
        spec=replay_spec(given),
        num_measured=measured or NUM_MEASURED,
        num_shown=NUM_SHOWN if show is None else show,
        checks=check,
        predict=predict or [],
    )
    others = plan.others  # refuses what cannot be
    typed = ["--measured", str(measured)] if measured is not None else []
    typed += ["--check"] if check else []
    typed += [word for other in others for word in ("--predict", other.text)]

    def begin() -> int:
        refuse_launcher("worst")
        check_inputs(plan.spec.inputs)
        from replay.commands.worst import runs

        return runs.begin(plan, typed, limits)

    return begin
