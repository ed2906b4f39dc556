"""`replay.minimise`."""

import os
from typing import TYPE_CHECKING, Unpack

from replay.campaign.campaign_options import call_command
from replay.commands.minimise import command
from replay.options.run_options import RunOptions

if TYPE_CHECKING:
    from replay.commands.minimise.runs import MinimiseResult


def minimise(
    inputs: str | os.PathLike[str] | None = None,
    *,
    processes: int | None = None,
    tries: int | None = None,
    run_limit: float | None = None,
    max_runs: int | None = None,
    parity: str | os.PathLike[str] | None = None,
    cell: str | None = None,
    redact: bool | None = None,
    continue_: str | os.PathLike[str] | None = None,
    **options: Unpack[RunOptions],
) -> "MinimiseResult":
    """Find the fewest inputs and options with which a replay fails, as `replay minimise` does. Prints nothing.

    inputs        folder of captures; None: the sample that ships with the project
    processes     of the replay that fails; None: tp x ring
    tries         runs to see it fail, at most; None: 3
    run_limit     seconds for one run; what has not ended then hangs; None: 600
    max_runs      runs of the search, at most; None: 40
    parity, cell  a folder that parity left, and the name of its cell that DIFFERS: what that differs in is minimised
    redact        take the text out of the inputs, if they still fail so
    continue_     a folder that minimise left, to go on with; then inputs and options are its own
    options       of the replay that fails, as `replay minimise --help-all` lists them, with `_` for `-`

    Raises UsageError for an option or a file that cannot be. On KeyboardInterrupt the ranks are ended, and the trials
    that have ended are kept for `continue_`.
    """
    own = {
        "processes": processes,
        "tries": tries,
        "run_limit": run_limit,
        "max_runs": max_runs,
        "parity": parity,
        "cell": cell,
        "redact": redact,
        "continue_": continue_,
    }
    result: MinimiseResult = call_command(command.minimise, own, {"inputs": inputs, **options})
    return result
