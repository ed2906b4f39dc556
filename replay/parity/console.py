"""Print the progress and the answer of `replay parity`: a line per run as it ends, then the tables.

command    replay parity --matrix quick
device     2 processes at most, cpu
runs       25: 3 references, 10 equivalents, 12 cells

1 of 25, fsdp2 fp32 padded sdpa: the reference, 9.3 s
2 of 25, fsdp2 fp32 padded sdpa, again: the same again, loss 0, log-probs 0, gradient norm 0, 9.2 s
"""

from collections.abc import Sequence
from pathlib import Path
from typing import IO

from capture.progress_bar import ProgressBar
from replay.parity import text as parity_wording
from replay.parity.results import MatrixResult
from replay.parity.rows import ParityLog, Row, State
from replay.report.printing import open_console, print_line, print_pairs, print_table
from replay.report.text import Pairs


class ParityProgress:
    def __init__(self, log: ParityLog, file: IO[str] | None = None) -> None:
        self._out = open_console(file)
        self._log = log
        print_pairs(self._out, parity_wording.header(log))
        print_line(self._out)
        self._bar = ProgressBar(self._out.file)
        self._num_settled = num_settled(log)  # before this invocation

    def ended(self, number: int, row: Row, result: MatrixResult, num_running: int) -> None:
        self._bar.clear()
        print_line(self._out, parity_wording.ended(number, row, self._log, result))
        num_failed = sum(row.state is State.FAILED for row in self._log.rows)
        note = f"{num_running} running, {num_failed} failed"
        self._bar.show(num_settled(self._log) - self._num_settled, len(self._log.rows) - self._num_settled, note)

    def finish(self, result: MatrixResult, differences: Pairs, written: Sequence[Path], note: str) -> None:
        """Print the noise, a row per run, failures and differences, and where the results are written."""
        out = self._out
        self._bar.clear()
        for columns in (parity_wording.noise_table(result), parity_wording.cell_table(self._log, result)):
            print_line(out)
            print_table(out, columns)
        print_line(out)
        print_pairs(out, parity_wording.failures(self._log, result) + differences)
        print_pairs(out, [("note", note)] if note else [])
        print_pairs(out, [("written", str(path)) for path in written])
        print_pairs(out, parity_wording.summary(self._log, result))


def num_settled(log: ParityLog) -> int:
    """Count the runs that have ended or will not be made."""
    return sum(row.state is not State.PENDING for row in log.rows)
