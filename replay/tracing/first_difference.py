"""Find where two traced runs part: the first tensor that is further from the reference's than its bound allows.

Tensors are compared in the order of `TensorKind`, so that a wrong weight or input is named before what is computed from
it. The bounds are those of `replay/tolerances/run_bounds.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actor_init.as_json import AnyFloat
from replay.tolerances.difference import roundoff
from replay.tolerances.run_bounds import compute_layer_bound, compute_measured_bound, compute_weight_bound
from replay.tracing.distances import TensorDistance, measure_distances
from replay.tracing.trace_file import TensorKind, TracedRun

BACKWARD_KINDS = (TensorKind.GRADIENT, TensorKind.PARAMETER_GRADIENT)

# Returns the layer of a module or a parameter, by its name; None outside of the transformer layers.
FindLayer = Callable[[str], int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """The first traced tensor of a run that is further from the reference's than its bound.

    kind                  what the tensor is, and in which part of a pass it was computed
    name                  the module or parameter, as Hugging Face names it; of an input its name: "position_ids"
    what                  "output" or "input" of a module, "weight" or "gradient" of a parameter, "fed" of an input
    layer                 None outside of the transformer layers
    source                the file of the pass, or the first file of the window; None for parameters
    row                   where the difference is largest: of the captured micro-batch; of a parameter, the index in its
                          shorter dim
    token                 column of the captured micro-batch; None for parameters and their gradients
    relative              the largest relative difference of a row (`distances.py`); of inputs the share of tokens that
                          differ
    bound                 what `relative` may be at most
    num_following         traced tensors after this one
    num_following_beyond  how many of those are beyond their bound too
    """

    kind: TensorKind
    name: str
    what: str
    layer: int | None
    source: str | None
    row: int | None
    token: int | None
    relative: AnyFloat
    bound: AnyFloat
    num_following: int
    num_following_beyond: int


# The first difference of each traced run from the reference, by the run's number; None: there is none.
FirstDifferences = Mapping[int, FirstDifference | None]


def find_first_difference(reference: Path, other: Path, equivalents: Sequence[Path] = ()) -> FirstDifference | None:
    """Find the first traced tensor of `other` that is beyond its bound, or None. Both are log folders with a trace.

    `equivalents` are traced runs known to be as right as the reference: how far they are from it is the noise floor.
    They should differ in kernel, order or sharding, not be copies. Raises UsageError for runs that were not traced, or
    have no input in common.
    """
    reference_run, other_run = TracedRun.read(reference), TracedRun.read(other)
    distances = measure_distances(reference_run, other_run)
    bounds = choose_bounds_between(reference_run, other_run, [TracedRun.read(path) for path in equivalents], distances)
    # A distance that is NaN is beyond its bound, since no comparison with it is true.
    beyond = [
        place
        for place, (distance, bound) in enumerate(zip(distances, bounds, strict=True))
        if not distance.relative <= bound
    ]
    if not beyond:
        return None
    first = distances[beyond[0]]
    return FirstDifference(
        kind=first.key.kind,
        name=first.key.name,
        what=first.key.what,
        layer=reference_run.find_layer(first.key.name),
        source=first.source,
        row=first.row,
        token=first.token,
        relative=first.relative,
        bound=bounds[beyond[0]],
        num_following=len(distances) - beyond[0] - 1,
        num_following_beyond=len(beyond) - 1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersPassed:
    """How many layers the values of a tensor have come through in their pass, and in which direction the last one."""

    is_backward: bool
    num_layers: int


def estimate_bound(kind: TensorKind, passed: LayersPassed, roundoff: float, *, same_dtype: bool) -> float:
    """Return the bound of a tensor whose rounding was not measured: it grows with the layers that it came through."""
    if kind is TensorKind.INPUT:
        return 0.0
    if kind is TensorKind.PARAMETER:
        return compute_weight_bound(roundoff, same_dtype=same_dtype)
    return compute_layer_bound(roundoff, passed.num_layers)


def count_layers_passed(distances: Sequence[TensorDistance], find_layer: FindLayer) -> list[LayersPassed]:
    """Count the layers that each tensor has come through, in the order in which they were computed.

    In a model of L layers a tensor of layer l has come through l + 1 layers in the forward, and in the backward through
    all L and then back through L - l. A tensor outside of the layers has come through as many as the one before it.
    Each step of the optimizer begins at 0.
    """
    layers = [find_layer(distance.key.name) for distance in distances]
    num_layers = 1 + max((layer for layer in layers if layer is not None), default=-1)
    layers_passed: list[LayersPassed] = []
    num_passed, num_steps_before = 0, -1
    for distance, layer in zip(distances, layers, strict=True):
        if distance.num_steps_before != num_steps_before:
            num_passed, num_steps_before = 0, distance.num_steps_before
        is_backward = distance.key.kind in BACKWARD_KINDS
        if is_backward:
            num_passed = max(num_passed, num_layers, 0 if layer is None else 2 * num_layers - layer)
        elif distance.key.kind is TensorKind.FORWARD and layer is not None:
            num_passed = max(num_passed, layer + 1)
        layers_passed.append(LayersPassed(is_backward=is_backward, num_layers=num_passed))
    return layers_passed


def choose_bounds(
    distances: Sequence[TensorDistance],
    equivalent_distances: Iterable[Sequence[TensorDistance]],
    find_layer: FindLayer,
    *,
    roundoff: float,
    same_dtype: bool,
) -> list[float]:
    """Return the bound of each tensor in `distances`.

    The noise floor of a layer and direction is the largest distance that an equivalent run has there. Computed tensors
    are bound by it; parameters and inputs, and tensors of a direction in which no equivalent run differs at all, by the
    estimate.

    equivalent_distances  of each equivalent run from the reference
    """
    floors: dict[tuple[bool, int | None], float] = {}
    for run_distances in equivalent_distances:
        for distance in run_distances:
            direction_and_layer = (distance.key.kind in BACKWARD_KINDS, find_layer(distance.key.name))
            floors[direction_and_layer] = max(floors.get(direction_and_layer, 0.0), distance.relative)
    measured_directions = {is_backward for (is_backward, _), floor in floors.items() if floor}
    bounds = []
    for distance, passed in zip(distances, count_layers_passed(distances, find_layer), strict=True):
        estimate = estimate_bound(distance.key.kind, passed, roundoff, same_dtype=same_dtype)
        is_computed = distance.key.kind is TensorKind.FORWARD or passed.is_backward
        if is_computed and passed.is_backward in measured_directions:
            floor = floors.get((passed.is_backward, find_layer(distance.key.name)), 0.0)
            bounds.append(compute_measured_bound(floor, estimate))
        else:
            bounds.append(estimate)
    return bounds


def choose_bounds_between(
    reference: TracedRun, other: TracedRun, equivalents: Sequence[TracedRun], distances: Sequence[TensorDistance]
) -> list[float]:
    """Return the bound of each distance between the first two runs.

    Equivalents that all compute more precisely than the other run say nothing about its rounding, and are left out.
    """
    coarsest = _find_coarsest_roundoff([reference, other])
    is_as_coarse = _find_coarsest_roundoff([reference, *equivalents]) >= coarsest
    return choose_bounds(
        distances,
        [measure_distances(reference, equivalent) for equivalent in equivalents] if is_as_coarse else [],
        reference.find_layer,
        roundoff=coarsest,
        same_dtype=reference.run.actor.dtype == other.run.actor.dtype,
    )


def _find_coarsest_roundoff(traced_runs: Sequence[TracedRun]) -> float:
    return max(roundoff(traced_run.run.actor.dtype) for traced_run in traced_runs)
