"""Say how far two numbers are apart, also where one of them is no number."""

import math


def absolute_difference(value: float, reference: float) -> float:
    """Return |value - reference|: 0 for nan beside nan, inf for nan or an infinity beside anything else."""
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    return abs(value - reference)


def relative_difference(value: float, reference: float, *, least_size: float = 0.0) -> float:
    """Return the absolute difference divided by |reference|, or by `least_size` where that is more.

    inf where the numbers differ and there is no size to divide by.
    """
    return as_share(absolute_difference(value, reference), max(abs(reference), least_size))


def as_share(difference: float, size: float) -> float:
    """Return a difference as a share of `size`; inf where there is a difference and no size."""
    if difference == 0 or math.isinf(difference):
        return difference
    return difference / size if size else math.inf
