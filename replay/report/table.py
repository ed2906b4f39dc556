"""Prints tables and lines: on a terminal, or into a file without control characters and wrapped rows."""

import sys
from typing import IO

from rich.console import Console as RichConsole
from rich.table import Table

from replay.report.text import Columns, Pairs, is_text, one_line

PLAIN_WIDTH = 120
NAME_WIDTH = 11


def open_console(file: IO[str] | None = None) -> RichConsole:
    """A rich console that adds no style, and off a terminal no control character whatever the environment says."""
    is_terminal = (file if file is not None else sys.stdout).isatty()
    return RichConsole(
        file=file,
        force_terminal=is_terminal,
        color_system=None,
        width=None if is_terminal else PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_line(out: RichConsole, text: str = "") -> None:
    """One line; a control character, as an error message or a file name may hold, is shown as its number."""
    out.print("".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text), soft_wrap=True)


def print_pairs(out: RichConsole, pairs: Pairs) -> None:
    for name, text in pairs:
        print_line(out, f"{name:<{NAME_WIDTH}}{one_line(text)}")


def print_table(out: RichConsole, columns: Columns) -> None:
    """As wide as it is: a row is one line and no name is cut; a terminal that is narrower wraps it."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if is_text(name) else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    unbounded = out.options.update(width=10_000)
    fitting = out.options.update(width=out.measure(table, options=unbounded).maximum)
    for segments in out.render_lines(table, fitting, pad=False):
        print_line(out, "".join(segment.text for segment in segments).rstrip())
