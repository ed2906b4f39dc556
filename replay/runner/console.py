"""Print a run: on a terminal with a progress bar and colours; elsewhere plain lines, which are not wrapped."""

import time
from collections.abc import Mapping, Sequence
from typing import IO

from capture.progress_bar import ProgressBar
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import Pairs, damaged_files, short_names
from replay.profiling.text import holder_table, kernel_table, memory_remarks, remarks, share_table
from replay.resolution.selection import Selection
from replay.runlog.records import PassRecord
from replay.runner import text as wording
from replay.runner.result import Run

TICK_SECONDS = 0.25
MILLION = 10**6
LONG_MILLIONS = 50  # of parameters; fewer are filled within a second or two


class Console:
    """Print on rank 0, in this order: header, a line per pass, the answer, the table of passes, the summary."""

    def __init__(self, *, quiet: bool, full_names: bool = False, file: IO[str] | None = None) -> None:
        self._out = open_console(file)
        self._quiet = quiet
        self._full_names = full_names
        self._num_passes = 0
        self._bar = ProgressBar(self._out.file)
        self._next_tick = 0.0
        self._num_filled = 0

    @property
    def has_bar(self) -> bool:
        return self._out.is_terminal and not self._quiet

    def opening(self, num_filled: int, num_parameters: int) -> None:
        """Show that the actor is being opened, and that `num_filled` more of its parameters have their values."""
        self._num_filled += num_filled
        is_long = num_parameters >= LONG_MILLIONS * MILLION
        if self.has_bar and is_long and time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK_SECONDS
            num_done = min(self._num_filled, num_parameters)  # some are filled twice
            self._bar.show(num_done // MILLION, num_parameters // MILLION, "million parameters filled")

    def header(self, lines: Mapping[str, str], *, num_passes: int) -> None:
        """Print what the results belong to: model, weights, backend, device, inputs."""
        self._num_passes = num_passes
        if not self._quiet:
            self._bar.clear()
            print_pairs(self._out, list(lines.items()))
            print_line(self._out)
        self._bar = ProgressBar(self._out.file)

    def passed(self, ranks: Sequence[PassRecord]) -> None:
        """Print one pass of all ranks: in the progress bar on a terminal, otherwise as a line."""
        if self._quiet:
            return
        said, number = self._named(wording.progress(ranks)), ranks[0].index + 1
        if self.has_bar:
            self._bar.show(number, self._num_passes, said)
        else:
            print_line(self._out, f"pass {number} of {self._num_passes}: {said}")

    def finish(
        self,
        run: Run,
        selection: Selection,
        *,
        verdict: Pairs,
        saved: Pairs,
        missing: Pairs,
    ) -> None:
        """Print the answer (verdict, failures, slowest pass), the table of passes, and the summary.

        missing  what passes that ran once more should have shown and did not, and why
        """
        out, records, statistics = self._out, run.records, run.statistics
        profile, memory, ran_out = run.profile, run.memory, run.out_of_memory
        shows_passes = not self._quiet and records
        if shows_passes:
            self._bar.clear() if out.is_terminal else print_line(out)
        print_pairs(out, [(name, self._named(text)) for name, text in verdict])
        print_pairs(out, wording.not_finite(records))
        print_pairs(out, wording.failures(records))
        print_pairs(out, [] if ran_out is None else ran_out.lines(has_snapshot=memory is not None))
        print_pairs(out, damaged_files(selection.damaged))
        print_pairs(out, [(name, self._named(text)) for name, text in wording.slowest(statistics)])
        if shows_passes:
            print_line(out)
            print_table(out, wording.pass_table(records, full_names=self._full_names))
            print_line(out)
        print_pairs(out, wording.counts(statistics, all_damaged=bool(selection.damaged) and not records))
        if statistics.num_counted:
            print_table(out, wording.phase_table(statistics))
        summary = wording.summary(statistics, run.start.memory_kind) + wording.left_behind(selection)
        print_pairs(out, [(name, self._named(text)) for name, text in summary])
        if profile is not None:
            print_line(out)
            print_table(out, share_table(profile))
            print_line(out)
            print_table(out, kernel_table(profile))
            print_pairs(out, [(name, self._named(text)) for name, text in remarks(profile)])
        if memory is not None:
            print_line(out)
            print_table(out, holder_table(memory))
            print_pairs(out, [(name, self._named(text)) for name, text in memory_remarks(memory)])
        print_pairs(out, [*missing, *saved, ("log", str(run.folder))])

    def _named(self, text: str) -> str:
        return text if self._full_names else short_names(text)
