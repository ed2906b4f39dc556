"""Bound how far one tensor of a traced run may be from the same tensor of another.

Inputs are equal, and weights but for the rounding of sketches and of the coarser dtype. What is computed drifts apart,
for it is rounded in another order. Where equivalent runs were traced that drift is measured: the bound is SAFETY times
the farthest that one of them is from the reference, in any tensor of that layer and direction, and at least a quarter
of this formula, which is the bound otherwise:

    (16 u + 1e-5) sqrt(1 + layers passed)

with u the unit roundoff of the coarser dtype, and 1e-5 for sums and sketches in fp32; a gradient has passed all layers
forward and then those behind its own backward. Errors that are independent add up like the square root of their number.
Between right runs of models of 2 and 24 layers at most a third of it was seen.
"""

OF_A_SKETCH = 1e-5
ROUNDINGS = 16.0  # of a layer, seen in its worst token
SAFETY = 4.0  # times what equivalent runs were seen to differ by


def bound_of_weights(unit: float, *, same_dtype: bool) -> float:
    """Return the bound of a parameter; `unit` is the unit roundoff of the coarser dtype."""
    return OF_A_SKETCH + (0.0 if same_dtype else 2 * unit)


def bound_of_layer(unit: float, num_layers: int) -> float:
    """Return the bound of a tensor that has passed `num_layers` layers, where nothing was measured."""
    return float((ROUNDINGS * unit + OF_A_SKETCH) * (1 + num_layers) ** 0.5)


def measured_bound(floor: float, formula: float) -> float:
    """Return the bound where equivalent runs were seen to differ by `floor` in that layer and direction."""
    return max(SAFETY * floor, formula / 4)
