"""Print the answer to `replay compare`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from replay.compare import text as compare_wording
from replay.compare.differences import Comparison
from replay.report.printing import open_console, print_line, print_pairs, print_table
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
    full_names: bool = False,
) -> None:
    """Print the answer to `replay compare`; docs/compare.md shows one."""
    out = open_console()
    print_pairs(out, compare_wording.other_work(names, comparisons))
    print_pairs(out, compare_wording.compared_runs(names, runs, comparisons))
    print_line(out)
    if differing:
        print_table(out, compare_wording.setting_table(names, differing))
        print_line(out)
    print_table(out, compare_wording.difference_table(names, comparisons, full_names=full_names))
    print_line(out)
    print_pairs(out, compare_wording.remarks(names, comparisons))
    print_pairs(out, compare_wording.partings(names, parted, full_names=full_names))
    print_pairs(out, compare_wording.verdicts(names, comparisons, threshold))
    print_pairs(out, [("written", str(path)) for path in written])
