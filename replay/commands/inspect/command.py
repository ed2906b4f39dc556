"""Declare `replay inspect`."""

from functools import partial
from pathlib import Path

import typer

from replay.options.option_parsing import CommandAction, json_option
from replay.options.spec import check_folder


def inspect(
    folder: Path = typer.Argument(metavar="FOLDER", help="Folder of captures."),  # noqa: B008
    recording: int | None = typer.Option(
        None, min=1, metavar="N", help="Check the passes of recording N. Default: of the latest."
    ),
    json: bool = json_option(),
) -> CommandAction:
    """Show what a folder holds, and what checks remark on it.

    Recordings, passes, ranks, shapes, damaged files. Exit code 0; 1: a file is damaged.
    """
    return partial(_inspect, folder, recording, json)


def _inspect(folder: Path, recording: int | None, as_json: bool) -> int:
    check_folder(folder, "Try: replay inspect inputs/sample")
    from replay.commands.inspect.inspection import inspect_folder
    from replay.commands.inspect.text import print_inspection
    from replay.output.printing import print_json

    inspection = inspect_folder(folder, recording=recording)
    (print_json if as_json else print_inspection)(inspection)
    return inspection.exit_code
