"""Bound how far two runs of the same work may be apart: in parity, in a trace, in diagnose and in suite.

Parity's runs differ in rounding alone.

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

In a trace, inputs are equal, and weights but for the rounding of sketches and of the coarser dtype. What is computed
drifts apart, for it is rounded in another order. Where equivalent runs were traced that drift is measured: the bound is
SAFETY_FACTOR times the farthest that one of them is from the reference, in any tensor of that layer and direction, and
at least a quarter of this formula, which is the bound otherwise:

    (16 u + 1e-5) sqrt(1 + layers passed)

with u the unit roundoff of the coarser dtype, and 1e-5 for sums and sketches in fp32; a gradient has passed all layers
forward and then those behind its own backward. Errors that are independent add up like the square root of their number.
Between right runs of models of 2 and 24 layers at most a third of it was seen.
"""

from collections.abc import Mapping

from actor_init.spec import Dtype
from replay.tolerances.difference import FP32_SPACING, find_outlier_factor

LEAST_FACTOR = 4.0
ORDER_OF_MAGNITUDE = 10.0
# Factors for quantities whose value is the farthest of hundreds of points.
CEILINGS = {"token log-probs": 4.0, "gradients": 4.0}

# Of a traced tensor: the error of sums and sketches in fp32.
SKETCH_ERROR = 1e-5
# Of a layer, seen in its worst token.
ROUNDINGS_PER_LAYER = 16.0
# What equivalent runs were seen to differ by is multiplied by this.
SAFETY_FACTOR = 4.0

# How far apart, relatively, the losses of two passes of `replay diagnose` may be that do the same work in two ways.
LOSS_BOUND = 1e-3
# Relative, of tensor parallel peers, which sum the same numbers.
PEERS_BOUND = 1e-6
# Of the norm of a parameter's difference, relative to its own: another order of sums in fp32, 8 and 11 significant bits
# in the others. Measured on small models: 5e-7 in fp32, 2e-2 in bf16. A fault that scales or drops a gradient gives 0.3
# and more.
GRADIENT_BOUNDS = {Dtype.FP32: 1e-4, Dtype.BF16: 1e-1, Dtype.FP16: 5e-2}
# Of the whole gradient's norm. A smaller gradient may be the rounding error of larger ones.
SMALLEST_SHARE = 1e-3
# Replaces a norm or a loss of 0.
LEAST_DIVISOR = 1e-30

# How far the loss curve of one training may be from another's in `replay suite`: relative, at every step.
FROM_DEEPSPEED = 0.05
# In nats, before the first step: the weights are the same.
INITIAL_FROM_DDP = 0.001
# In nats, the largest and the mean over the steps.
FROM_DDP = {
    "fsdp2-tp": (0.02, 0.001),
    "deepspeed-autotp": (0.5, 0.15),
}


def is_trusted(name: str, measured: Mapping[str, float], ceiling: float) -> bool:
    """May rounding explain the distance of the equivalent run `name`, given those of all of them?"""
    others = [value for other, value in measured.items() if other != name]
    stands_alone = measured[name] > ORDER_OF_MAGNITUDE * max([FP32_SPACING, *others])
    return measured[name] <= ceiling and not (stands_alone and measured[name] > ceiling / ORDER_OF_MAGNITUDE)


def compute_bound_from_floor(floor: float | None, num_points: int, ceiling: float) -> float:
    """Compute how far a run may be from the reference.

    floor       of the quantity; None: no equivalent run could be trusted
    num_points  that the equivalent run of the floor was measured in
    ceiling     what rounding explains
    """
    factor = LEAST_FACTOR if floor is None else max(LEAST_FACTOR, find_outlier_factor(num_points))
    least_floor = floor or FP32_SPACING
    return min(factor * least_floor, max(LEAST_FACTOR * least_floor, ceiling))


def compute_weight_bound(unit: float, *, same_dtype: bool) -> float:
    """Compute the bound of a parameter; `unit` is the unit roundoff of the coarser dtype."""
    return SKETCH_ERROR + (0.0 if same_dtype else 2 * unit)


def compute_layer_bound(unit: float, num_layers: int) -> float:
    """Compute the bound of a tensor that has passed `num_layers` layers, where nothing was measured."""
    return float((ROUNDINGS_PER_LAYER * unit + SKETCH_ERROR) * (1 + num_layers) ** 0.5)


def compute_measured_bound(floor: float, formula: float) -> float:
    """Compute the bound where equivalent runs were seen to differ by `floor` in that layer and direction."""
    return max(SAFETY_FACTOR * floor, formula / 4)
