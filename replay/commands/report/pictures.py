"""Lay out pictures of passes, which `figure.html` draws: bars by pass, and points against tokens."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 26, 12, 36  # margins
NUM_COLOURS = 8  # classes c0 to c7 of page.css


@dataclass(frozen=True, slots=True)
class Unit:
    """What an axis counts in."""

    name: str
    size: float  # in base units
    said: Callable[[float], str]  # formats a value in base units


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One pass: values stacked upon each other by series."""

    name: str
    values: Mapping[str, float]
    mark: str = ""  # why the pass does not count; it is drawn pale


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    name: str
    series: str
    x: float
    y: float
    mark: str = ""  # as of a bar; it is drawn hollow


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A rectangle or a circle of a figure, and what it says when it is pointed at."""

    shape: str
    attributes: Mapping[str, object]
    hint: str


@dataclass(frozen=True, slots=True)
class Label:
    x: float
    y: float
    text: str
    anchor: str  # start, middle or end


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What `figure.html` draws, in pixels. `keys`: each series' colour and name. `grid`: the heights of its lines."""

    title: str
    keys: Sequence[tuple[str, str]]
    grid: Sequence[float]
    marks: Sequence[Mark]
    labels: Sequence[Label]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT


def bars(title: str, items: Sequence[Bar], unit: Unit) -> Figure:
    """Draw one stacked bar an item. Those with a mark do not stretch the axis: they may be cut off."""
    colours = _colours(name for item in items for name in item.values)
    top = _top([(sum(item.values.values()), item.mark) for item in items], unit.size)
    step = (WIDTH - LEFT - RIGHT) / max(len(items), 1)
    marks = []
    for number, item in enumerate(items):
        base = 0.0
        for name, value in item.values.items():
            y = _y(base + value, top)
            size = {"width": max(step * 0.8, 0.5), "height": max(_y(base, top) - y, 0.0)}
            place = _rounded(x=LEFT + (number + 0.1) * step, y=y, **size)
            hint = f"{item.name}, {name}: {unit.said(value)} {unit.name}{_because(item.mark)}"
            colour = colours[name] + (" pale" if item.mark else "")
            marks.append(Mark(shape="rect", attributes={"class": colour, **place}, hint=hint))
            base += value
    every = max(1, math.ceil(len(items) / 20))
    labels = [
        _label(LEFT + (number + 0.5) * step, HEIGHT - BOTTOM + 14, item.name.removeprefix("pass "), "middle")
        for number, item in enumerate(items)
        if number % every == 0
    ]
    return _figure(title, colours, top, unit, marks, [*labels, _below("pass")])


def points(title: str, items: Sequence[Point], unit: Unit) -> Figure:
    """Draw y against x. Those with a mark do not stretch the axis: what is beyond stands at its end."""
    colours = _colours(item.series for item in items)
    top = _top([(item.y, item.mark) for item in items], unit.size)
    right = _top([(item.x, "") for item in items], 1.0)
    marks = [
        Mark(
            shape="circle",
            attributes={
                "class": colours[item.series] + (" hollow" if item.mark else ""),
                **_rounded(cx=_x(item.x, right), cy=_y(item.y, top), r=4),
            },
            hint=f"{item.name}, {item.series}: {item.x:,.0f} tokens, {unit.said(item.y)} {unit.name}"
            + _because(item.mark),
        )
        for item in items
    ]
    ticks = [right * k / 4 for k in range(5)]
    labels = [_label(_x(tick, right), HEIGHT - BOTTOM + 14, f"{tick:,.0f}", "middle") for tick in ticks]
    return _figure(title, colours, top, unit, marks, [*labels, _below("tokens computed, padding included")])


def _figure(
    title: str, colours: Mapping[str, str], top: float, unit: Unit, marks: Sequence[Mark], labels: Sequence[Label]
) -> Figure:
    """Return the figure with an axis from nothing to `top`."""
    ticks = [top * k / 4 for k in range(5)]
    names = [_label(LEFT - 6, _y(v, top) + 4, unit.said(v) if v else f"0 {unit.name}", "end") for v in ticks]
    return Figure(
        title=title,
        keys=[(colour, name) for name, colour in colours.items()],
        grid=[round(_y(value, top), 1) for value in ticks],
        marks=marks,
        labels=[*names, *labels],
    )


def _colours(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each series, by name."""
    return {name: f"c{number % NUM_COLOURS}" for number, name in enumerate(dict.fromkeys(names))}


def _because(mark: str) -> str:
    return f" ({mark})" if mark else ""


def _below(text: str) -> Label:
    return _label(WIDTH - RIGHT, HEIGHT - 4, text, "end")


def _label(x: float, y: float, text: str, anchor: str) -> Label:
    return Label(round(x, 1), round(y, 1), text, anchor)


def _rounded(**numbers: float) -> dict[str, float]:
    return {name: round(number, 1) for name, number in numbers.items()}


def _x(value: float, right: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / right


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(value / top, 1.0))


def _top(values: Sequence[tuple[float, str]], size: float) -> float:
    """Return the end of an axis: 1, 2, 2.5, 4, 5 or 8 times a power of ten units, at least each value without a mark.

    With marks alone, at least each of those.
    """
    finite = [(value / size, mark) for value, mark in values if math.isfinite(value)]
    largest = max([value for value, mark in finite if not mark] or [value for value, _ in finite], default=0.0)
    if largest <= 0:
        return size
    power = 10.0 ** math.floor(math.log10(largest))
    return size * next(power * factor for factor in (1, 2, 2.5, 4, 5, 8, 10) if power * factor >= largest)
