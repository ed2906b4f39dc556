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
    """Save a picture of losses by input and their differences. Raises UsageError if `path` cannot be written."""
    from matplotlib.figure import Figure  # not pyplot: no display, and no state beyond this figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    losses = [differences.results[0] for differences in comparison.differences]
    union = {point.place: point.reference for loss in losses for point in loss.points}
    places = [place + 1 for place in sorted(union)]
    above.plot(
        places, [union[place] for place in sorted(union)], color="lightgray", linewidth=6, label=comparison.names[0]
    )
    for number, (name, differences) in enumerate(comparison.named):
        color = f"C{number}"
        points = differences.results[0].points
        values = [point.place + 1 for point in points], [point.other for point in points]
        above.plot(*values, marker=".", color=color, label=name)
        for quantity in differences.results:
            places, apart, num_beyond = _curve(quantity)
            label = f"{name}, {quantity.name}" + (f" ({num_beyond} not finite)" if num_beyond else "")
            below.plot(places, apart, STYLES[quantity.name], marker=".", color=color, label=label)
    threshold = comparison.threshold
    below.axhline(threshold, color="gray", linewidth=1, label=f"threshold {threshold:g}")
    quantities = [quantity for differences in comparison.differences for quantity in differences.results]
    _scale(below, [threshold, *(point.relative for quantity in quantities for point in quantity.points)])
    above.set_ylabel("loss")
    below.set_ylabel(f"relative difference from {comparison.names[0]}")
    below.set_xlabel(f"pass of {comparison.names[0]}")
    below.xaxis.get_major_locator().set_params(integer=True)
    above.legend()
    below.legend(fontsize="small")
    _save(figure, path)


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


def _curve(quantity: Quantity) -> tuple[list[int], list[float], int]:
    """Return the largest difference at each place, infinite ones as a gap, and how many are infinite."""
    worst: dict[int, float] = {}
    for point in quantity.points:
        worst[point.place] = max(point.relative, worst.get(point.place, 0.0))
    drawn = [value if math.isfinite(value) else math.nan for value in worst.values()]
    return [place + 1 for place in worst], drawn, sum(map(math.isnan, drawn))


def _scale(axes: Any, values: Sequence[float]) -> None:
    """Scale logarithmically, and linearly below the smallest difference: equal values stand at the bottom, at 0."""
    positive = [value for value in values if 0 < value < math.inf]
    if positive:
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(positive))), linscale=0.5)
    axes.set_ylim(bottom=0)


def draw_parity(path: Path, shares: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw a line a run or group of runs: the largest share of its bound of each quantity, a bar back to the median."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.4 + 0.22 * len(shares)), layout="constrained")
    axes = figure.subplots()
    shown = [value for one in shares.values() for some in one.values() for value in some if 0 < value < math.inf]
    low = 10.0 ** math.floor(math.log10(min([0.01, *shown])))
    high = 10.0 ** math.ceil(math.log10(max([10.0, *shown])))
    axes.axvspan(1, high, color="mistyrose")
    axes.axvline(1, color="gray", linewidth=1)
    for number, name in enumerate(STYLES):
        places = [place + 0.15 * (number - 1) for place, one in enumerate(shares.values()) if name in one]
        some = [one[name] for one in shares.values() if name in one]
        largest = [min(max(*values, low), high) for values in some]
        medians = [min(max(median(values), low), high) for values in some]
        axes.plot(largest, places, "o^s"[number], color=f"C{number}", label=name, markersize=5, alpha=0.8)
        axes.hlines(places, medians, largest, color=f"C{number}", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(low * 0.7, high)
    axes.set_yticks(range(len(shares)), list(shares), fontsize="small")
    axes.set_ylim(len(shares) - 0.5, -0.5)
    of_several = any(len(values) > 1 for one in shares.values() for values in one.values())
    axes.set_xlabel(
        "largest difference from the reference, as a share of its bound; left edge: none"
        + "\nbars reach back to the median of the runs" * of_several
    )
    axes.grid(axis="y", linewidth=0.3)
    figure.legend(loc="outside upper right", ncols=len(STYLES), fontsize="small")
    with rc_context({"svg.fonttype": "none"}):  # text, and not its outlines, which are ten times as large
        figure.savefig(path, metadata={"Date": None})
