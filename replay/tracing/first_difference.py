"""Find where two traced runs part: the first layer and tensor that leaves its bound (replay/tolerances/runs.py).

In the order of Kind, so that a wrong weight or input is named before what is computed from it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replay.tolerances.difference import roundoff
from replay.tolerances.runs import bound_of_layer, bound_of_weights, measured_bound
from replay.tracing.distances import Distance, distances
from replay.tracing.trace_file import Kind, TracedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """The first traced tensor of `other` that is further from the reference's than its bound."""

    kind: Kind
    name: str  # qualified, as Hugging Face has it; of an input what is fed: "position_ids"
    what: str  # "output" or "input" of a module; "weight" or "gradient" of a parameter; "fed"
    layer: int | None  # None outside of the transformer layers
    source: str | None  # the input's file, or the first of a window's; None for parameters
    row: (
        int | None
    )  # of the captured micro-batch, where the difference is largest; of a parameter along its shorter dim
    token: int | None  # column of the captured micro-batch; None for parameters and their gradients
    relative: float  # the largest of a row, see distances.py; of inputs the share of tokens that differ
    bound: float  # that it leaves
    num_following: int  # traced tensors behind it
    num_following_beyond: int  # of those, how many leave their bound too


Parted = Mapping[int, FirstDifference | None]  # by number of the run that was compared with a reference, if traced


def first_difference(reference: Path, other: Path, equivalents: Sequence[Path] = ()) -> FirstDifference | None:
    """Find the first traced tensor of `other` that leaves its bound, or None. Both are log folders with a trace.

    `equivalents` are traced runs known to be as right as the reference: how far they are from it is the noise floor.
    They should differ in kernel, order or sharding, not be copies. Raises UsageError for runs that were not traced, or
    have no input in common.
    """

    first, second = TracedRun.read(reference), TracedRun.read(other)
    apart = distances(first, second)
    bounds = bounds_between(first, second, [TracedRun.read(path) for path in equivalents], apart)
    beyond = [place for place, one in enumerate(apart) if not one.relative <= bounds[place]]
    if not beyond:
        return None
    one = apart[beyond[0]]
    return FirstDifference(
        kind=one.key.kind,
        name=one.key.name,
        what=one.key.what,
        layer=first.layer_of(one.key.name),
        source=one.source,
        row=one.row,
        token=one.token,
        relative=one.relative,
        bound=bounds[beyond[0]],
        num_following=len(apart) - beyond[0] - 1,
        num_following_beyond=len(beyond) - 1,
    )


BACKWARD = (Kind.GRADIENT, Kind.PARAMETER_GRADIENT)


LayerOf = Callable[[str], int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """How many layers a tensor has passed, and in which direction."""

    is_backward: bool
    num_layers: int  # passed so far


def bound_without_floor(kind: Kind, drift: Drift, roundoff: float, *, same_dtype: bool) -> float:
    """Return the bound of a tensor where nothing was measured."""
    if kind is Kind.INPUT:
        return 0.0
    if kind is Kind.PARAMETER:
        return bound_of_weights(roundoff, same_dtype=same_dtype)
    return bound_of_layer(roundoff, drift.num_layers)


def drifts(apart: Sequence[Distance], layer_of: LayerOf) -> list[Drift]:
    """Return the drift of each tensor, in the order in which they were executed."""
    layers = [layer_of(one.key.name) for one in apart]
    num_layers = 1 + max((layer for layer in layers if layer is not None), default=-1)
    drifted: list[Drift] = []
    passed, group = 0, -1
    for one, layer in zip(apart, layers, strict=True):
        if one.group != group:
            passed, group = 0, one.group
        if one.key.kind in BACKWARD:
            passed = max(passed, num_layers, 0 if layer is None else 2 * num_layers - layer)
        elif one.key.kind is Kind.FORWARD and layer is not None:
            passed = max(passed, layer + 1)
        drifted.append(Drift(is_backward=one.key.kind in BACKWARD, num_layers=passed))
    return drifted


def bounds(
    apart: Sequence[Distance],
    equivalents: Iterable[Sequence[Distance]],
    layer_of: LayerOf,
    *,
    roundoff: float,
    same_dtype: bool,
) -> list[float]:
    """Return the bound of each tensor in `found`. A direction in which no equivalent run differed was not measured."""
    floors: dict[tuple[bool, int | None], float] = {}
    for one in (one for run in equivalents for one in run):
        place = (one.key.kind in BACKWARD, layer_of(one.key.name))
        floors[place] = max(floors.get(place, 0.0), one.relative)
    measured = {is_backward for (is_backward, _), floor in floors.items() if floor}
    made = []
    for one, drift in zip(apart, drifts(apart, layer_of), strict=True):
        guess = bound_without_floor(one.key.kind, drift, roundoff, same_dtype=same_dtype)
        is_computed = one.key.kind is Kind.FORWARD or drift.is_backward
        if is_computed and drift.is_backward in measured:
            floor = floors.get((drift.is_backward, layer_of(one.key.name)), 0.0)
            made.append(measured_bound(floor, guess))
        else:
            made.append(guess)
    return made


def bounds_between(
    first: TracedRun, second: TracedRun, equivalents: Sequence[TracedRun], apart: Sequence[Distance]
) -> list[float]:
    """Return the bound of each distance between the first two runs.

    Equivalents that are all finer than the second run say nothing about its rounding.
    """
    coarsest = _coarsest([first, second])
    telling = equivalents if _coarsest([first, *equivalents]) >= coarsest else []
    return bounds(
        apart,
        [distances(first, run) for run in telling],
        first.layer_of,
        roundoff=coarsest,
        same_dtype=first.run.actor.dtype == second.run.actor.dtype,
    )


def _coarsest(runs: Sequence[TracedRun]) -> float:
    return max(roundoff(run.run.actor.dtype) for run in runs)
