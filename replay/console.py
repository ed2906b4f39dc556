"""What a run says, on a terminal or into a file: off a terminal no control characters and no wrapped rows.

    model      tiny-ppo, 2 layers, 0.43 M parameters; weights random, seed 0
    backend    deepspeed, ZeRO stage 1, bf16, packed, attention sdpa, optimizer adamw
    device     1 x CPU
    inputs     3 inputs from inputs/sample, in recorded order

    pass 1 of 3: forward 31.2 ms, backward 55.0 ms, loss 9.70413, warm-up, actor_inputs_rank0_20260301_091244_...
    pass 2 of 3: forward 28.4 ms, backward 50.3 ms, loss 9.70130, actor_inputs_rank0_20260301_091245_...
    pass 3 of 3: forward 21.9 ms, backward 40.8 ms, loss 9.69871, actor_inputs_rank0_20260301_091246_...

    pass  input     rows  padded  real  forward ms  backward ms  forward GiB  backward GiB     loss  note
       1  ...a.pkl     2     512   401        31.2         55.0        0.611         0.702  9.70413  warm-up
       2  ...b.pkl     2     640   522        28.4         50.3        0.611         0.713  9.70130
       3  ...c.pkl     2     300   280        21.9         40.8        0.609         0.690  9.69871

    counted    2 of 3 passes; left out: 1 warm-up
              median ms  p95 ms  peak GiB
    forward        25.1    28.1     0.611
    backward       45.5    49.8     0.713
    pass           70.7    77.9     0.713
    speed      5,672 real tokens/s
    padding    14.7% of the inputs' tokens
    slowest    78.7 ms, pass 2, rank 0, ...b.pkl
    peak       0.713 GiB, resident set (VmHWM), pass 2, rank 0, ...b.pkl
    left out   4 passes of the other kind (see --passes)
    log        logs/20260301-091244-replay

(File names are cut here alone.) On a terminal each pass's line overwrites the one before. --quiet begins at `counted`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from rich.console import Console as RichConsole
from rich.table import Table

from replay import wording
from replay.inspection import FolderFacts
from replay.records import PassRecord
from replay.selection import Selection
from replay.summary import Statistics
from replay.wording import Columns, Pairs
from replay.wording import one_line as one_line

PLAIN_WIDTH = 120
NAME_WIDTH = 11


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
    ) -> None:
        """The table of passes, what failed, the summary."""
        out = self._out
        if not self._quiet and records:
            self._overwrite("") if out.is_terminal else print_line(out)
            print_table(out, wording.pass_table(records))
            print_line(out)
        print_pairs(out, wording.failures(records) + wording.damaged_files(selection.damaged))
        print_pairs(out, wording.counts(statistics))
        if statistics.num_counted:
            print_table(out, wording.phase_table(statistics))
        print_pairs(out, wording.summary(statistics, memory_kind) + wording.left_behind(selection))
        print_pairs(out, [("log", str(log_folder))])

    def _overwrite(self, line: str) -> None:
        width = self._out.width - 1
        self._out.print(line[:width].ljust(width), end="\r", soft_wrap=True)


def print_inspection(facts: FolderFacts, file: IO[str] | None = None) -> None:
    """The answer to `replay inspect`.

    folder     inputs/sample
    model      llama, layers 2, hidden 128, vocabulary 1024
    files      40 of format 1
    time       2026-03-01T08:12:40.120441+00:00 to 2026-03-01T08:12:44.250012+00:00
    versions   micro-replay 0.1.0, python 3.11.9, torch 2.13.0

    passes   files  ranks  rows       row length  padded   real  share  action
    train       32  0, 1      2   61 / 140 / 311   9,344  7,568  81.0%   4,211
    rollout      8  0, 1      4   80 / 152 / 320   4,890  2,151  44.0%   1,502
    """
    out = open_console(file)
    print_pairs(out, wording.folder_facts(facts))
    if facts.kinds:
        print_line(out)
        print_table(out, wording.kind_table(facts))
    if facts.damaged:
        print_line(out)
        print_pairs(out, wording.damaged_files(facts.damaged))


def open_console(file: IO[str] | None = None) -> RichConsole:
    """A rich console that adds no style, and off a terminal no control character whatever the environment says."""
    is_terminal = (file if file is not None else sys.stdout).isatty()
    return RichConsole(
        file=file,
        force_terminal=is_terminal,
        color_system=None,
        width=None if is_terminal else PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_line(out: RichConsole, text: str = "") -> None:
    """One line; a control character, as an error message or a file name may hold, is shown as its number."""
    out.print("".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text), soft_wrap=True)


def print_pairs(out: RichConsole, pairs: Pairs) -> None:
    for name, text in pairs:
        print_line(out, f"{name:<{NAME_WIDTH}}{wording.one_line(text)}")


def print_table(out: RichConsole, columns: Columns) -> None:
    """As wide as it is: a row is one line and no name is cut; a terminal that is narrower wraps it."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if wording.is_text(name) else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    unbounded = out.options.update(width=10_000)
    fitting = out.options.update(width=out.measure(table, options=unbounded).maximum)
    for segments in out.render_lines(table, fitting, pad=False):
        print_line(out, "".join(segment.text for segment in segments).rstrip())
