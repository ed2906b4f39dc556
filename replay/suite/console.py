"""Print the progress and the answer of `replay suite`."""

from typing import IO

from replay.report.table import open_console, print_line, print_pairs, print_table
from replay.report.text import Columns, Pairs


def print_suite_lines(pairs: Pairs, file: IO[str] | None = None) -> None:
    """Print lines of `replay suite` while it runs."""
    print_pairs(open_console(file), pairs)


def print_suite(columns: Columns, verdict: Pairs, file: IO[str] | None = None) -> None:
    """Print the answer of `replay suite`; see docs/suite.md."""
    out = open_console(file)
    print_line(out)
    print_table(out, columns)
    print_line(out)
    print_pairs(out, verdict)
