"""Predict what a pass costs from measured ones: seconds and peak of each phase; rollout passes are fitted apart."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from replay.inspection.shapes import Rows, Shape, rows_fed
from replay.prediction.fitting import Fit, fitted

MOST_OF_PEAK, MOST_OF_SECONDS = 0.05, 0.1  # shares by which a prediction may be off
LEAST_FOR_HOLDING_OUT = 6  # measured inputs of a kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Seconds and peak bytes of a pass by phase, each on the rank where it is the largest."""

    seconds: Mapping[str, float]
    peaks: Mapping[str, float]

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak_bytes(self) -> float:
        return max(self.peaks.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    shape: Shape
    fed_tokens: int  # on the rank where they are most
    cost: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """Fits for the passes of one kind."""

    rows: Rows
    seconds: Mapping[str, Fit]  # by phase
    peaks: Mapping[str, Fit]

    @classmethod
    def of(cls, measured: Sequence[Measured], rows: Rows) -> Self:
        terms = [terms_of(one.shape, rows) for one in measured]
        phases = measured[0].cost.seconds
        return cls(
            rows=rows,
            seconds={name: fitted(terms, [one.cost.seconds[name] for one in measured]) for name in phases},
            peaks={name: fitted(terms, [one.cost.peaks[name] for one in measured]) for name in phases},
        )

    def cost(self, shape: Shape, *, ring: int = 1) -> Cost:
        """Predict the cost of a pass; with `ring`, on each of so many ranks that share its row."""
        constant, *counts = terms_of(shape, self.rows)
        terms = [constant, *(count / ring for count in counts)]
        return Cost(
            seconds={name: fit(terms) for name, fit in self.seconds.items()},
            peaks={name: fit(terms) for name, fit in self.peaks.items()},
        )


def terms_of(shape: Shape, rows: Rows) -> list[float]:
    """Return the terms of a fit."""
    counts = (shape.fed_tokens(rows), shape.squares(rows), shape.action_tokens, shape.squared_rows(rows))
    return [1.0, *map(float, counts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Error:
    """How far predictions were from what was measured, as shares of it."""

    num_inputs: int
    most_of_peak: float
    median_of_peak: float
    most_of_seconds: float
    median_of_seconds: float

    @property
    def is_near(self) -> bool:
        return self.most_of_peak <= MOST_OF_PEAK and self.most_of_seconds <= MOST_OF_SECONDS

    @classmethod
    def of(cls, pairs: Sequence[tuple[Cost, Cost]]) -> Self:
        """Compare predictions with measurements, given in pairs."""
        peaks = [abs(guess.peak_bytes / real.peak_bytes - 1) for guess, real in pairs]
        seconds = [abs(guess.total_seconds / real.total_seconds - 1) for guess, real in pairs]
        return cls(
            num_inputs=len(pairs),
            most_of_peak=max(peaks),
            median_of_peak=statistics.median(peaks),
            most_of_seconds=max(seconds),
            median_of_seconds=statistics.median(seconds),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is known of a folder's passes: a predictor for each kind, and how far it is off."""

    predictors: Mapping[bool, Predictor]  # by: was autograd on?
    held_out: Sequence[tuple[Measured, Cost]]  # measured, and predicted by a fit without them
    error: Error | None  # on these; None: there were too few to hold any out

    @classmethod
    def of(cls, measured: Sequence[Measured]) -> Self:
        """Fit all measured passes; and, to know the error, two thirds of them, and predict the rest."""
        rows = rows_fed((one.shape, one.fed_tokens) for one in measured)
        predictors: dict[bool, Predictor] = {}
        held_out: list[tuple[Measured, Cost]] = []
        for trains in sorted({one.shape.trains for one in measured}):
            own = [one for one in measured if one.shape.trains == trains]
            predictors[trains] = Predictor.of(own, rows)
            if len(own) >= LEAST_FOR_HOLDING_OUT:
                out = own[1:-1:3]  # neither the smallest nor the largest
                others = Predictor.of([one for one in own if one not in out], rows)
                held_out += [(one, others.cost(one.shape)) for one in out]
        error = Error.of([(guess, one.cost) for one, guess in held_out]) if held_out else None
        return cls(predictors=predictors, held_out=held_out, error=error)

    def cost(self, shape: Shape, *, ring: int = 1) -> Cost | None:
        """Predict the cost of a pass; None if no pass of its kind could be measured."""
        predictor = self.predictors.get(shape.trains)
        return None if predictor is None else predictor.cost(shape, ring=ring)
