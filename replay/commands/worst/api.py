"""`replay.worst`."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from replay.campaign.campaign_options import call_command
from replay.commands.worst import command
from replay.options.run_options import RunOptions

if TYPE_CHECKING:
    from replay.commands.worst.runs import WorstResult


def worst(
    inputs: str | os.PathLike[str] | None = None,
    *,
    measured: int | None = None,
    check: bool | None = None,
    predict: Sequence[str] | None = None,
    run_limit: float | None = None,
    continue_: str | os.PathLike[str] | None = None,
    **options: Unpack[RunOptions],
) -> "WorstResult":
    """Rank all inputs by the time and memory that they will take, as `replay worst` does. Prints nothing.

    inputs     folder of captures; None: the sample that ships with the project
    measured   inputs to measure; None: 12
    check      then run the worst ones and some at random, and compare them with what was predicted
    predict    other configurations to predict, such as `num-layers=32,ranks=8`
    run_limit  seconds for each run; None: 1800
    continue_  a folder that worst left, to go on with; then inputs and options are its own
    options    of the replays, as `replay worst --help-all` lists them, with `_` for `-`

    Raises UsageError for an option or a file that cannot be, and where no pass could be measured. On KeyboardInterrupt
    the ranks are ended, and what was measured is kept for `continue_`.
    """
    own = {
        "measured": measured,
        "check": check,
        "predict": predict,
        "show": None,
        "run_limit": run_limit,
        "continue_": continue_,
    }
    result: WorstResult = call_command(command.worst, own, {"inputs": inputs, **options})
    return result
