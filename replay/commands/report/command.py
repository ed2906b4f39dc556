"""Declare `replay report`: read the logs, write the page."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from actor_init.spec import UsageError
from replay.options.option_parsing import CommandAction
from replay.options.spec import check_log

FILE_NAME = "report.html"


def report(
    logs: list[Path] = typer.Argument(  # noqa: B008
        help="Folders that runs left in logs/, or that hold one run each.", metavar="LOG..."
    ),
    to: Path | None = typer.Option(  # noqa: B008
        None, metavar="FILE", show_default=False, help=f"The file to write. (default: {FILE_NAME} in the first LOG)"
    ),
) -> CommandAction:
    """Write one HTML page of a run, or of several.

    It has pictures, and works offline. Runs that failed or were cut short are shown as far as they came. The page
    is private as the log is: it names files.
    """
    return partial(_report, logs, to)


def _report(logs: Sequence[Path], to: Path | None) -> int:
    for log in logs:
        check_log(log)
    from replay.commands.report.page import describe_changes, render_page
    from replay.output.printing import open_console, print_pairs
    from replay.output.text import MAX_RUNS
    from replay.runner.result import Run

    if len(logs) > MAX_RUNS:
        raise UsageError(f"at most {MAX_RUNS} logs fit on one page, not {len(logs)}. Try: replay report LOG LOG")
    runs = [Run.read(log) for log in logs]
    path = to or runs[0].folder / FILE_NAME
    try:
        path.write_text(render_page(runs, describe_changes(runs), path.parent), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}. Give a file that can be written, as --to report.html") from error
    problems = [("problem", f"{run.folder.name}: {text}") for run in runs for text in run.problems]
    print_pairs(open_console(None), [*problems, ("report", str(path))])
    return 0
