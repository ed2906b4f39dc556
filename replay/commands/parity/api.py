"""`replay.parity`."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Unpack

from replay.campaign.campaign_options import call_command
from replay.commands.parity import command
from replay.options.run_options import RunOptions

if TYPE_CHECKING:
    from replay.commands.parity.runs import ParityResult


def parity(
    inputs: str | os.PathLike[str] | None = None,
    *,
    matrix: str | os.PathLike[str] | None = None,
    processes: int | None = None,
    run_limit: float | None = None,
    time_limit: float | None = None,
    at_once: int | None = None,
    first_difference: bool | None = None,
    python: Sequence[str] | None = None,
    launcher: Literal["ray"] | None = None,
    address: str | None = None,
    continue_: str | os.PathLike[str] | None = None,
    **options: Unpack[RunOptions],
) -> "ParityResult":
    """Say which of many configurations agree on the same inputs, as `replay parity` does. Prints nothing.

    inputs      folder of captures; None: the sample that ships with the project
    matrix      `quick`, `pairs`, `full` or a TOML file; None: `quick`
    processes   of one run at most; None: the GPUs, or 2 on a CPU
    run_limit   seconds for one run; None: 600
    time_limit  seconds after which no run is started any more
    at_once     runs at the same time, with so many processes on each GPU; None: one run, whose passes are timed
    first_difference   run what differs again, traced, and name the first layer and tensor
    python      interpreters of environments to run the matrix in; the first one's runs are the references
    launcher, address  of a Ray cluster to run on
    continue_   a folder that parity left, whose missing runs are made; then inputs, matrix and options are its own
    options     of all replays, or, where the matrix varies them, those to select; see `replay parity --help-all`

    Raises UsageError for an option or a file that cannot be. On KeyboardInterrupt the ranks are ended, and the runs
    that have ended are kept for `continue_`.
    """
    own = {
        "matrix": matrix,
        "processes": processes,
        "run_limit": run_limit,
        "time_limit": time_limit,
        "at_once": at_once,
        "first_difference": first_difference,
        "python": python,
        "launcher": launcher,
        "address": address,
        "continue_": continue_,
    }
    result: ParityResult = call_command(command.parity, own, {"inputs": inputs, **options})
    return result
