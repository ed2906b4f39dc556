"""Run `replay compare A B ...`: read the logs, compare each with the first, print and draw the result."""

from collections.abc import Sequence
from pathlib import Path

from actor_init.as_json import json_bytes
from actor_init.spec import UsageError
from replay.compare.comparison import Comparison
from replay.compare.console import print_comparison


def compare_logs(
    folders: Sequence[Path], threshold: float, plot: Path | None, as_json: Path | None, *, full_names: bool
) -> int:
    """Compare, print and draw; return 0 if no relative difference that decides is beyond `threshold`, else 1.

    Raises UsageError for logs that cannot be compared.
    """
    if plot is not None:
        from replay.compare.plot import check_plot, draw

        check_plot(plot)
    comparison = Comparison.read(folders, threshold=threshold)
    if as_json is not None:
        try:
            as_json.write_bytes(json_bytes(comparison.to_dict(), indent=2))
        except OSError as error:
            raise UsageError(f"--json {as_json}: {error.strerror}. Give a file that can be written") from error
    if plot is not None:
        draw(plot, comparison)
    print_comparison(comparison, written=[path for path in (plot, as_json) if path], full_names=full_names)
    return 0 if comparison.is_within else 1
