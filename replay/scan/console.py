"""Print the progress and the answer of `replay scan`: a line per group as it ends, then what failed or differs.

groups     4 of 8 inputs, in processes of their own
1 of 4, inputs 1 to 8: REPRODUCED, 8 REPRODUCED, 9.3 s
"""

from collections import Counter
from typing import IO

from capture.progress_bar import ProgressBar
from replay.report.printing import open_console, print_line, print_pairs
from replay.report.text import counted
from replay.scan.state import FILE, Group, ScanLog, State


class ScanConsole:
    def __init__(self, log: ScanLog, file: IO[str] | None = None) -> None:
        self._out = open_console(file)
        self._log = log
        sizes = f"{counted(len(log.groups), 'group')} of at most {counted(log.groups[0].size, 'input')}"
        print_pairs(
            self._out, [("command", log.command), ("device", log.machine.text), ("groups", sizes), *_damaged(log)]
        )
        print_line(self._out)
        self._bar = ProgressBar(self._out.file)
        self._num_settled = self._settled  # before this invocation

    @property
    def _settled(self) -> int:
        return sum(group.state is not State.PENDING for group in self._log.groups)

    def ended(self, group: Group, num_running: int) -> None:
        self._bar.clear()
        seconds = f", {group.seconds:.1f} s" if group.seconds is not None else ""
        number = self._log.groups.index(group) + 1
        print_line(self._out, f"{number} of {len(self._log.groups)}, {_inputs(group)}: {_said(group)}{seconds}")
        num_failed = sum(one.state is State.FAILED for one in self._log.groups)
        note = f"{num_running} running, {num_failed} failed"
        self._bar.show(self._settled - self._num_settled, len(self._log.groups) - self._num_settled, note)

    def finish(self) -> None:
        """Print what failed or differs, how many groups came out how, and how to go on."""
        self._bar.clear()
        log = self._log
        print_line(self._out)
        failed = [("failed", f"{_inputs(one)}: {one.said}") for one in log.groups if one.state is State.FAILED]
        counts = Counter(one.outcome or one.state.value for one in log.groups)
        print_pairs(
            self._out,
            [
                *_damaged(log),
                *failed,
                ("written", str(log.folder / FILE)),
                ("result", ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())),
                *([("go on", f"replay scan --continue {log.folder}")] if any(log.pending()) else []),
            ],
        )


def _inputs(group: Group) -> str:
    return f"inputs {group.first + 1} to {group.first + group.size}"


def _said(group: Group) -> str:
    return f"{group.outcome}, {group.said}" if group.outcome else f"failed: {group.said}"


def _damaged(log: ScanLog) -> list[tuple[str, str]]:
    return [("damaged", text) for text in log.damaged]
