"""Fit seconds or bytes to what passes compute: a sum with coefficients that are not negative, and perhaps a floor.

    value = max(floor, constant + a * tokens + b * squares + c * action tokens)

A floor is what small passes cost whatever they compute: a GPU waits for its host, or the peak is that of weights and
gradients. Errors are relative. Which terms there are, and whether there is a floor, is what predicts left-out points
best.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

TERMS = ("constant", "tokens", "squares", "action tokens")
FORMS = ((0,), (0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 2, 3))  # terms that may be there; simple ones first
BETTER = 0.8  # share of the simpler form's error that a form with more terms, or a floor, has to come down to


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    coefficients: Sequence[float]  # of TERMS
    floor: float = 0.0

    def __call__(self, terms: Sequence[float]) -> float:
        linear = sum(factor * term for factor, term in zip(self.coefficients, terms, strict=True))
        return max(self.floor, linear)


def fitted(terms: Sequence[Sequence[float]], values: Sequence[float]) -> Fit:
    """Fit positive `values` to `terms`, a row of TERMS for each."""
    terms_PT = torch.tensor(terms, dtype=torch.float64)
    values_P = torch.tensor(values, dtype=torch.float64).clamp(min=torch.finfo(torch.float64).tiny)
    num_points = len(values_P)
    best, best_error = _fit(terms_PT, values_P, FORMS[0], 0), float("inf")
    for form in FORMS:
        if len(form) > 1 and num_points < len(form) + 1:
            break
        for num_on_floor in (0, *range(2, num_points // 2 + 1)) if len(form) > 1 else (0,):
            if num_points - num_on_floor < len(form) + 1 and len(form) > 1:
                continue
            error = _left_out_error(terms_PT, values_P, form, num_on_floor)
            if error < BETTER * best_error:
                best, best_error = _fit(terms_PT, values_P, form, num_on_floor), error
    return best


def _left_out_error(terms_PT: Tensor, values_P: Tensor, form: Sequence[int], num_on_floor: int) -> float:
    """Return the mean squared relative error at each point of a fit without it."""
    num_points = len(values_P)
    if num_points < 2:
        return 0.0
    total = 0.0
    for left_out in range(num_points):
        kept = torch.arange(num_points) != left_out
        fit = _fit(terms_PT[kept], values_P[kept], form, num_on_floor)
        total += (fit(terms_PT[left_out].tolist()) / float(values_P[left_out]) - 1) ** 2
    return total / num_points


def _fit(terms_PT: Tensor, values_P: Tensor, form: Sequence[int], num_on_floor: int) -> Fit:
    """Fit with these terms; the points with the fewest tokens lie on the floor."""
    if not num_on_floor:
        return Fit(coefficients=_not_negative(terms_PT, values_P, form))
    order = terms_PT[:, 1].argsort()
    low, rest = order[:num_on_floor], order[num_on_floor:]
    floor = float(values_P[low].median())
    return Fit(coefficients=_not_negative(terms_PT[rest], values_P[rest], form), floor=floor)


def _not_negative(terms_PT: Tensor, values_P: Tensor, form: Sequence[int]) -> list[float]:
    """Return the coefficients of the least relative squares, none of them negative.

    The best of them is an unbounded one over some of the terms, and there are few terms: all are tried.
    """
    scale_T = terms_PT.abs().amax(dim=0).clamp(min=1e-300)
    relative_PT = terms_PT / scale_T / values_P[:, None]
    ones_P = torch.ones_like(values_P)
    best, least = [0.0] * len(TERMS), float("inf")
    for chosen in _subsets(form):
        columns = list(chosen)
        found = torch.linalg.lstsq(relative_PT[:, columns], ones_P[:, None], driver="gelsd").solution[:, 0]
        if bool((found < 0).any()):
            continue
        error = float((relative_PT[:, columns] @ found - ones_P).square().sum())
        if error < least:
            least = error
            best = [0.0] * len(TERMS)
            for column, factor in zip(columns, (found / scale_T[columns]).tolist(), strict=True):
                best[column] = factor
    return best


def _subsets(form: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for number in range(1, len(form) + 1):
        yield from combinations(form, number)
