"""Lay out pictures of passes, which `figure.html` draws: bars by pass, and points against tokens."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 720, 220
# The margins.
LEFT, RIGHT, TOP, BOTTOM = 64, 26, 12, 36
# page.css has a class for each, c0 to c7.
NUM_COLOURS = 8


@dataclass(frozen=True, slots=True)
class AxisUnit:
    """What an axis counts in."""

    name: str
    # In base units.
    size: float
    # Takes a value in base units.
    format_value: Callable[[float], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One pass: values stacked upon each other by series."""

    name: str
    values: Mapping[str, float]
    # Why the pass does not count. Its bar is drawn pale.
    mark: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScatterPoint:
    name: str
    series: str
    x: float
    y: float
    # Why the pass does not count. Its point is drawn hollow.
    mark: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureMark:
    """A rectangle or a circle of a figure, and what it says when it is pointed at."""

    shape: str
    attributes: Mapping[str, object]
    hint: str


@dataclass(frozen=True, slots=True)
class FigureLabel:
    x: float
    y: float
    text: str
    # "start", "middle" or "end", as SVG has it.
    anchor: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What `figure.html` draws, in pixels. `keys`: each series' colour and name. `grid`: the heights of its lines."""

    title: str
    keys: Sequence[tuple[str, str]]
    grid: Sequence[float]
    marks: Sequence[FigureMark]
    labels: Sequence[FigureLabel]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT


def draw_bars(title: str, bars: Sequence[Bar], unit: AxisUnit) -> Figure:
    """Draw stacked bars. Those with a mark do not stretch the axis: they may be cut off."""
    colours = _choose_colours(name for bar in bars for name in bar.values)
    top = _choose_axis_end([(sum(bar.values.values()), bar.mark) for bar in bars], unit.size)
    step = (WIDTH - LEFT - RIGHT) / max(len(bars), 1)
    marks = []
    for number, bar in enumerate(bars):
        base = 0.0
        for name, value in bar.values.items():
            y = _place_y(base + value, top)
            size = {"width": max(step * 0.8, 0.5), "height": max(_place_y(base, top) - y, 0.0)}
            rectangle = _round_numbers(x=LEFT + (number + 0.1) * step, y=y, **size)
            hint = f"{bar.name}, {name}: {unit.format_value(value)} {unit.name}{_append_reason(bar.mark)}"
            colour = colours[name] + (" pale" if bar.mark else "")
            marks.append(FigureMark(shape="rect", attributes={"class": colour, **rectangle}, hint=hint))
            base += value
    every = max(1, math.ceil(len(bars) / 20))
    labels = [
        _make_label(LEFT + (number + 0.5) * step, HEIGHT - BOTTOM + 14, bar.name.removeprefix("pass "), "middle")
        for number, bar in enumerate(bars)
        if number % every == 0
    ]
    return _build_figure(title, colours, top, unit, marks, [*labels, _label_x_axis("pass")])


def draw_points(title: str, points: Sequence[ScatterPoint], unit: AxisUnit) -> Figure:
    """Draw y against x. Those with a mark do not stretch the axis: what is beyond stands at its end."""
    colours = _choose_colours(point.series for point in points)
    top = _choose_axis_end([(point.y, point.mark) for point in points], unit.size)
    right = _choose_axis_end([(point.x, "") for point in points], 1.0)
    marks = [
        FigureMark(
            shape="circle",
            attributes={
                "class": colours[point.series] + (" hollow" if point.mark else ""),
                **_round_numbers(cx=_place_x(point.x, right), cy=_place_y(point.y, top), r=4),
            },
            hint=f"{point.name}, {point.series}: {point.x:,.0f} tokens, {unit.format_value(point.y)} {unit.name}"
            + _append_reason(point.mark),
        )
        for point in points
    ]
    ticks = [right * k / 4 for k in range(5)]
    labels = [_make_label(_place_x(tick, right), HEIGHT - BOTTOM + 14, f"{tick:,.0f}", "middle") for tick in ticks]
    return _build_figure(
        title, colours, top, unit, marks, [*labels, _label_x_axis("tokens computed, padding included")]
    )


def _build_figure(
    title: str,
    colours: Mapping[str, str],
    top: float,
    unit: AxisUnit,
    marks: Sequence[FigureMark],
    labels: Sequence[FigureLabel],
) -> Figure:
    """Return the figure with an axis from nothing to `top`."""
    ticks = [top * k / 4 for k in range(5)]
    names = [
        _make_label(LEFT - 6, _place_y(v, top) + 4, unit.format_value(v) if v else f"0 {unit.name}", "end")
        for v in ticks
    ]
    return Figure(
        title=title,
        keys=[(colour, name) for name, colour in colours.items()],
        grid=[round(_place_y(value, top), 1) for value in ticks],
        marks=marks,
        labels=[*names, *labels],
    )


def _choose_colours(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each series, by name."""
    return {name: f"c{number % NUM_COLOURS}" for number, name in enumerate(dict.fromkeys(names))}


def _append_reason(mark: str) -> str:
    return f" ({mark})" if mark else ""


def _label_x_axis(text: str) -> FigureLabel:
    return _make_label(WIDTH - RIGHT, HEIGHT - 4, text, "end")


def _make_label(x: float, y: float, text: str, anchor: str) -> FigureLabel:
    return FigureLabel(round(x, 1), round(y, 1), text, anchor)


def _round_numbers(**numbers: float) -> dict[str, float]:
    return {name: round(number, 1) for name, number in numbers.items()}


def _place_x(value: float, right: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / right


def _place_y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(value / top, 1.0))


def _choose_axis_end(values: Sequence[tuple[float, str]], size: float) -> float:
    """Return the end of an axis: 1, 2, 2.5, 4, 5 or 8 times a power of ten units, at least each value without a mark.

    With marks alone, at least each of those.
    """
    finite = [(value / size, mark) for value, mark in values if math.isfinite(value)]
    largest = max([value for value, mark in finite if not mark] or [value for value, _ in finite], default=0.0)
    if largest <= 0:
        return size
    power = 10.0 ** math.floor(math.log10(largest))
    return size * next(power * factor for factor in (1, 2, 2.5, 4, 5, 8, 10) if power * factor >= largest)
