"""A command in one file, for tests: it counts the captures of a folder. `python -m tests.helpers.toy_command ...` is
`replay` with it.
"""

import sys
from functools import partial
from pathlib import Path

import typer

from replay.command_line import subcommands
from replay.options.option_parsing import CommandAction
from replay.options.spec import check_folder


def toy(
    folder: Path = typer.Argument(help="Folder of captures."),  # noqa: B008
    at_least: int = typer.Option(1, min=1, metavar="N", help="Exit with 1 if there are fewer than N captures."),
) -> CommandAction:
    """Count the captures of a folder.

    Exit code 0: as many as wanted; 1: fewer.
    """
    return partial(_toy, folder, at_least)


def _toy(folder: Path, at_least: int) -> int:
    check_folder(folder, "Try: replay toy inputs/sample")
    num_captures = len(list(folder.glob("*.pkl")))
    print(f"captures   {num_captures}")
    return 0 if num_captures >= at_least else 1


def main() -> int:
    subcommands.COMMANDS["check"] += (toy,)
    from replay.command_line.cli import main as replay

    return replay(sys.argv[1:])


if __name__ == "__main__":
    code = main()
    from replay.command_line.cli import leave

    leave(code)
