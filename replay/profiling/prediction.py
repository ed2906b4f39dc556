"""Predict what a pass costs, the seconds and the peak of each phase, from measured passes.

The shapes of captured inputs say how much each pass computes under a layout of rows. Rollout passes are fitted apart.

Seconds or bytes are a sum of what passes compute, with coefficients that are not negative, and perhaps a floor:

    value = max(floor, constant + a * tokens + b * squares + c * action tokens + d * squared rows)

A floor is what small passes cost whatever they compute: a GPU waits for its host, or the peak is that of weights and
gradients. Errors are relative. Which terms there are, and whether there is a floor, is what predicts left-out points
best.

Shape letters: P points, T terms, F fits, C some of the terms.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from actor_init.inputs.documents import find_documents
from actor_init.inputs.packing import count_action_tokens
from capture.file_format.capture_file import read_call
from capture.file_format.micro_batch import CaptureError
from replay.objective.objective import select_loss_tokens
from replay.options.option_parsing import format_error_with_flags


class RowLayout(StrEnum):
    """How rows are fed, which decides how many tokens a pass computes."""

    PACKED = "packed"
    PADDED = "padded"
    DOCUMENTS = "padded, a document a row"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputShape:
    """Rows and tokens of one input; `number` is its place in the order in which a replay feeds the inputs."""

    number: int
    source: str
    trains: bool
    rows: int
    # Padding included.
    row_length: int
    # The real tokens of each document.
    documents: Sequence[int]
    # The tokens that have a loss.
    action_tokens: int

    @property
    def real_tokens(self) -> int:
        return sum(self.documents)

    def count_fed_tokens(self, rows: RowLayout) -> int:
        """Return how many tokens the model computes."""
        match rows:
            case RowLayout.PACKED:
                return self.real_tokens
            case RowLayout.PADDED:
                return self.rows * self.row_length
            case RowLayout.DOCUMENTS:
                return len(self.documents) * max(self.documents)

    def find_longest_row(self, rows: RowLayout) -> int:
        """Return how many tokens a row has as it is fed."""
        match rows:
            case RowLayout.PACKED:
                return self.real_tokens
            case RowLayout.PADDED:
                return self.row_length
            case RowLayout.DOCUMENTS:
                return max(self.documents)

    def sum_squared_rows(self, rows: RowLayout) -> int:
        """Return the sum of the rows' squared lengths: what attention computes under a mask, whatever it masks."""
        return self.count_fed_tokens(rows) * self.find_longest_row(rows)

    def sum_squares(self, rows: RowLayout) -> int:
        """Return the sum of the squared lengths of what attention sees as a whole."""
        match rows:
            case RowLayout.PACKED:
                return sum(length**2 for length in self.documents)
            case RowLayout.PADDED:
                return self.rows * self.row_length**2
            case RowLayout.DOCUMENTS:
                return len(self.documents) * max(self.documents) ** 2


def read_shapes(paths: Sequence[Path], loss: str) -> tuple[list[InputShape], list[tuple[Path, str]]]:
    """Return the shapes of the inputs that can be fed, and what is wrong with the others."""
    shapes: list[InputShape] = []
    errors: list[tuple[Path, str]] = []
    for number, path in enumerate(paths):
        try:
            batch = read_call(path).micro_batch()
            shapes.append(
                InputShape(
                    number=number,
                    source=path.name,
                    trains=batch.trains,
                    rows=batch.num_rows,
                    row_length=batch.sequences_BS.shape[1],
                    documents=find_documents(batch).measure_lengths(batch.attention_mask_BS).tolist() or [0],
                    action_tokens=count_action_tokens(select_loss_tokens(loss, batch)),
                )
            )
        except CaptureError as error:
            errors.append((path, format_error_with_flags(error)))
    return shapes, errors


def infer_row_layout(fed: Iterable[tuple[InputShape, int]]) -> RowLayout:
    """Find out how rows were fed from the tokens that were computed, a number for each shape. A ring pads a little."""
    shapes_and_tokens = list(fed)

    def distance(rows: RowLayout) -> int:
        return sum(abs(shape.count_fed_tokens(rows) - tokens) for shape, tokens in shapes_and_tokens)

    return min(RowLayout, key=distance)


def choose_spread(shapes: Sequence[InputShape], most: int) -> list[InputShape]:
    """Choose at most so many shapes, evenly spread from the fewest real tokens to the most; return them by size."""
    by_size = sorted(shapes, key=lambda shape: (shape.real_tokens, shape.number))
    if len(by_size) <= most:
        return by_size
    if most == 1:
        return by_size[-1:]
    least, largest = by_size[0].real_tokens, by_size[-1].real_tokens
    remaining = list(by_size)
    chosen = [remaining.pop(0), remaining.pop(-1)]
    for place in range(1, most - 1):
        target = least + (largest - least) * place / (most - 1)
        nearest = min(range(len(remaining)), key=lambda index: abs(remaining[index].real_tokens - target))
        chosen.append(remaining.pop(nearest))
    return sorted(chosen, key=lambda shape: (shape.real_tokens, shape.number))


TERMS = ("constant", "tokens", "squares", "action tokens", "squared rows")
# Which terms a fit may have, the simple ones first.
FORMS = ((0,), (0, 1), (0, 1, 2), (0, 1, 4), (0, 1, 3), (0, 1, 2, 3))
# A form with more terms, or with a floor, is taken if its error is at most this share of the simpler form's.
MOST_OF_SIMPLER_ERROR = 0.6
# By which share of the measured value a prediction may be off.
MOST_OF_PEAK, MOST_OF_SECONDS = 0.05, 0.1
# From so many measured inputs of a kind on, some are held out to know the error.
LEAST_FOR_HOLDING_OUT = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class CostFit:
    """A sum of TERMS, each times its coefficient, and at least the floor."""

    coefficients: Sequence[float]
    floor: float = 0.0

    def __call__(self, terms: Sequence[float]) -> float:
        linear = sum(factor * term for factor, term in zip(self.coefficients, terms, strict=True))
        return max(self.floor, linear)


def fit_costs(terms: Sequence[Sequence[float]], values: Sequence[float]) -> CostFit:
    """Fit positive `values` to `terms`, a row of TERMS for each."""
    terms_PT = torch.tensor(terms, dtype=torch.float64)
    values_P = torch.tensor(values, dtype=torch.float64).clamp(min=torch.finfo(torch.float64).tiny)
    num_points = len(values_P)
    best, best_error = _fit_form(terms_PT, values_P, FORMS[0], 0), float("inf")
    for form in FORMS:
        most_on_floor = num_points - len(form) - 1 if len(form) > 1 else 0
        if len(form) > 1 and num_points <= len(form):
            break
        for num_on_floor in (0, *range(2, most_on_floor + 1)):
            error = _measure_left_out_error(terms_PT, values_P, form, num_on_floor)
            if error < MOST_OF_SIMPLER_ERROR * best_error:
                best, best_error = _fit_form(terms_PT, values_P, form, num_on_floor), error
    return best


def _fit_form(terms_PT: Tensor, values_P: Tensor, form: Sequence[int], num_on_floor: int) -> CostFit:
    all_1P = torch.ones(1, len(values_P), dtype=torch.bool)
    coefficients_1T, floor_1 = _fit_subsets(terms_PT, values_P, all_1P, form, num_on_floor)
    return CostFit(coefficients=coefficients_1T[0].tolist(), floor=float(floor_1[0]))


def _measure_left_out_error(terms_PT: Tensor, values_P: Tensor, form: Sequence[int], num_on_floor: int) -> float:
    """Return the mean squared relative error at each point of a fit without it."""
    num_points = len(values_P)
    if num_points < 2:
        return 0.0
    kept_PP = ~torch.eye(num_points, dtype=torch.bool)
    coefficients_PT, floor_P = _fit_subsets(terms_PT, values_P, kept_PP, form, num_on_floor)
    predicted_P = torch.maximum((terms_PT * coefficients_PT).sum(dim=1), floor_P)
    return float((predicted_P / values_P - 1).square().mean())


def _fit_subsets(
    terms_PT: Tensor, values_P: Tensor, kept_FP: Tensor, form: Sequence[int], num_on_floor: int
) -> tuple[Tensor, Tensor]:
    """Return coefficients [F, T] and floors [F] of fits to the points that each keeps.

    The points with the fewest tokens of those lie on the floor. The coefficients are those of the least relative
    squares, none of them negative: the best of them is an unbounded one over some of the terms, and there are few
    terms, so all are tried.
    """
    num_fits = len(kept_FP)
    floor_F = torch.zeros(num_fits, dtype=torch.float64)
    sloping_FP = kept_FP
    if num_on_floor:
        by_size_P = terms_PT[:, 1].argsort(stable=True)
        rank_FP = kept_FP[:, by_size_P].cumsum(dim=1)
        low_FP = torch.empty_like(kept_FP)
        low_FP[:, by_size_P] = kept_FP[:, by_size_P] & (rank_FP <= num_on_floor)
        floor_F = values_P.expand(num_fits, -1).where(low_FP, torch.nan).nanmedian(dim=1).values
        sloping_FP = kept_FP & ~low_FP
    scale_T = terms_PT.abs().amax(dim=0).clamp(min=1e-300)
    relative_FPT = (terms_PT / scale_T / values_P[:, None]) * sloping_FP[:, :, None]
    ones_FP1 = sloping_FP[:, :, None].double()
    best_FT = torch.zeros(num_fits, len(TERMS), dtype=torch.float64)
    least_F = torch.full((num_fits,), torch.inf, dtype=torch.float64)
    for chosen in _list_subsets(form):
        columns = list(chosen)
        solution_FC1 = torch.linalg.lstsq(relative_FPT[:, :, columns], ones_FP1, driver="gelsd").solution
        error_F = (relative_FPT[:, :, columns] @ solution_FC1 - ones_FP1).square().sum(dim=(1, 2))
        is_better_F = (solution_FC1[:, :, 0] >= 0).all(dim=1) & (error_F < least_F)
        least_F = torch.where(is_better_F, error_F, least_F)
        new_FT = torch.zeros_like(best_FT)
        new_FT[:, columns] = solution_FC1[:, :, 0] / scale_T[columns]
        best_FT = torch.where(is_better_F[:, None], new_FT, best_FT)
    return best_FT, floor_F


def _list_subsets(form: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for number in range(1, len(form) + 1):
        yield from combinations(form, number)


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
class MeasuredPass:
    shape: InputShape
    # On the rank where they are most.
    fed_tokens: int
    cost: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """Fits for the passes of one kind."""

    rows: RowLayout
    # By phase.
    seconds: Mapping[str, CostFit]
    peaks: Mapping[str, CostFit]

    @classmethod
    def fit(cls, measured: Sequence[MeasuredPass], rows: RowLayout) -> Self:
        terms = [compute_terms(measured_pass.shape, rows) for measured_pass in measured]
        costs = [measured_pass.cost for measured_pass in measured]
        phases = costs[0].seconds
        return cls(
            rows=rows,
            seconds={name: fit_costs(terms, [cost.seconds[name] for cost in costs]) for name in phases},
            peaks={name: fit_costs(terms, [cost.peaks[name] for cost in costs]) for name in phases},
        )

    def predict(self, shape: InputShape, *, ring: int = 1) -> Cost:
        """Predict the cost of a pass; with `ring`, on each of so many ranks that share its row."""
        constant, *counts = compute_terms(shape, self.rows)
        terms = [constant, *(count / ring for count in counts)]
        return Cost(
            seconds={name: fit(terms) for name, fit in self.seconds.items()},
            peaks={name: fit(terms) for name, fit in self.peaks.items()},
        )


def compute_terms(shape: InputShape, rows: RowLayout) -> list[float]:
    """Return the terms of a fit."""
    counts = (shape.count_fed_tokens(rows), shape.sum_squares(rows), shape.action_tokens, shape.sum_squared_rows(rows))
    return [1.0, *map(float, counts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionErrors:
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
    def compare(cls, pairs: Sequence[tuple[Cost, Cost]]) -> Self:
        """Compare predictions with measurements, given in pairs."""
        peaks = [abs(predicted.peak_bytes / measured.peak_bytes - 1) for predicted, measured in pairs]
        seconds = [abs(predicted.total_seconds / measured.total_seconds - 1) for predicted, measured in pairs]
        return cls(
            num_inputs=len(pairs),
            most_of_peak=max(peaks),
            median_of_peak=statistics.median(peaks),
            most_of_seconds=max(seconds),
            median_of_seconds=statistics.median(seconds),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """What is known of a folder's passes: a predictor for each kind, and how far it is off."""

    # By whether autograd was on.
    predictors: Mapping[bool, Predictor]
    # Measured passes, and what a fit without them predicts.
    held_out: Sequence[tuple[MeasuredPass, Cost]]
    # The errors on these. None: there were too few to hold any out.
    error: PredictionErrors | None

    @classmethod
    def fit(cls, measured: Sequence[MeasuredPass]) -> Self:
        """Fit all measured passes; and, to know the error, two thirds of them, and predict the rest."""
        rows = infer_row_layout((measured_pass.shape, measured_pass.fed_tokens) for measured_pass in measured)
        predictors: dict[bool, Predictor] = {}
        held_out: list[tuple[MeasuredPass, Cost]] = []
        for trains in sorted({measured_pass.shape.trains for measured_pass in measured}):
            of_this_kind = [measured_pass for measured_pass in measured if measured_pass.shape.trains == trains]
            predictors[trains] = Predictor.fit(of_this_kind, rows)
            if len(of_this_kind) >= LEAST_FOR_HOLDING_OUT:
                # Neither the smallest nor the largest: a fit does not have to predict beyond its points.
                left_out = of_this_kind[1:-1:3]
                fitted = [measured_pass for measured_pass in of_this_kind if measured_pass not in left_out]
                without_them = Predictor.fit(fitted, rows)
                held_out += [(measured_pass, without_them.predict(measured_pass.shape)) for measured_pass in left_out]
        pairs = [(predicted, measured_pass.cost) for measured_pass, predicted in held_out]
        error = PredictionErrors.compare(pairs) if pairs else None
        return cls(predictors=predictors, held_out=held_out, error=error)

    def predict(self, shape: InputShape, *, ring: int = 1) -> Cost | None:
        """Predict the cost of a pass; None if no pass of its kind could be measured."""
        predictor = self.predictors.get(shape.trains)
        return None if predictor is None else predictor.predict(shape, ring=ring)
