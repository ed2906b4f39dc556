"""Prints tables and lines: on a terminal, or into a file without control characters and wrapped rows."""

import sys
import time
from typing import IO

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from replay.report.text import Columns, Pairs, duration, is_text, one_line

PLAIN_WIDTH = 120
NAME_WIDTH = 11
BAR_WIDTH = 20
STYLES = {  # of a line whose name, or whose first words, are these
    **dict.fromkeys(("REPRODUCED", "EQUAL", "PASSED"), "green"),
    **dict.fromkeys(("DIFFERS", "FAILED", "WRONG", "failed", "damaged", "not finite", "incident"), "bold red"),
    **dict.fromkeys(("UNSETTLED", "CANNOT TELL", "not judged"), "yellow"),
}


def open_console(file: IO[str] | None = None) -> RichConsole:
    """Open a rich console that adds colour on a terminal, and elsewhere no control character whatever is set."""
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


class ProgressBar:
    """One line that overwrites itself on a terminal: how far the work is, and the time left. Elsewhere nothing."""

    def __init__(self, out: RichConsole) -> None:
        self._out = out
        self._began = time.monotonic()

    def show(self, num_done: int, num_all: int, text: str = "") -> None:
        """`rich.live` is not used: it refreshes from a thread, beside what is measured."""
        seconds = time.monotonic() - self._began
        filled = BAR_WIDTH * num_done // max(num_all, 1)
        left = f", {duration(seconds / num_done * (num_all - num_done))} left" if 0 < num_done < num_all else ""
        self._overwrite(f"{'#' * filled:.<{BAR_WIDTH}} {num_done} of {num_all}{left}  {text}".rstrip())

    def tick(self, text: str) -> None:
        """Show how long work of unknown length takes by now."""
        self._overwrite(f"{text}, {duration(time.monotonic() - self._began)}")

    def clear(self) -> None:
        self._overwrite("")

    def _overwrite(self, line: str) -> None:
        if self._out.is_terminal:
            width = self._out.width - 1
            self._out.print(line[:width].ljust(width), end="\r", soft_wrap=True)


def print_line(out: RichConsole, text: str = "", style: str = "") -> None:
    """Print one line. A control character, as an error message or a file name may hold, is shown as its number."""
    out.print(Text("".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text), style=style), soft_wrap=True)


def print_pairs(out: RichConsole, pairs: Pairs) -> None:
    """Print a line a pair, in the colour of what it says."""
    for name, text in pairs:
        style = STYLES.get(name) or next((style for word, style in STYLES.items() if text.startswith(word)), "")
        print_line(out, f"{name:<{NAME_WIDTH}}{one_line(text)}", style)


def print_table(out: RichConsole, columns: Columns) -> None:
    """Print a table as wide as it is: a row is one line and no name is cut; a narrower terminal wraps it."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if is_text(name) else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    unbounded = out.options.update(width=10_000)
    fitting = out.options.update(width=out.measure(table, options=unbounded).maximum)
    for segments in out.render_lines(table, fitting, pad=False):
        print_line(out, "".join(segment.text for segment in segments).rstrip())
