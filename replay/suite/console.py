"""Print the progress and the answer of `replay suite`."""

from typing import IO

from capture.progress_bar import ProgressBar
from replay.report.printing import open_console, print_line, print_pairs, print_table
from replay.report.text import Columns, Pairs


class SuiteConsole:
    def __init__(self, file: IO[str] | None = None) -> None:
        self._out = open_console(file)
        self._bar = ProgressBar(self._out.file)

    def say(self, lines: Pairs) -> None:
        """Print lines of `replay suite` while it runs."""
        self._bar.clear()
        print_pairs(self._out, lines)

    def trained(self, num_done: int, num_all: int) -> None:
        """Show, in a progress bar, how many of the configurations to train are done."""
        self._bar.show(num_done, num_all, "configurations trained")

    def finish(self, columns: Columns, verdict: Pairs) -> None:
        """Print the answer of `replay suite`; see docs/suite.md."""
        self._bar.clear()
        print_line(self._out)
        print_table(self._out, columns)
        print_line(self._out)
        print_pairs(self._out, verdict)
