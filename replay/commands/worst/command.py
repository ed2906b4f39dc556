"""Declare the options of `replay worst`: its own, and those of a replay that it does not set itself."""

from functools import partial
from pathlib import Path
from typing import Any

import typer

from replay.campaign.campaign_options import (
    continue_option,
    list_words,
    make_begin_action,
    make_continue_action,
    run_limit_option,
)
from replay.commands.worst.configuration import WorstPlan
from replay.options.option_parsing import CommandAction, DeclaredOption, add_options, build_replay_spec, json_option
from replay.processes.pool import RunLimits

NUM_MEASURED = 12  # inputs
NUM_SHOWN = 10


def _applies_to_worst(option: DeclaredOption) -> bool:
    """Does the option apply to worst? It chooses and orders the inputs itself, and judges nothing."""
    if option.part == "measure":
        return option.field in ("loss", "backward", "step", "timeout", "log_folder", "full_names")
    return option.part != "state" and option.field not in (
        *("uneven", "shuffle_inputs", "random_seed", "epochs", "order", "pick_inputs"),
    )


@partial(add_options, serves=_applies_to_worst)
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
    continue_: Path | None = continue_option("worst"),  # noqa: B008
    run_limit: float = run_limit_option("each run", seconds=1800.0),
    json: bool = json_option(),
    **given: Any,
) -> CommandAction:
    """Rank all inputs by the time and memory that they will take.

    It measures a few. Says whether the largest fits this device with these options, and how far the predictions
    were off on inputs that they were not made from. Exit code 0: all fit; 1: one does not, a pass failed, or
    --check found an error above 5 % of a peak or 10 % of a time.
    """
    limits = RunLimits(run_limit_seconds=run_limit, total_seconds=None, at_once=None)
    if continue_ is not None:
        typed_options = {
            "measured": measured,
            "check": check or None,
            "predict": predict or None,
            "show": show,
            **given,
        }
        return make_continue_action("worst", continue_, typed_options, limits, as_json=json)
    plan = WorstPlan(
        spec=build_replay_spec(given),
        num_measured=measured or NUM_MEASURED,
        num_shown=NUM_SHOWN if show is None else show,
        checks=check,
        predict=predict or [],
    )
    # Reading them refuses configurations that cannot be.
    other_configurations = plan.others
    words = list_words(
        {"measured": measured, "check": check, "predict": [other.text for other in other_configurations]}
    )
    return make_begin_action("worst", plan.spec, plan, words, limits, as_json=json)
