"""Print the answer to `replay compare`."""

from collections.abc import Sequence
from pathlib import Path

from replay.comparison import text as wording
from replay.comparison.comparison import Comparison
from replay.output.printing import open_console, print_line, print_pairs, print_table


def print_comparison(comparison: Comparison, *, written: Sequence[Path], full_names: bool = False) -> None:
    """Print the answer to `replay compare`; docs/compare.md shows one."""
    out = open_console()
    print_pairs(out, wording.other_work(comparison))
    print_pairs(out, wording.compared_runs(comparison))
    print_line(out)
    if comparison.settings:
        print_table(out, wording.setting_table(comparison))
        print_line(out)
    print_table(out, wording.difference_table(comparison, full_names=full_names))
    print_line(out)
    print_pairs(out, wording.remarks(comparison))
    print_pairs(out, wording.partings(comparison, full_names=full_names))
    print_pairs(out, wording.verdicts(comparison))
    print_pairs(out, [("written", str(path)) for path in written])
