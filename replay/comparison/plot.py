"""Draw comparisons: losses by input and their differences; a matrix of runs. The only module with matplotlib."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from actor_init.spec import UsageError
from capture.facts import Setting
from replay.comparison.comparison import Comparison
from replay.comparison.differences import Quantity

STYLES = {"loss": "-", "log-probs": ":", "gradient norm": "--"}


def check_plot(path: Path) -> None:
    """Check --plot before anything is read. Raises UsageError without matplotlib, or for a format unknown to it."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise UsageError(Setting("plot"), "needs matplotlib", "Try: pip install 'micro-replay[plot]'") from error
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        advice = f"Give one of {', '.join(kinds)}, as out.png"
        raise UsageError(Setting("plot", path), "has no ending of a picture", advice)


def draw(path: Path, comparison: Comparison) -> None:
    """Save the picture of a comparison. Raises UsageError if `path` cannot be written."""
    _save(plot_comparison(comparison), path)


def plot_comparison(comparison: Comparison) -> Any:
    """Return a figure of matplotlib's: losses by input, and below them their differences."""
    # Not pyplot, which needs a display and keeps state beyond this figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    loss_axes, difference_axes = figure.subplots(2, 1, sharex=True)
    losses = [differences.results[0] for differences in comparison.differences]
    by_place = {point.place: point.reference for loss in losses for point in loss.points}
    places = sorted(by_place)
    loss_axes.plot(
        [place + 1 for place in places],
        [by_place[place] for place in places],
        color="lightgray",
        linewidth=6,
        label=comparison.names[0],
    )
    for number, (name, differences) in enumerate(comparison.by_name):
        color = f"C{number}"
        points = differences.results[0].points
        values = [point.place + 1 for point in points], [point.other for point in points]
        loss_axes.plot(*values, marker=".", color=color, label=name)
        for quantity in differences.results:
            passes, largest, num_infinite = _compute_curve(quantity)
            label = f"{name}, {quantity.name}" + (f" ({num_infinite} not finite)" if num_infinite else "")
            difference_axes.plot(passes, largest, STYLES[quantity.name], marker=".", color=color, label=label)
    threshold = comparison.threshold
    difference_axes.axhline(threshold, color="gray", linewidth=1, label=f"threshold {threshold:g}")
    quantities = [quantity for differences in comparison.differences for quantity in differences.results]
    _set_scale(difference_axes, [threshold, *(point.relative for quantity in quantities for point in quantity.points)])
    loss_axes.set_ylabel("loss")
    difference_axes.set_ylabel(f"relative difference from {comparison.names[0]}")
    difference_axes.set_xlabel(f"pass of {comparison.names[0]}")
    difference_axes.xaxis.get_major_locator().set_params(integer=True)
    loss_axes.legend()
    difference_axes.legend(fontsize="small")
    return figure


def draw_curves(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """Save a picture of loss curves by name, each a loss per step. Raises UsageError if `path` cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, marker=".", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.locator_params(axis="x", integer=True)
    if curves:
        axes.legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UsageError(Setting("plot", path), f": {error.strerror}", "Give a file that can be written") from error


def _compute_curve(quantity: Quantity) -> tuple[list[int], list[float], int]:
    """Return the numbers of passes, their largest differences with a gap where one is infinite, and how many are."""
    largest: dict[int, float] = {}
    for point in quantity.points:
        largest[point.place] = max(point.relative, largest.get(point.place, 0.0))
    values = [value if math.isfinite(value) else math.nan for value in largest.values()]
    return [place + 1 for place in largest], values, sum(map(math.isnan, values))


def _set_scale(axes: Any, values: Sequence[float]) -> None:
    """Scale logarithmically, but linearly below the smallest difference, so that equal values are drawn at 0."""
    positive = [value for value in values if 0 < value < math.inf]
    if positive:
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(positive))), linscale=0.5)
    axes.set_ylim(bottom=0)


def draw_parity(path: Path, shares: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw a row for each run or group of runs: of each quantity the largest share of its bound, and the median.

    shares  by run or group, then by quantity
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.4 + 0.22 * len(shares)), layout="constrained")
    axes = figure.subplots()
    every_share = [value for row in shares.values() for values in row.values() for value in values]
    positive = [value for value in every_share if 0 < value < math.inf]
    low = 10.0 ** math.floor(math.log10(min([0.01, *positive])))
    high = 10.0 ** math.ceil(math.log10(max([10.0, *positive])))
    axes.axvspan(1, high, color="mistyrose")
    axes.axvline(1, color="gray", linewidth=1)
    for number, name in enumerate(STYLES):
        rows = [(position, row[name]) for position, row in enumerate(shares.values()) if name in row]
        heights = [position + 0.15 * (number - 1) for position, _ in rows]
        largest = [min(max(*values, low), high) for _, values in rows]
        medians = [min(max(median(values), low), high) for _, values in rows]
        axes.plot(largest, heights, "o^s"[number], color=f"C{number}", label=name, markersize=5, alpha=0.8)
        axes.hlines(heights, medians, largest, color=f"C{number}", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(low * 0.7, high)
    axes.set_yticks(range(len(shares)), list(shares), fontsize="small")
    axes.set_ylim(len(shares) - 0.5, -0.5)
    has_groups = any(len(values) > 1 for row in shares.values() for values in row.values())
    label = "largest difference from the reference, as a share of its bound; left edge: none"
    axes.set_xlabel(label + ("\nbars reach back to the median of the runs" if has_groups else ""))
    axes.grid(axis="y", linewidth=0.3)
    figure.legend(loc="outside upper right", ncols=len(STYLES), fontsize="small")
    # Text is saved as text, since its outlines are ten times as large.
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
