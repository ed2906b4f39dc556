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
    verdict    CANNOT TELL: nothing was recorded of what the job computed. [...]
    log        logs/20261121-112435-replay

File names and the verdict are cut in this text alone, and there are columns for several ranks, for step, gradient norm
and new graphs where there is something to say. On a terminal each pass's line overwrites the one before. --quiet begins
at `counted`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from rich.console import Console as RichConsole
from rich.table import Table

from replay.compare import text as compare_wording
from replay.compare.differences import Comparison
from replay.inspection.folder_facts import FolderFacts
from replay.report import text as wording
from replay.report.text import Columns, Pairs
from replay.runlog.reader import PastRun
from replay.runlog.records import PassRecord
from replay.runlog.summary import Statistics
from replay.runner.selection import Selection
from replay.tracing.first_difference import Parted

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
        print_pairs(out, wording.failures(records) + wording.damaged_files(selection.damaged))
        print_pairs(out, wording.counts(statistics))
        if statistics.num_counted:
            print_table(out, wording.phase_table(statistics))
        print_pairs(out, wording.summary(statistics, memory_kind) + wording.left_behind(selection))
        print_pairs(out, [*verdict, *saved, ("log", str(log_folder))])

    def _overwrite(self, line: str) -> None:
        width = self._out.width - 1
        self._out.print(line[:width].ljust(width), end="\r", soft_wrap=True)


def print_inspection(facts: FolderFacts, file: IO[str] | None = None) -> None:
    """The answer to `replay inspect`.

    folder     inputs/sample
    model      llama, layers 4, hidden 64, vocabulary 264
    files      40 of format 1
    time       2026-11-21T11:20:04.571116+00:00 to 2026-11-21T11:20:09.133124+00:00
    versions   python 3.11.7, torch 2.13.0+cpu, transformers 5.23.0

    passes   files  ranks  rows        row length  padded    real  share  action
    train       32  0, 1      2  82 / 623.5 / 978  37,446  27,142  72.5%  21,556
    rollout      8  0, 1      4              1024  32,768  13,571  41.4%  10,778

    longest    actor_inputs_rank0_20261121_112004_571116_00000000.pkl: 4 rows of 1024, 1,522 tokens real

    Incidents that a recording noted come first:

    incident   rank 0, forward 6, 2026-11-21T11:20:09.133124+00:00: not finite, loss: loss is nan; 3 files for it
    """
    out = open_console(file)
    if facts.incidents or facts.in_memory is not None:
        print_pairs(out, wording.incidents(facts))
        print_line(out)
    print_pairs(out, wording.folder_facts(facts))
    if facts.kinds:
        print_line(out)
        print_table(out, wording.kind_table(facts))
    if stand_outs := wording.stand_outs(facts):
        print_line(out)
        print_pairs(out, stand_outs)
    if facts.damaged:
        print_line(out)
        print_pairs(out, wording.damaged_files(facts.damaged))


def print_comparison(
    names: Sequence[str],
    runs: Sequence[PastRun],
    differing: Mapping[str, Sequence[str]],
    comparisons: Sequence[Comparison],
    threshold: float,
    parted: Parted,
    *,
    written: Sequence[Path],
    file: IO[str] | None = None,
) -> None:
    """The answer to `replay compare`; file names are cut here alone.

    A          logs/20261121-185921-packed: the reference
    B          logs/20261121-185936-padded: 8 matched passes

    setting  A          B
    backend  deepspeed  fsdp2
    packing  yes        no

    run  quantity       matched  mean in A      mean  max diff  mean diff  max relative  at input
    B    loss                 8    5.63814   5.63814  2.57e-05   1.22e-05      4.57e-06  [...]_00000005.pkl
    B    log-probs            8   -2075.55  -2075.55    0.0461    0.00885      1.16e-05  [...]_00000010.pkl
    B    gradient norm        8    4.61785   4.61817   0.00133   0.000652        0.0003  [...]_00000004.pkl
    B    forward ms           7      130.3     118.9      70.1       32.4          1.31  [...]_00000008.pkl

    within     B: loss by 4.57e-06, log-probs by 1.16e-05, gradient norm by 0.0003 at most, threshold 0.05
    """
    out = open_console(file)
    print_pairs(out, compare_wording.compared_runs(names, runs, comparisons))
    print_line(out)
    if differing:
        print_table(out, compare_wording.setting_table(names, differing))
        print_line(out)
    print_table(out, compare_wording.difference_table(names, comparisons))
    print_line(out)
    print_pairs(out, compare_wording.remarks(names, comparisons))
    print_pairs(out, compare_wording.partings(names, parted))
    print_pairs(out, compare_wording.verdicts(names, comparisons, threshold))
    print_pairs(out, [("written", str(path)) for path in written])


def print_suite_lines(pairs: Pairs, file: IO[str] | None = None) -> None:
    """What `replay suite` says while it runs, as it happens."""
    print_pairs(open_console(file), pairs)


def print_suite(columns: Columns, verdict: Pairs, file: IO[str] | None = None) -> None:
    """The answer to `replay suite`; see docs/suite.md."""
    out = open_console(file)
    print_line(out)
    print_table(out, columns)
    print_line(out)
    print_pairs(out, verdict)


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
