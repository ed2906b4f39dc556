"""Print tables and lines, on a terminal or into a file without control characters and wrapped rows."""

import sys
from typing import IO

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from replay.report.text import Columns, Pairs, is_text, one_line

PLAIN_WIDTH = 120
NAME_WIDTH = 11
STYLES = {  # by a line's name or first words
    **dict.fromkeys(("REPRODUCED", "EQUAL", "PASSED"), "green"),
    **dict.fromkeys(("DIFFERS", "FAILED", "WRONG", "failed", "damaged", "not finite", "incident"), "bold red"),
    **dict.fromkeys(("UNSETTLED", "CANNOT TELL", "not judged"), "yellow"),
}


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
    """Print one line. Control characters, as in error messages or file names, are shown as their numbers."""
    out.print(Text("".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text), style=style), soft_wrap=True)


def print_pairs(out: RichConsole, pairs: Pairs) -> None:
    """Print a line per pair, coloured by its content."""
    for name, text in pairs:
        style = STYLES.get(name) or next((style for word, style in STYLES.items() if text.startswith(word)), "")
        print_line(out, f"{name:<{NAME_WIDTH}}{one_line(text)}", style)


def print_table(out: RichConsole, columns: Columns) -> None:
    """Print a table at its full width: a row is one line and no name is cut; a narrower terminal wraps it."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if is_text(name) else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    unbounded = out.options.update(width=10_000)
    fitting = out.options.update(width=out.measure(table, options=unbounded).maximum)
    for segments in out.render_lines(table, fitting, pad=False):
        print_line(out, "".join(segment.text for segment in segments).rstrip())
