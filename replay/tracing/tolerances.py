"""How far apart two right runs may be, tensor by tensor.

Inputs have to be equal, and weights but for a sketch's rounding and the coarser dtype's. What is computed drifts apart,
for it is rounded in another order. Where equivalent runs were traced, that is measured: SAFETY times the farthest that
one of them is from the reference, in any tensor of that layer and direction, and at least a quarter of what else is the
bound, a guess:

    (16 u + 1e-5) sqrt(1 + layers passed)

with u the unit roundoff of the coarser dtype, 2^-24 for fp32, 2^-8 for bf16, and 1e-5 for sums and sketches in fp32; a
gradient has passed all layers forward and then those behind its own backward. Errors that are independent add up like
the square root of their number. Between right runs of models of 2 and 24 layers at most a third of it was seen.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from replay.parity.noise_floor import UNIT_ROUNDOFF
from replay.tracing.distances import Distance, distances
from replay.tracing.first_difference import Kind
from replay.tracing.reader import TracedRun

OF_A_SKETCH = 1e-5
ROUNDINGS = 16  # of a layer, seen in its worst token
SAFETY = 4.0  # times what equivalent runs were seen to differ by
BACKWARD = (Kind.GRADIENT, Kind.PARAMETER_GRADIENT)

LayerOf = Callable[[str], int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Where a tensor stands in its pass."""

    is_backward: bool
    num_layers: int  # passed so far


def guessed(kind: Kind, drift: Drift, roundoff: float, *, same_dtype: bool) -> float:
    """The bound of a tensor where nothing was measured."""
    if kind is Kind.INPUT:
        return 0.0
    if kind is Kind.PARAMETER:
        return OF_A_SKETCH + (0.0 if same_dtype else 2 * roundoff)
    return float((ROUNDINGS * roundoff + OF_A_SKETCH) * (1 + drift.num_layers) ** 0.5)


def drifts(found: Sequence[Distance], layer_of: LayerOf) -> list[Drift]:
    """Of each tensor, in the order in which they were executed."""
    layers = [layer_of(one.key.name) for one in found]
    num_layers = 1 + max((layer for layer in layers if layer is not None), default=-1)
    drifted: list[Drift] = []
    passed, group = 0, -1
    for one, layer in zip(found, layers, strict=True):
        if one.group != group:
            passed, group = 0, one.group
        if one.key.kind in BACKWARD:
            passed = max(passed, num_layers, 0 if layer is None else 2 * num_layers - layer)
        elif one.key.kind is Kind.FORWARD and layer is not None:
            passed = max(passed, layer + 1)
        drifted.append(Drift(is_backward=one.key.kind in BACKWARD, num_layers=passed))
    return drifted


def bounds(
    found: Sequence[Distance],
    equivalents: Iterable[Sequence[Distance]],
    layer_of: LayerOf,
    *,
    roundoff: float,
    same_dtype: bool,
) -> list[float]:
    """Of each tensor in `found`. A direction in which no equivalent run differed at all was not measured."""
    floors: dict[tuple[bool, int | None], float] = {}
    for one in (one for run in equivalents for one in run):
        place = (one.key.kind in BACKWARD, layer_of(one.key.name))
        floors[place] = max(floors.get(place, 0.0), one.relative)
    measured = {is_backward for (is_backward, _), floor in floors.items() if floor}
    made = []
    for one, drift in zip(found, drifts(found, layer_of), strict=True):
        guess = guessed(one.key.kind, drift, roundoff, same_dtype=same_dtype)
        is_computed = one.key.kind is Kind.FORWARD or drift.is_backward
        if is_computed and drift.is_backward in measured:
            floor = floors.get((drift.is_backward, layer_of(one.key.name)), 0.0)
            made.append(max(SAFETY * floor, guess / 4))
        else:
            made.append(guess)
    return made


def bounds_between(
    first: TracedRun, second: TracedRun, equivalents: Sequence[TracedRun], found: Sequence[Distance]
) -> list[float]:
    """Of each of the distances `found` between the first two. Equivalents that are all finer than the second run say
    nothing about its rounding."""
    roundoff = _coarsest([first, second])
    telling = equivalents if _coarsest([first, *equivalents]) >= roundoff else []
    return bounds(
        found,
        [distances(first, run) for run in telling],
        first.layer_of,
        roundoff=roundoff,
        same_dtype=first.run.spec.actor.dtype == second.run.spec.actor.dtype,
    )


def _coarsest(runs: Sequence[TracedRun]) -> float:
    return max(UNIT_ROUNDOFF[run.run.spec.actor.dtype] for run in runs)
