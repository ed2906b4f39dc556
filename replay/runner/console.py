"""What a run says, on a terminal or into a file: off a terminal no control characters and no wrapped rows.

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
    verdict    CANNOT TELL: nothing was recorded of what the job computed. Record with reproduce=True, or a ring
    log        logs/20261121-112435-replay

File names are cut in this text alone, and there are columns for several ranks, for step, gradient norm and new graphs
where there is something to say. On a terminal each pass's line overwrites the one before. --quiet begins at `counted`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from replay.report.table import open_console, print_line, print_pairs, print_table
from replay.report.text import Pairs, damaged_files
from replay.runlog.records import PassRecord
from replay.runlog.summary import Statistics
from replay.runner import text as wording
from replay.runner.selection import Selection


class Console:
    """Rank 0's words, in this order: header, a line a pass, the table and the summary."""

    def __init__(self, *, quiet: bool, file: IO[str] | None = None) -> None:
        self._out = open_console(file)
        self._quiet = quiet
        self._num_passes = 0

    def header(self, lines: Mapping[str, str], *, num_passes: int) -> None:
        """What the numbers belong to: model, weights, backend, device, inputs."""
        self._num_passes = num_passes
        if not self._quiet:
            print_pairs(self._out, list(lines.items()))
            print_line(self._out)

    def passed(self, ranks: Sequence[PassRecord]) -> None:
        """One pass on all ranks: a line that the next overwrites on a terminal, a line of its own elsewhere."""
        if self._quiet:
            return
        line = f"pass {ranks[0].index + 1} of {self._num_passes}: {wording.progress(ranks)}"
        if self._out.is_terminal:  # no rich.live: it refreshes from a thread, beside the measurement
            self._overwrite(line)
        else:
            print_line(self._out, line)

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
        """The table of passes, what failed, the summary, the verdict, what was saved."""
        out = self._out
        if not self._quiet and records:
            self._overwrite("") if out.is_terminal else print_line(out)
            print_table(out, wording.pass_table(records))
            print_line(out)
        print_pairs(out, wording.not_finite(records))
        print_pairs(out, wording.failures(records) + damaged_files(selection.damaged))
        print_pairs(out, wording.counts(statistics))
        if statistics.num_counted:
            print_table(out, wording.phase_table(statistics))
        print_pairs(out, wording.summary(statistics, memory_kind) + wording.left_behind(selection))
        print_pairs(out, [*verdict, *saved, ("log", str(log_folder))])

    def _overwrite(self, line: str) -> None:
        width = self._out.width - 1
        self._out.print(line[:width].ljust(width), end="\r", soft_wrap=True)
