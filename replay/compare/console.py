"""Print the answer to `replay compare`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from replay.compare import text as compare_wording
from replay.compare.differences import Comparison
from replay.report.table import open_console, print_line, print_pairs, print_table
from replay.runlog.reader import PastRun

if TYPE_CHECKING:  # logs without traces are compared without torch
    from replay.tracing.first_difference import Parted


def print_comparison(
    names: Sequence[str],
    runs: Sequence[PastRun],
    differing: Mapping[str, Sequence[str]],
    comparisons: Sequence[Comparison],
    threshold: float,
    parted: "Parted",
    *,
    written: Sequence[Path],
    file: IO[str] | None = None,
) -> None:
    """Print the answer to `replay compare`; file names are cut here alone.

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
