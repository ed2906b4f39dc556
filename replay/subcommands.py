"""Register the subcommands of `replay`. To add one, write a file that declares it, and one entry here.

A command is a function with the name that people type: its parameters are its options, its docstring the text of
--help. It is called while the command line is parsed, before anything heavy is imported, and returns the work still to
do, which gives the exit code.
"""

from collections.abc import Callable

from replay.compare.command import compare
from replay.diagnose.command import diagnose
from replay.doctor.command import doctor
from replay.hang.command import hang
from replay.inspection.command import inspect
from replay.minimise.command import minimise
from replay.mismatch.command import mismatch
from replay.option_parsing import Action
from replay.parity.command import parity
from replay.recompiles.command import recompiles
from replay.run_page.command import report
from replay.scan.command import scan
from replay.suite.command import suite
from replay.worst.command import worst

COMMANDS: tuple[Callable[..., Action], ...] = (
    inspect,
    compare,
    report,
    parity,
    scan,
    worst,
    recompiles,
    hang,
    minimise,
    suite,
    diagnose,
    mismatch,
    doctor,
)
