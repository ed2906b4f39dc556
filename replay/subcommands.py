"""Declare the subcommands of `replay`: their options, and the module that does the work.

A command is parsed before anything heavy is imported, and returns the work still to do.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import typer

from replay.diagnose.command import diagnose
from replay.given_paths import check_folder, check_log
from replay.hang.command import hang
from replay.minimise.command import minimise
from replay.mismatch.command import mismatch
from replay.option_parsing import Action
from replay.parity.command import parity
from replay.processes.launch import refuse_launcher
from replay.recompiles.command import recompiles
from replay.scan.command import scan
from replay.suite.command import suite
from replay.worst.command import worst


def inspect(folder: Path = typer.Argument(help="Folder of captures.")) -> Action:  # noqa: B008
    """Show what a folder holds: passes, ranks, shapes, damaged files."""
    return partial(_inspect, folder)


def _inspect(folder: Path) -> int:
    check_folder(folder, "Try: replay inspect inputs/sample")
    from replay.inspection.console import print_inspection
    from replay.inspection.inspection import inspect_folder

    inspection = inspect_folder(folder)
    print_inspection(inspection)
    return 1 if inspection.damaged else 0


def doctor(
    log_folder: Path = typer.Option(  # noqa: B008
        Path("logs"), metavar="PATH", show_default=False, help="Where runs would be logged. (default: logs)"
    ),
    json: Path | None = typer.Option(None, metavar="PATH", help="Write the checks into this file too."),  # noqa: B008
    time_limit: float = typer.Option(
        60.0, min=10.0, metavar="X", show_default=False, help="Seconds for all checks together. (default: 60)"
    ),
) -> Action:
    """Check what works on this machine, and say what to type where something does not. Needs no GPU and no captures.

    Exit code 0 if everything works that `replay` without options needs here, else 1.
    """
    return partial(_doctor, log_folder, json, time_limit)


def _doctor(log_folder: Path, json: Path | None, time_limit: float) -> int:
    refuse_launcher("doctor")
    from replay.doctor.report import examine

    return examine(log_folder, json, time_limit)


def compare(
    logs: list[Path] = typer.Argument(  # noqa: B008
        help="Folders that runs left in logs/, or that hold one run each. The first is the reference.",
        metavar="LOG LOG...",
    ),
    threshold: float = typer.Option(
        0.05,
        help="Exit with 1 if a loss, a row's log-probs or a gradient norm differs by more than this share of the "
        "reference's. Time and memory are shown, and decide nothing.",
    ),
    plot: Path | None = typer.Option(None, help="Draw losses and differences, as out.png (needs matplotlib)."),  # noqa: B008
    json: Path | None = typer.Option(None, help="Write every number, as out.json."),  # noqa: B008
    full_names: bool = typer.Option(False, "--full-names", help="Print names of captures whole, not as `rank0 #4`."),
) -> Action:
    """Compare runs input by input: losses, log-probs, gradient norms, time, memory.

    The runs must do the same work: the same model, weights, inputs and loss. Other code of --model or --loss, and
    another --window, are compared too, and told first. Exit code 0: within the threshold; 1: beyond it; 2: not
    comparable, with the reason.
    """
    return partial(_compare, logs, threshold, plot, json, full_names)


def _compare(logs: list[Path], threshold: float, plot: Path | None, json: Path | None, full_names: bool) -> int:
    for log in logs:
        check_log(log)
    from replay.compare.command import compare_logs

    return compare_logs(logs, threshold, plot, json, full_names=full_names)


def report(
    logs: list[Path] = typer.Argument(  # noqa: B008
        help="Folders that runs left in logs/, or that hold one run each.", metavar="LOG..."
    ),
    to: Path | None = typer.Option(  # noqa: B008
        None, metavar="PATH", show_default=False, help="The file to write. (default: report.html in the first LOG)"
    ),
) -> Action:
    """Write one HTML page of a run, with pictures, or of several beside each other. It works offline.

    Runs that failed or were cut short are shown as far as they came. The page is private as the log is: it names files.
    """
    return partial(_report, logs, to)


def _report(logs: list[Path], to: Path | None) -> int:
    for log in logs:
        check_log(log)
    from replay.run_page.command import write_report

    return write_report(logs, to)


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
