"""Declare `replay inspect`."""

from functools import partial
from pathlib import Path

import typer

from replay.options.given_paths import check_folder
from replay.options.option_parsing import Action


def inspect(folder: Path = typer.Argument(help="Folder of captures.")) -> Action:  # noqa: B008
    """Show what a folder holds: passes, ranks, shapes, damaged files."""
    return partial(_inspect, folder)


def _inspect(folder: Path) -> int:
    check_folder(folder, "Try: replay inspect inputs/sample")
    from replay.commands.inspect.console import print_inspection
    from replay.commands.inspect.inspection import inspect_folder

    inspection = inspect_folder(folder)
    print_inspection(inspection)
    return 1 if inspection.damaged else 0
