"""Measure the noise floor from runs that should be equal except for rounding, and find runs beyond it.

A distance is |other - reference|, relative to the reference's value or to the mean of all values, whichever is larger:
a row of one near-certain token has a log-prob near 0, and its rounding error must not count as a difference.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from actor_init.spec import Dtype
from replay.comparison.differences import Differences, Point
from replay.tolerances.difference import FP32_SPACING, as_share
from replay.tolerances.runs import CEILINGS, bound_from_floor, is_trusted


class CellResult(StrEnum):
    EQUAL = "EQUAL"
    WITHIN_NOISE = "WITHIN NOISE"
    DIFFERS = "DIFFERS"
    NOT_JUDGED = "NOT JUDGED"  # the noise of its dtype could not be measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """The farthest point of one quantity."""

    value: float
    source: str  # the input
    place: int  # index of its pass among the reference's passes
    num_points: int
    name: str = ""  # of the parameter

    @property
    def where(self) -> str:
        return f"{self.name} at {self.source}" if self.name else self.source


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The noise floor of one quantity in one dtype."""

    dtype: Dtype
    group: str = ""  # of runs that it applies to
    quantity: str
    floor: float | None  # None: no equivalent run can be trusted
    equivalent: str  # the run that set the floor
    factor: float
    bound: float
    ceiling: float
    measured: Mapping[str, float]  # distance by equivalent
    distrusted: Sequence[str]  # equivalents whose distance is too large for rounding

    @property
    def ground(self) -> tuple[str, Dtype]:
        return self.group, self.dtype


def distances(comparison: Differences) -> dict[str, Distance]:
    """Return distances by quantity: loss, log-probs, token log-probs, gradient norm and gradients, where recorded."""
    return {quantity.name: _farthest(quantity.points) for quantity in comparison.results}


def _farthest(points: Sequence[Point]) -> Distance:
    sizes = [abs(point.reference) for point in points if math.isfinite(point.reference)]
    mean = fmean(sizes) if sizes else 0.0

    def distance(point: Point) -> float:
        size = abs(point.reference) if point.apart is not None else max(abs(point.reference), mean)
        return as_share(point.difference, size)

    worst = max(points, key=distance)
    return Distance(
        value=distance(worst),
        source=worst.source,
        place=worst.place,
        num_points=sum(point.num_values for point in points),
        name=worst.name,
    )


def noise_of(
    dtype: Dtype, quantity: str, equivalents: Mapping[str, Distance], ceiling: float, *, group: str = ""
) -> Noise:
    """Return the noise from `equivalents`, distances by run name. `ceiling` applies to a single number."""
    ceiling *= CEILINGS.get(quantity, 1.0)
    measured = {name: one.value for name, one in equivalents.items()}
    trusted = {name: value for name, value in measured.items() if is_trusted(name, measured, ceiling)}
    loudest = max(trusted, key=lambda name: trusted[name], default="")
    floor = max(trusted[loudest], FP32_SPACING) if trusted else None
    bound = bound_from_floor(floor, equivalents[loudest].num_points if trusted else 0, ceiling)
    return Noise(
        dtype=dtype,
        group=group,
        quantity=quantity,
        floor=floor,
        equivalent=loudest,
        factor=bound / (floor or FP32_SPACING),
        bound=bound,
        ceiling=ceiling,
        measured=measured,
        distrusted=[name for name in measured if name not in trusted],
    )


def result_of(distances: Mapping[str, Distance], noises: Mapping[str, Noise]) -> tuple[CellResult, list[str]]:
    """Return the result of a cell and the quantities that decide it; `noises` are those of its dtype, by quantity."""
    if all(one.value <= FP32_SPACING for one in distances.values()):
        return CellResult.EQUAL, []
    beyond = [name for name, one in distances.items() if name in noises and one.value > noises[name].bound]
    if beyond:
        return CellResult.DIFFERS, beyond
    unknown = [name for name in distances if name not in noises]
    return (CellResult.NOT_JUDGED, unknown) if unknown else (CellResult.WITHIN_NOISE, [])
