"""Bound how far two runs may be apart that differ in rounding alone: `replay parity`.

The floor of a dtype and quantity is the largest distance of any equivalent run. The largest of few samples
underestimates what the next run may show, so the bound is the floor times a factor: for n normal samples, the multiple
of their largest that one more exceeds once in ten million (5 for 16 samples, 11 for 8), and at least 4, because kinds
of equivalent runs were seen to differ by that much among themselves.

A fault must not become the floor. Rounding explains about u * sqrt(2 L), the ceiling: the two additions to the residual
stream that each of L layers makes in a dtype of unit roundoff u. For fp32, which has no wider dtype to accumulate
products in, this is multiplied by sqrt(n) for sums of n products, over the hidden size or the tokens of a pass (Higham,
Accuracy and Stability of Numerical Algorithms, 2002, section 2.8: such errors grow like a square root). An equivalent
beyond that ceiling is not trusted, nor one that is an order of magnitude above all others and within an order of
magnitude of the ceiling. Few samples do not raise a bound above the ceiling.

For gradients each parameter is a point, and for log-probs each token beside the sums of rows. Backward adds to a
residual stream as long as forward's and starts from its rounding error, and the farthest of hundreds of points is
judged, so for these the ceiling is multiplied by CEILINGS.
"""

from collections.abc import Mapping

from replay.tolerances.false_alarms import factor_for
from replay.tolerances.roundoff import FP32_SPACING

LEAST_FACTOR = 4.0
AN_ORDER = 10.0
# Factors for quantities whose value is the farthest of hundreds of points.
CEILINGS = {"token log-probs": 4.0, "gradients": 4.0}


def is_trusted(name: str, measured: Mapping[str, float], ceiling: float) -> bool:
    """Tell whether rounding may explain the distance of the equivalent run `name`, given those of all of them."""
    others = [value for other, value in measured.items() if other != name]
    stands_alone = measured[name] > AN_ORDER * max([FP32_SPACING, *others])
    return measured[name] <= ceiling and not (stands_alone and measured[name] > ceiling / AN_ORDER)


def bound_from_floor(floor: float | None, num_points: int, ceiling: float) -> float:
    """Return how far a run may be from the reference.

    floor       of the quantity; None: no equivalent run could be trusted
    num_points  that the equivalent run of the floor was measured in
    ceiling     what rounding explains
    """
    factor = LEAST_FACTOR if floor is None else max(LEAST_FACTOR, factor_for(num_points))
    some = floor or FP32_SPACING
    return min(factor * some, max(LEAST_FACTOR * some, ceiling))
