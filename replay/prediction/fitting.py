"""Fit seconds or bytes to what passes compute: a sum with coefficients that are not negative, and perhaps a floor.

    value = max(floor, constant + a * tokens + b * squares + c * action tokens + d * squared rows)

A floor is what small passes cost whatever they compute: a GPU waits for its host, or the peak is that of weights and
gradients. Errors are relative. Which terms there are, and whether there is a floor, is what predicts left-out points
best.

Shape letters: P points, T terms, F fits, C some of the terms.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

TERMS = ("constant", "tokens", "squares", "action tokens", "squared rows")
FORMS = ((0,), (0, 1), (0, 1, 2), (0, 1, 4), (0, 1, 3), (0, 1, 2, 3))  # terms that may be there; simple ones first
BETTER = 0.6  # share of the simpler form's error that a form with more terms, or a floor, has to come down to


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
        most_on_floor = num_points - len(form) - 1 if len(form) > 1 else 0
        if len(form) > 1 and num_points <= len(form):
            break
        for num_on_floor in (0, *range(2, most_on_floor + 1)):
            error = _left_out_error(terms_PT, values_P, form, num_on_floor)
            if error < BETTER * best_error:
                best, best_error = _fit(terms_PT, values_P, form, num_on_floor), error
    return best


def _fit(terms_PT: Tensor, values_P: Tensor, form: Sequence[int], num_on_floor: int) -> Fit:
    coefficients_1T, floor_1 = _fits(
        terms_PT, values_P, torch.ones(1, len(values_P), dtype=torch.bool), form, num_on_floor
    )
    return Fit(coefficients=coefficients_1T[0].tolist(), floor=float(floor_1[0]))


def _left_out_error(terms_PT: Tensor, values_P: Tensor, form: Sequence[int], num_on_floor: int) -> float:
    """Return the mean squared relative error at each point of a fit without it."""
    num_points = len(values_P)
    if num_points < 2:
        return 0.0
    kept_PP = ~torch.eye(num_points, dtype=torch.bool)
    coefficients_PT, floor_P = _fits(terms_PT, values_P, kept_PP, form, num_on_floor)
    predicted_P = torch.maximum((terms_PT * coefficients_PT).sum(dim=1), floor_P)
    return float((predicted_P / values_P - 1).square().mean())


def _fits(
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
    for chosen in _subsets(form):
        columns = list(chosen)
        found_FC1 = torch.linalg.lstsq(relative_FPT[:, :, columns], ones_FP1, driver="gelsd").solution
        error_F = (relative_FPT[:, :, columns] @ found_FC1 - ones_FP1).square().sum(dim=(1, 2))
        is_better_F = (found_FC1[:, :, 0] >= 0).all(dim=1) & (error_F < least_F)
        least_F = torch.where(is_better_F, error_F, least_F)
        new_FT = torch.zeros_like(best_FT)
        new_FT[:, columns] = found_FC1[:, :, 0] / scale_T[columns]
        best_FT = torch.where(is_better_F[:, None], new_FT, best_FT)
    return best_FT, floor_F


def _subsets(form: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for number in range(1, len(form) + 1):
        yield from combinations(form, number)
