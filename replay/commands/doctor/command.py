"""Declare `replay doctor`."""

from functools import partial
from pathlib import Path

import typer

from replay.options.option_parsing import CommandAction
from replay.processes.launch import refuse_launcher


def doctor(
    log_folder: Path = typer.Option(  # noqa: B008
        Path("logs"),
        "-o",
        "--log-folder",
        metavar="FOLDER",
        show_default=False,
        help="Where runs would be logged. (default: logs)",
    ),
    json: Path | None = typer.Option(None, metavar="FILE", help="Write the checks into this file too."),  # noqa: B008
    time_limit: float = typer.Option(
        60.0, min=10.0, metavar="SECONDS", show_default=False, help="For all checks together. (default: 60)"
    ),
) -> CommandAction:
    """Check what works on this machine.

    Says what to type where something does not. Needs no GPU and no captures. Exit code 0 if everything works that
    `replay` without options needs here, else 1.
    """
    return partial(_doctor, log_folder, json, time_limit)


def _doctor(log_folder: Path, json: Path | None, time_limit: float) -> int:
    refuse_launcher("doctor")
    from replay.commands.doctor.report import examine

    return examine(log_folder, json, time_limit)
