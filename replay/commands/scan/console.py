"""Print the progress and the answer of `replay scan`: a line per group as it ends, then what failed or differs.

groups     4 of 8 inputs, in processes of their own
1 of 4, inputs 1 to 8: REPRODUCED, 8 REPRODUCED, 9.3 s
"""

from collections import Counter
from collections.abc import Sequence
from typing import IO

from capture.progress_bar import ProgressBar
from replay.campaign.campaign import Campaign
from replay.commands.scan.plan import Group, ScanPlan, State
from replay.output.printing import open_console, print_line, print_pairs
from replay.output.text import counted


class ScanConsole:
    def __init__(self, campaign: Campaign[ScanPlan], groups: Sequence[Group], file: IO[str] | None = None) -> None:
        """Print the header. `groups` are all of them, as they stand whenever something is printed."""
        self._out = open_console(file)
        self._campaign = campaign
        self._groups = groups
        sizes = f"{counted(len(groups), 'group')} of at most {counted(groups[0].size, 'input')}"
        device = campaign.machine.text
        print_pairs(self._out, [("command", campaign.command), ("device", device), ("groups", sizes), *self._damaged()])
        print_line(self._out)
        self._bar = ProgressBar(self._out.file)
        self._num_new = 0
        self._num_known = 0  # that an earlier invocation ran

    def ended(self, number: int, group: Group, *, is_new: bool) -> None:
        """Print a group's line, unless an earlier invocation did."""
        self._num_new += is_new
        self._num_known += not is_new
        if not is_new:
            return
        self._bar.clear()
        seconds = f", {group.seconds:.1f} s" if group.seconds is not None else ""
        total = len(self._groups)
        print_line(self._out, f"{number + 1} of {total}, {_inputs(group)}: {_said(group)}{seconds}")
        num_failed = sum(group.state is State.FAILED for group in self._groups)
        note = f"{self._campaign.num_running} running, {num_failed} failed"
        self._bar.show(self._num_new, total - self._num_known, note)

    def finish(self) -> None:
        """Print what failed or differs, how many groups came out how, and how to go on."""
        self._bar.clear()
        print_line(self._out)
        groups = self._groups
        failed = [("failed", f"{_inputs(group)}: {group.said}") for group in groups if group.state is State.FAILED]
        counts = Counter(group.outcome or group.state.value for group in groups)
        is_open = any(group.state is State.PENDING for group in groups)
        print_pairs(
            self._out,
            [
                *self._damaged(),
                *failed,
                ("written", str(self._campaign.path)),
                ("result", ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())),
                *([("go on", f"replay scan --continue {self._campaign.folder}")] if is_open else []),
            ],
        )

    def _damaged(self) -> list[tuple[str, str]]:
        return [("damaged", text) for text in self._campaign.plan.damaged]


def _inputs(group: Group) -> str:
    return f"inputs {group.first + 1} to {group.first + group.size}"


def _said(group: Group) -> str:
    return f"{group.outcome}, {group.said}" if group.outcome else f"failed: {group.said}"
