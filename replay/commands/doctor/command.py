"""Declare `replay doctor`."""

from functools import partial
from pathlib import Path

import typer

from replay.options.option_parsing import CommandAction, json_option


def doctor(
    log_folder: Path = typer.Option(  # noqa: B008
        Path("logs"),
        "-o",
        "--log-folder",
        metavar="FOLDER",
        show_default=False,
        help="Where runs would be logged. (default: logs)",
    ),
    time_limit: float = typer.Option(
        60.0, min=10.0, metavar="SECONDS", show_default=False, help="For all checks together. (default: 60)"
    ),
    json: bool = json_option(),
) -> CommandAction:
    """Check what works on this machine.

    Says what to type where something does not. Needs no GPU and no captures. Exit code 0 if everything works that
    `replay` without options needs here, else 1.
    """
    return partial(_doctor, log_folder, time_limit, json)


def _doctor(log_folder: Path, time_limit: float, as_json: bool) -> int:
    from replay.commands.doctor.report import examine_machine, print_answer, print_group

    on_group = None if as_json else print_group
    report = examine_machine(log_folder=log_folder, time_limit=time_limit, on_group=on_group)
    print_answer(report, as_json=as_json)
    return report.exit_code
