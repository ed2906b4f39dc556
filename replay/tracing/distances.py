"""Measure how far two traced runs are apart, tensor by tensor, in the order of the reference.

A row of an activation is a token; a row of a parameter is one index of its shorter dim. The relative difference of a
row is |other - reference| / max(|reference|, the typical norm of a row), so that a row which cancels to almost nothing
does not count as far off, and a fault in a single row does not drown in the others. The typical norm is the median of
|reference| over the tensor's rows that are not 0. Gradients differ more from token to token, so theirs is the norm that
a tenth of the rows exceed.

Shape letters: T rows, K signs of a sketch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from actor_init.spec import UsageError
from replay.runlog.reader import match_by_key
from replay.tracing.trace_file import (
    FED,
    FED_COLUMNS,
    FED_POSITIONS,
    LOG_PROBS,
    PREDICTED,
    PREDICTED_COLUMNS,
    PREDICTED_POSITIONS,
    TensorKey,
    TensorKind,
    TokenTable,
    TracedPass,
    TracedRun,
    TraceFile,
)

# The gradient of a bias may cancel: its difference is held against at least this share of the largest gradient in its
# module.
MIN_SHARE_OF_MODULE = 1e-2
# A log-prob is a difference of logits, so near 0 it is as inexact as they are.
MIN_LOG_PROB_NORM = 1.0
KINDS = list(TensorKind)
# The quantile of the norms of a tensor's rows that is their typical norm.
TYPICAL_QUANTILE = {
    TensorKind.PARAMETER: 0.5,
    TensorKind.FORWARD: 0.5,
    TensorKind.GRADIENT: 0.9,
    TensorKind.PARAMETER_GRADIENT: 0.9,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDistance:
    """One tensor, where the two runs are farthest apart. For inputs `relative` is the share of tokens that differ.

    num_steps_before  steps of the optimizer before it; 0 without --step
    row               of the captured micro-batch, or of the parameter
    token             column of the captured micro-batch
    """

    key: TensorKey
    num_steps_before: int
    relative: float
    source: str | None = None
    row: int | None = None
    token: int | None = None


def measure_distances(reference: TracedRun, other: TracedRun) -> list[TensorDistance]:
    """Measure every tensor that both traced: parameters, then inputs, forward and backward; under --step, step by step.

    Passes are paired by input, and windows by their inputs. Of a tensor that several passes of a step traced, the
    largest distance is kept. Within a step the distances are sorted as the tensors were computed.

    Raises UsageError if no input is in both, or one holds other tensors.
    """
    pass_pairs = match_by_key(reference.passes, other.passes, key=lambda traced_pass: traced_pass.source)
    if not pass_pairs:
        raise UsageError(f"{other.run.folder} and {reference.run.folder} have no input in common")
    for reference_pass, other_pass in pass_pairs:
        if reference_pass.peers[0].input.input_digest != other_pass.peers[0].input.input_digest:
            raise UsageError(
                f"{reference_pass.source} holds other tensors in {other.run.folder}, so that no rows match"
            )
    weights = list(_measure_parameters(reference.parameters, other.parameters, num_steps_before=0, source=None))
    by_step: dict[int, list[TensorDistance]] = {}
    orders: dict[int, list[TensorKey]] = {}
    has_steps = reference.run.measure.steps
    for reference_pass, other_pass in pass_pairs:
        num_steps = reference_pass.num_windows_before if has_steps else 0
        traced, other_traced = reference.open_pass(reference_pass), other.open_pass(other_pass)
        orders.setdefault(num_steps, traced.order)
        by_step.setdefault(num_steps, []).extend(_measure_pass(traced, other_traced, num_steps))
    for window, other_window in match_by_key(reference.windows, other.windows, key=lambda window: window.inputs):
        num_steps = reference.windows.index(window) if has_steps else 0
        gradients = _measure_parameters(
            reference.open_window_end(window),
            other.open_window_end(other_window),
            num_steps_before=num_steps,
            source=window.inputs[0],
        )
        by_step.setdefault(num_steps, []).extend(gradients)
    distances = weights
    for num_steps, step_distances in sorted(by_step.items()):
        distances += _sort_as_computed(_keep_largest(step_distances), orders.get(num_steps, []))
    return distances


def _keep_largest(distances: Sequence[TensorDistance]) -> list[TensorDistance]:
    """Keep one distance for each tensor: the largest of all passes."""
    largest: dict[TensorKey, TensorDistance] = {}
    for distance in distances:
        if distance.key not in largest or distance.relative > largest[distance.key].relative:
            largest[distance.key] = distance
    return list(largest.values())


def _sort_as_computed(distances: list[TensorDistance], order: Sequence[TensorKey]) -> list[TensorDistance]:
    """Sort in the order of the pass; the gradient of a parameter comes after that of its module's output."""
    places = {key: place for place, key in enumerate(order)}
    gradient_places = {key.name: place for key, place in reversed(places.items()) if key.kind is TensorKind.GRADIENT}

    def find_place(distance: TensorDistance) -> tuple[int, float]:
        key = distance.key
        kind = min(KINDS.index(key.kind), KINDS.index(TensorKind.GRADIENT))
        if key.kind is not TensorKind.PARAMETER_GRADIENT:
            return kind, places.get(key, -1)
        modules = [name for name in gradient_places if key.name.startswith(f"{name}.")]
        return kind, gradient_places[max(modules, key=len)] + 0.5 if modules else len(order)

    return sorted(distances, key=find_place)


def _measure_pass(reference: TracedPass, other: TracedPass, num_steps_before: int) -> Iterator[TensorDistance]:
    """Measure one pass. Where tp ranks disagree, the pair that is farthest apart counts."""

    def describe(key: TensorKey, relative: float, position: int) -> TensorDistance:
        row, token = divmod(position, reference.num_columns)
        return TensorDistance(
            key=key,
            num_steps_before=num_steps_before,
            relative=relative,
            source=reference.source,
            row=row,
            token=token,
        )

    inputs = ((FED, FED_POSITIONS, FED_COLUMNS), (PREDICTED, PREDICTED_POSITIONS, PREDICTED_COLUMNS))
    for name, positions, columns in inputs:
        pairs = list(product(reference.read_tables(name, positions), other.read_tables(name, positions)))
        for number, column in enumerate(columns):
            shares = [_find_share_that_differs(table, other_table, number) for table, other_table in pairs]
            yield describe(TensorKey(TensorKind.INPUT, column, "fed"), *max(shares))
    other_keys = set(other.order)
    has_gradients = any(key.kind is TensorKind.GRADIENT for key in other_keys)
    for key in reference.order:
        is_gradient = key.kind is TensorKind.GRADIENT
        if is_gradient and has_gradients and key not in other_keys:
            # The other run computed the tensor in its forward, and its backward brought no gradient back to it.
            if key._replace(kind=TensorKind.FORWARD) in other_keys:
                yield describe(key, math.inf, 0)
        elif key in other_keys and key.kind in (TensorKind.FORWARD, TensorKind.GRADIENT):
            pairs = list(product(reference.read_tables(key), other.read_tables(key)))
            yield describe(key, *max(_find_largest_of_tokens(key, table, other_table) for table, other_table in pairs))


def _find_share_that_differs(reference: TokenTable, other: TokenTable, column: int) -> tuple[float, int]:
    """Return the share of tokens that differ, and the first. Tokens of one run alone count in the first column."""
    is_shared_T = torch.isin(reference.positions_T, other.positions_T)
    is_shared_in_other_T = torch.isin(other.positions_T, reference.positions_T)
    differs_T = reference.values_TK[is_shared_T, column] != other.values_TK[is_shared_in_other_T, column]
    positions = reference.positions_T[is_shared_T][differs_T]
    if column == 0:
        unshared = reference.positions_T[~is_shared_T], other.positions_T[~is_shared_in_other_T]
        positions = torch.cat([positions, *unshared])
    num_tokens = max(1, len(reference.positions_T), len(other.positions_T))
    return len(positions) / num_tokens, int(positions.min()) if len(positions) else 0


def _find_largest_of_tokens(key: TensorKey, reference: TokenTable, other: TokenTable) -> tuple[float, int]:
    """Return the largest difference of a token that both have; other tokens are a difference of the inputs."""
    is_shared_T = torch.isin(reference.positions_T, other.positions_T)
    is_shared_in_other_T = torch.isin(other.positions_T, reference.positions_T)
    min_norm = MIN_LOG_PROB_NORM if key == TensorKey(TensorKind.FORWARD, LOG_PROBS, "output") else 0.0
    relative, row = _find_largest_row(
        key.kind, reference.values_TK[is_shared_T], other.values_TK[is_shared_in_other_T], min_norm
    )
    return relative, int(reference.positions_T[is_shared_T][row]) if is_shared_T.any() else 0


def _measure_parameters(
    reference: TraceFile, other: TraceFile, *, num_steps_before: int, source: str | None
) -> Iterator[TensorDistance]:
    """Measure parameters, or their gradients."""
    kinds = (TensorKind.PARAMETER, TensorKind.PARAMETER_GRADIENT)
    keys = [key for key in reference.order if key.kind in kinds and key in other.order]
    sketches = {key: reference.read_tensor(key) for key in keys}
    for key, sketch_TK in sketches.items():
        siblings = [sketches[sibling] for sibling in keys if _find_module(sibling) == _find_module(key)]
        is_vector = len(sketch_TK) == 1
        min_norm = MIN_SHARE_OF_MODULE * max(float(sketch.norm()) for sketch in siblings) if is_vector else 0.0
        relative, row = _find_largest_row(key.kind, sketch_TK, other.read_tensor(key), min_norm)
        yield TensorDistance(key=key, num_steps_before=num_steps_before, relative=relative, source=source, row=row)


def _find_module(key: TensorKey) -> str:
    return key.name.rpartition(".")[0]


def _find_largest_row(kind: TensorKind, reference_TK: Tensor, other_TK: Tensor, min_norm: float) -> tuple[float, int]:
    """Return the largest relative difference of a row, and which row; 0 where no row differs.

    A row that holds NaN in both runs does not differ; one that holds it in one run alone differs infinitely.
    """
    if reference_TK.shape != other_TK.shape:
        return math.inf, 0
    if not len(reference_TK):
        return 0.0, 0
    reference_TK, other_TK = reference_TK.double(), other_TK.double()
    norm_T = reference_TK.norm(dim=1)
    norms = norm_T[norm_T > 0]
    typical_norm = float(norms.quantile(TYPICAL_QUANTILE[kind])) if len(norms) else 0.0
    scale_T = norm_T.clamp(min=max(min_norm, typical_norm))
    difference_T = (other_TK - reference_TK).norm(dim=1)
    relative_T = torch.where(difference_T == 0, 0.0, difference_T / scale_T)
    both_nan_T = reference_TK.isnan().any(dim=1) & other_TK.isnan().any(dim=1)
    relative_T = torch.where(both_nan_T, 0.0, relative_T.nan_to_num(nan=math.inf, posinf=math.inf))
    row = int(relative_T.argmax())
    return float(relative_T[row]), row
