"""Declare `replay report`: read the logs, write the page."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from replay.commands.report.writing import FILE_NAME
from replay.options.option_parsing import CommandAction, json_option


def report(
    logs: list[Path] = typer.Argument(  # noqa: B008
        help="Folders that runs left in logs/, or that hold one run each.", metavar="LOG..."
    ),
    to: Path | None = typer.Option(  # noqa: B008
        None, metavar="FILE", show_default=False, help=f"The file to write. (default: {FILE_NAME} in the first LOG)"
    ),
    json: bool = json_option(),
) -> CommandAction:
    """Write one HTML page of a run, or of several.

    It has pictures, and works offline. Runs that failed or were cut short are shown as far as they came. The page
    is private as the log is: it names files.
    """
    return partial(_report, logs, to, json)


def _report(logs: Sequence[Path], to: Path | None, as_json: bool) -> int:
    from replay.commands.report.writing import print_report, write_report

    report = write_report(*logs, to=to)
    # Printing needs rich, for which a folder that is not there does not have to wait.
    from replay.output.printing import print_json

    (print_json if as_json else print_report)(report)
    return report.exit_code
