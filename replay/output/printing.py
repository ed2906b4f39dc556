"""Print tables and lines, on a terminal or into a file without control characters and wrapped rows."""

import json
import os
import sys
from typing import IO, Any, Protocol

from rich.console import Console as RichConsole
from rich.text import Text

from replay.output.text import Columns, Pairs, escape_control_characters, format_table, join_lines, judge_line

PLAIN_WIDTH = 120
NAME_WIDTH = 11
STYLES = {"good": "green", "bad": "bold red", "open": "yellow", "": ""}


def open_console(file: IO[str] | None = None) -> RichConsole:
    """Open a rich console with colour on a terminal, and elsewhere without control characters, whatever is set."""
    is_terminal = (file if file is not None else sys.stdout).isatty()
    return RichConsole(
        file=file,
        force_terminal=is_terminal,
        color_system="auto" if is_terminal else None,
        width=None if is_terminal else PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_line(out: RichConsole, text: str = "", style: str = "") -> None:
    """Print one line. Control characters are shown as their numbers."""
    out.print(Text(escape_control_characters(text), style=style), soft_wrap=True)


def print_pairs(out: RichConsole, pairs: Pairs) -> None:
    """Print a line per pair, coloured by its content. A name that is too long for its column moves its text alone."""
    for name, text in pairs:
        column = name.ljust(NAME_WIDTH) if len(name) < NAME_WIDTH else f"{name}  "
        print_line(out, f"{column}{join_lines(text)}", STYLES[judge_line((name, text))])


def print_table(out: RichConsole, columns: Columns) -> None:
    """Print a table at its full width; a narrower terminal wraps it."""
    for line in format_table(columns):
        print_line(out, line)


class Result(Protocol):
    """What a command comes to."""

    def to_dict(self) -> dict[str, Any]: ...


def print_json(result: Result) -> None:
    """Print the fields of a result as one line of strict JSON, for --json: nothing else is on the standard output."""
    print(json.dumps(result.to_dict(), allow_nan=False), flush=True)


def open_silence() -> IO[str]:
    """Open a file that keeps nothing of what is printed to it."""
    return open(os.devnull, "w", encoding="utf-8")
