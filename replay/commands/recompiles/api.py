"""`replay.recompiles`."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from replay.campaign.campaign_options import call_command, join_values
from replay.commands.recompiles import command
from replay.options.run_options import RunOptions

if TYPE_CHECKING:
    from replay.commands.recompiles.runs import RecompilesResult


def recompiles(
    inputs: str | os.PathLike[str] | None = None,
    *,
    policies: Sequence[str] | None = None,
    buckets: int | Sequence[int] | None = None,
    multiple: int | None = None,
    num_passes: int | None = None,
    run_limit: float | None = None,
    continue_: str | os.PathLike[str] | None = None,
    **options: Unpack[RunOptions],
) -> "RecompilesResult":
    """Say which policy of torch.compile suits the inputs' lengths, as `replay recompiles` does. Prints nothing.

    inputs      folder of captures; None: the sample that ships with the project
    policies    which to try, of off, automatic, dynamic, static, buckets and multiple; None: all
    buckets     how many lengths the policy `buckets` pads to, or these lengths; None: 4
    multiple    tokens to a multiple of which the policy `multiple` pads; None: 128
    num_passes  of a job, over which compiling has to pay; None: 1000
    run_limit   seconds for each policy; None: 600
    continue_   a folder that recompiles left, to go on with; then inputs and options are its own
    options     of the replays, as `replay recompiles --help-all` lists them, with `_` for `-`

    Raises UsageError for an option or a file that cannot be. On KeyboardInterrupt the ranks are ended, and the policies
    that have ended are kept for `continue_`.
    """
    own = {
        "policies": join_values(policies),
        "buckets": join_values(buckets),
        "multiple": multiple,
        "num_passes": num_passes,
        "run_limit": run_limit,
        "continue_": continue_,
    }
    result: RecompilesResult = call_command(command.recompiles, own, {"inputs": inputs, **options})
    return result
