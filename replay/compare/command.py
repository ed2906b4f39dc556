"""Run `replay compare A B ...`: read the logs, compare each with the first, print and draw the result."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actor_init.as_json import json_bytes, to_json
from actor_init.spec import UsageError
from replay.compare.comparable import settings_that_differ
from replay.compare.console import print_comparison
from replay.compare.differences import Comparison, compare
from replay.report.text import MOST_RUNS, run_letters
from replay.runlog.reader import PastRun

if TYPE_CHECKING:  # logs without traces are compared without torch
    from replay.tracing.first_difference import Parted


def compare_logs(
    folders: Sequence[Path], threshold: float, plot: Path | None, as_json: Path | None, *, full_names: bool
) -> int:
    """Compare, print and draw; return 0 if no relative difference that decides is beyond `threshold`, else 1.

    Raises UsageError for logs that cannot be compared.
    """
    if not 2 <= len(folders) <= MOST_RUNS:
        raise UsageError(f"two to {MOST_RUNS} logs can be compared, not {len(folders)}. Try: replay compare LOG LOG")
    if not (math.isfinite(threshold) and threshold >= 0):
        raise UsageError(f"--threshold {threshold} is not allowed. Give a finite number of at least 0")
    if plot is not None:
        from replay.compare.plot import check_plot, draw

        check_plot(plot)
    reference, *others = runs = [PastRun.read(folder) for folder in folders]
    comparisons = [compare(reference, other, tells_of_code=True) for other in others]
    parted = first_differences(reference, others)
    names = run_letters(len(runs))
    differing = settings_that_differ(runs)
    if as_json is not None:
        write_json(as_json, runs, comparisons, differing, threshold, parted)
    if plot is not None:
        draw(plot, comparisons, names, threshold)
    written = [path for path in (plot, as_json) if path]
    print_comparison(names, runs, differing, comparisons, threshold, parted, written=written, full_names=full_names)
    return 0 if all(one.max_relative <= threshold for one in comparisons) else 1


def first_differences(reference: PastRun, others: Sequence[PastRun]) -> "Parted":
    """Find the first difference of each run that was traced, if the reference was."""
    if not reference.measure.trace:
        return {}

    from replay.tracing.first_difference import first_difference

    traced = {number: other for number, other in enumerate(others) if other.measure.trace}
    return {number: first_difference(reference.folder, other.folder) for number, other in traced.items()}


def write_json(
    path: Path,
    runs: Sequence[PastRun],
    comparisons: Sequence[Comparison],
    differing: dict[str, list[str]],
    threshold: float,
    parted: "Parted",
) -> None:
    """Write the whole comparison as JSON, each point too, and where traced runs part.

    A float that JSON has no word for is text, as in a log.
    """
    whole = {
        "threshold": threshold,
        "runs": [str(run.folder) for run in runs],
        "settings": differing,
        "comparisons": [
            {
                "run": str(run.folder),
                "within": one.max_relative <= threshold,
                **to_json(one),
                **({"first_difference": to_json(parted[number])} if number in parted else {}),
            }
            for number, (run, one) in enumerate(zip(runs[1:], comparisons, strict=True))
        ],
    }
    try:
        path.write_bytes(json_bytes(whole, indent=2))
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}. Give a file that can be written") from error
