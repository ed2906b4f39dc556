"""Check whether a model can learn its inputs: `replay.diagnose`."""

import os
from typing import TYPE_CHECKING, Unpack

from replay.api.running import read_whole_result, run_command
from replay.campaign.campaign_options import check_call
from replay.commands.diagnose import command
from replay.options.option_parsing import build_replay_spec
from replay.options.run_options import RunOptions

if TYPE_CHECKING:
    from replay.commands.diagnose.report import DiagnoseResult


def diagnose(
    inputs: str | os.PathLike[str] | None = None,
    *,
    steps: int | None = None,
    processes: int | None = None,
    **options: Unpack[RunOptions],
) -> "DiagnoseResult":
    """Check whether the model can learn these inputs here, as `replay diagnose` does. Prints nothing.

    A check that fails is in the result, and does not raise.

    inputs     folder of captures; None: the sample that ships with the project
    steps      for each thing to learn, at most; None: 120
    processes  how many to start, as a launcher would; None: tp x ring
    options    of the actor, as `replay diagnose --help-all` lists them, with `_` for `-`; `learning_rate` is that of
               the steps, and 4 inputs are taken on each data rank unless `max_inputs` says otherwise

    Raises UsageError for an option or a file that cannot be, or inside an open process group; RunFailedError where the
    processes ended before the last check. On KeyboardInterrupt the ranks are ended, and `replay.open` reads the checks
    that ran, from the folder that the exception's note names.
    """
    # It is an option of this command, and is checked as such.
    own = {"steps": steps, "learning_rate": options.pop("learning_rate", None)}
    values, given = check_call(command.diagnose, own, {"inputs": inputs, **options})
    spec = build_replay_spec(given)
    command.refuse_objective(spec)
    child = run_command("diagnose", values, spec, processes)
    from replay.commands.diagnose.report import FILE, DiagnoseResult

    return read_whole_result(child, FILE, DiagnoseResult.read)
