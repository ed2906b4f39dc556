"""`replay.scan`."""

import os
from typing import TYPE_CHECKING, Literal, Unpack

from replay.campaign.campaign_options import call_command
from replay.commands.scan import command
from replay.options.run_options import RunOptions

if TYPE_CHECKING:
    from replay.commands.scan.runs import ScanResult


def scan(
    inputs: str | os.PathLike[str] | None = None,
    *,
    group: int | None = None,
    run_limit: float | None = None,
    time_limit: float | None = None,
    at_once: int | None = None,
    launcher: Literal["ray"] | None = None,
    address: str | None = None,
    continue_: str | os.PathLike[str] | None = None,
    **options: Unpack[RunOptions],
) -> "ScanResult":
    """Find the inputs that fail or hang, in groups with processes of their own, as `replay scan` does. Prints nothing.

    inputs      folder of captures; None: the sample that ships with the project
    group       inputs of a group; None: 8
    run_limit   seconds for one group; None: 600
    time_limit  seconds after which no group is started any more
    at_once     groups at the same time on each GPU, or on a CPU; None: one
    launcher, address  of a Ray cluster to run on
    continue_   a folder that a scan left, whose missing groups are run; then inputs and options are its own
    options     of the replays, as `replay scan --help-all` lists them, with `_` for `-`

    Raises UsageError for an option or a file that cannot be. On KeyboardInterrupt the ranks are ended, and the groups
    that have ended are kept for `continue_`.
    """
    own = {
        "group": group,
        "run_limit": run_limit,
        "time_limit": time_limit,
        "at_once": at_once,
        "launcher": launcher,
        "address": address,
        "continue_": continue_,
    }
    result: ScanResult = call_command(command.scan, own, {"inputs": inputs, **options})
    return result
