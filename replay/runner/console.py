"""Print a run. Output that is no terminal gets no control characters and no wrapped rows.

    $ replay --max-inputs 3 | cat
    model      inputs/sample/actor.json, 4 layers, 0.2187 M parameters; weights random, seed 0
    backend    deepspeed, ZeRO stage 1, bf16, packed, attention sdpa, optimizer adamw
    device     1 x CPU
    inputs     3 inputs from inputs/sample, rank by rank in recorded order

    pass 1 of 3: forward 307.3 ms, backward 540.3 ms, loss 5.64528, warm-up, actor_inputs_[...]_00000004.pkl
    pass 2 of 3: forward 1,364.6 ms, backward 2,672.6 ms, loss 5.62902, actor_inputs_[...]_00000005.pkl
    pass 3 of 3: forward 448.5 ms, backward 640.7 ms, loss 5.65852, actor_inputs_[...]_00000006.pkl

    pass  input              rows  padded   real  forward ms  backward ms  forward GiB  backward GiB     loss  note
       1  [...]_00000004.pkl    2     172    132       307.3        540.3        0.423         0.437  5.64528  warm-up
       2  [...]_00000005.pkl    2   1,824  1,783     1,364.6      2,672.6        0.488         0.503  5.62902
       3  [...]_00000006.pkl    2     896    499       448.5        640.7        0.480         0.481  5.65852

    counted    2 of 3 passes; left out: 1 warm-up
              median ms   p95 ms  peak GiB
    forward       906.6  1,318.8     0.488
    backward    1,656.7  2,571.0     0.503
    pass        2,563.2  3,889.9     0.503
    speed      445 real tokens/s
    padding    16.1% of the inputs' tokens
    slowest    4,037.3 ms, pass 2, rank 0, actor_inputs_[...]_00000005.pkl
    peak       0.503 GiB, resident set (VmHWM), pass 2, rank 0, actor_inputs_[...]_00000005.pkl
    left out   4 passes of the other kind (see --passes)
    verdict    CANNOT TELL: nothing was recorded of what the job computed. [...]
    log        logs/20261121-112435-replay

File names are shortened in this example only. Columns for ranks, step, gradient norm and new graphs appear where there
is something to show. On a terminal a progress bar replaces the line per pass. --quiet prints from `counted` on.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from replay.report.table import ProgressBar, open_console, print_line, print_pairs, print_table
from replay.report.text import Pairs, damaged_files, short_names
from replay.runlog.records import PassRecord
from replay.runlog.summary import Statistics
from replay.runner import text as wording
from replay.runner.selection import Selection

TICK_SECONDS = 0.25


class Console:
    """Print on rank 0, in this order: header, a line per pass, the answer, the table of passes, the summary."""

    def __init__(self, *, quiet: bool, full_names: bool = False, file: IO[str] | None = None) -> None:
        self._out = open_console(file)
        self._quiet = quiet
        self._full_names = full_names
        self._num_passes = 0
        self._bar = ProgressBar(self._out)
        self._next_tick = 0.0

    def opening(self) -> None:
        """Show that the actor is being opened. Called repeatedly while weights are filled."""
        if not self._quiet and time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK_SECONDS
            self._bar.tick("opening the actor")

    def header(self, lines: Mapping[str, str], *, num_passes: int) -> None:
        """Print what the results belong to: model, weights, backend, device, inputs."""
        self._num_passes = num_passes
        if not self._quiet:
            self._bar.clear()
            print_pairs(self._out, list(lines.items()))
            print_line(self._out)
        self._bar = ProgressBar(self._out)

    def passed(self, ranks: Sequence[PassRecord]) -> None:
        """Print one pass of all ranks: in the progress bar on a terminal, otherwise as a line."""
        if self._quiet:
            return
        said, number = self._named(wording.progress(ranks)), ranks[0].index + 1
        if self._out.is_terminal:
            self._bar.show(number, self._num_passes, said)
        else:
            print_line(self._out, f"pass {number} of {self._num_passes}: {said}")

    def finish(
        self,
        records: Sequence[PassRecord],
        statistics: Statistics,
        selection: Selection,
        log_folder: Path,
        *,
        memory_kind: str,
        verdict: Pairs,
        saved: Pairs,
    ) -> None:
        """Print the answer (verdict, failures, slowest pass), the table of passes, and the summary."""
        out = self._out
        shows_passes = not self._quiet and records
        if shows_passes:
            self._bar.clear() if out.is_terminal else print_line(out)
        print_pairs(out, [(name, self._named(text)) for name, text in verdict])
        print_pairs(out, wording.not_finite(records))
        print_pairs(out, wording.failures(records) + damaged_files(selection.damaged))
        print_pairs(out, [(name, self._named(text)) for name, text in wording.slowest(statistics)])
        if shows_passes:
            print_line(out)
            print_table(out, wording.pass_table(records, full_names=self._full_names))
            print_line(out)
        print_pairs(out, wording.counts(statistics))
        if statistics.num_counted:
            print_table(out, wording.phase_table(statistics))
        summary = wording.summary(statistics, memory_kind) + wording.left_behind(selection)
        print_pairs(out, [(name, self._named(text)) for name, text in summary])
        print_pairs(out, [*saved, ("log", str(log_folder))])

    def _named(self, text: str) -> str:
        return text if self._full_names else short_names(text)
