"""Register the subcommands of `replay`. To add one, write a file that declares it, and one entry here.

A command is a function with the name that people type: its parameters are its options, its docstring the text of
--help. It is called while the command line is parsed, before anything heavy is imported, and returns the work still to
do, which gives the exit code.
"""

from collections.abc import Callable

from replay.commands.check_upgrade.command import check_upgrade
from replay.commands.compare.command import compare
from replay.commands.diagnose.command import diagnose
from replay.commands.doctor.command import doctor
from replay.commands.hang.command import hang
from replay.commands.inspect.command import inspect
from replay.commands.minimise.command import minimise
from replay.commands.mismatch.command import mismatch
from replay.commands.parity.command import parity
from replay.commands.recompiles.command import recompiles
from replay.commands.report.command import report
from replay.commands.scan.command import scan
from replay.commands.suite.command import suite
from replay.commands.worst.command import worst
from replay.options.option_parsing import CommandAction

# By the heading that --help lists them under.
COMMANDS: dict[str, tuple[Callable[..., CommandAction], ...]] = {
    "judge": (compare, parity, mismatch, report),
    "find": (inspect, hang, scan, minimise),
    "cost": (worst, recompiles),
    "check": (doctor, check_upgrade, diagnose, suite),
}
