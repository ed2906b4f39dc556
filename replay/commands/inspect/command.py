"""Declare `replay inspect`."""

from functools import partial
from pathlib import Path

import typer

from replay.options.option_parsing import CommandAction
from replay.options.spec import check_folder


def inspect(
    folder: Path = typer.Argument(metavar="FOLDER", help="Folder of captures."),  # noqa: B008
    recording: int | None = typer.Option(
        None, min=1, metavar="N", help="Check the passes of recording N. Default: of the latest."
    ),
) -> CommandAction:
    """Show what a folder holds, and what checks remark on it.

    Recordings, passes, ranks, shapes, damaged files. Exit code 0; 1: a file is damaged.
    """
    return partial(_inspect, folder, recording)


def _inspect(folder: Path, recording: int | None) -> int:
    check_folder(folder, "Try: replay inspect inputs/sample")
    from replay.commands.inspect.inspection import inspect_folder
    from replay.commands.inspect.text import print_inspection

    inspection = inspect_folder(folder, recording)
    print_inspection(inspection)
    return 1 if inspection.damaged else 0
