"""Declare `replay inspect`."""

from functools import partial
from pathlib import Path

import typer

from replay.options.option_parsing import CommandAction
from replay.options.spec import check_folder


def inspect(folder: Path = typer.Argument(help="Folder of captures.")) -> CommandAction:  # noqa: B008
    """Show what a folder holds: passes, ranks, shapes, damaged files."""
    return partial(_inspect, folder)


def _inspect(folder: Path) -> int:
    check_folder(folder, "Try: replay inspect inputs/sample")
    from replay.commands.inspect.inspection import inspect_folder
    from replay.commands.inspect.text import print_inspection

    inspection = inspect_folder(folder)
    print_inspection(inspection)
    return 1 if inspection.damaged else 0
