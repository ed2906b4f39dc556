"""Draw measurements of passes as SVG that follows the page's colours: bars by pass, and points against tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 26, 12, 36  # margins
NUM_COLOURS = 8  # classes c0 to c7 of the page's style


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


def bars(title: str, items: Sequence[Bar], unit: Unit) -> str:
    """Draw one stacked bar an item. Those with a mark do not stretch the axis: they may be cut off."""
    series = list(dict.fromkeys(name for item in items for name in item.values))
    top = _top([(sum(item.values.values()), item.mark) for item in items], unit.size)
    step = (WIDTH - LEFT - RIGHT) / max(len(items), 1)
    drawn = []
    for number, item in enumerate(items):
        base = 0.0
        for name, value in item.values.items():
            x, y = LEFT + number * step, _y(base + value, top)
            height = _y(base, top) - y
            kind = f"c{series.index(name) % NUM_COLOURS}" + (" pale" if item.mark else "")
            hint = f"{item.name}, {name}: {unit.said(value)} {unit.name}" + (f" ({item.mark})" if item.mark else "")
            drawn.append(
                f"<rect class='{kind}' x='{x + step * 0.1:.1f}' y='{y:.1f}' width='{max(step * 0.8, 0.5):.1f}' "
                f"height='{max(height, 0):.1f}'><title>{escape(hint)}</title></rect>"
            )
            base += value
    every = max(1, math.ceil(len(items) / 20))
    labels = [
        _text(LEFT + (number + 0.5) * step, HEIGHT - BOTTOM + 14, item.name.removeprefix("pass "), "middle")
        for number, item in enumerate(items)
        if number % every == 0
    ]
    return _figure(title, series, [*_axis(top, unit), *drawn, *labels, _below("pass")])


def points(title: str, items: Sequence[Point], unit: Unit) -> str:
    """Draw y against x. Those with a mark do not stretch the axis: what is beyond stands at its end."""
    series = list(dict.fromkeys(item.series for item in items))
    top = _top([(item.y, item.mark) for item in items], unit.size)
    right = _top([(item.x, "") for item in items], 1.0)
    drawn = []
    for item in items:
        kind = f"c{series.index(item.series) % NUM_COLOURS}" + (" hollow" if item.mark else "")
        hint = f"{item.name}, {item.series}: {item.x:,.0f} tokens, {unit.said(item.y)} {unit.name}"
        hint += f" ({item.mark})" if item.mark else ""
        drawn.append(
            f"<circle class='{kind}' cx='{_x(item.x, right):.1f}' cy='{_y(item.y, top):.1f}' r='4'>"
            f"<title>{escape(hint)}</title></circle>"
        )
    ticks = [_text(_x(right * k / 4, right), HEIGHT - BOTTOM + 14, f"{right * k / 4:,.0f}", "middle") for k in range(5)]
    return _figure(title, series, [*_axis(top, unit), *ticks, *drawn, _below("tokens computed, padding included")])


def _figure(title: str, series: Sequence[str], parts: Sequence[str]) -> str:
    keys = "".join(
        f"<span class='key'><i class='c{number % NUM_COLOURS}'></i>{escape(name)}</span>"
        for number, name in enumerate(series)
    )
    named = f"role='img' aria-label='{escape(title, quote=True)}'"
    picture = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' {named}>{''.join(parts)}</svg>"
    return f"<figure><figcaption>{escape(title)} {keys}</figcaption>{picture}</figure>"


def _axis(top: float, unit: Unit) -> list[str]:
    parts = []
    for k in range(5):
        value = top * k / 4
        y = _y(value, top)
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(_text(LEFT - 6, y + 4, unit.said(value) if k else f"0 {unit.name}", "end"))
    return parts


def _below(what: str) -> str:
    return _text(WIDTH - RIGHT, HEIGHT - 4, what, "end")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>"


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
