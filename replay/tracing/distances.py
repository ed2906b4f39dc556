"""Measure how far two traced runs are apart, tensor by tensor, in the order of the reference.

A row is a token of an activation, or of a parameter one index of its shorter dims. The relative difference of a row is
|other - reference| / max(|reference|, what is usual for a row): so a row that cancels to almost nothing does not count
as far off, and a fault in a single row does not drown in the others. Usual is the median of |reference| over the
tensor's rows that are not 0, and of gradients, which differ more from token to token, what a tenth of them exceed.

Shape letters: T rows, K signs of a sketch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from actor_init.spec import UsageError
from replay.runlog.reader import matched
from replay.tracing.trace_file import (
    FED,
    FED_COLUMNS,
    FED_PLACES,
    LOG_PROBS,
    PREDICTED,
    PREDICTED_COLUMNS,
    PREDICTED_PLACES,
    Key,
    Kind,
    Table,
    TracedPass,
    TracedRun,
    TraceFile,
)

SHARE_OF_MODULE = 1e-2  # a bias whose gradient cancels is held against this share of its module's largest gradient
SMALLEST_LOG_PROB = 1.0  # a log-prob is a difference of logits: near 0 it is as inexact as they are
KINDS = list(Kind)
USUAL = {Kind.PARAMETER: 0.5, Kind.FORWARD: 0.5, Kind.GRADIENT: 0.9, Kind.PARAMETER_GRADIENT: 0.9}  # quantile


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """One tensor, where the two runs are farthest apart. For inputs `relative` is the share of tokens that differ."""

    key: Key
    group: int  # steps before it; 0 without --step
    relative: float
    source: str | None = None
    row: int | None = None  # of the captured micro-batch, or of the parameter
    token: int | None = None  # column of the captured micro-batch


def distances(reference: TracedRun, other: TracedRun) -> list[Distance]:
    """Measure every tensor that both traced: parameters, then inputs, forward and backward; under --step, step by step.

    Raises UsageError if no input is in both, or one holds other tensors.
    """
    pairs = matched(reference.passes, other.passes, key=lambda one: one.source)
    if not pairs:
        raise UsageError(f"{other.run.folder} and {reference.run.folder} have no input in common")
    for one, partner in pairs:
        if one.peers[0].input.input_digest != partner.peers[0].input.input_digest:
            raise UsageError(f"{one.source} holds other tensors in {other.run.folder}, so that no rows match")
    all_distances = list(_of_tables(reference.parameters, other.parameters, group=0, source=None))
    passes: dict[int, list[Distance]] = {}
    orders: dict[int, list[Key]] = {}
    steps = reference.run.measure.step
    for one, partner in pairs:
        group = one.num_windows_before if steps else 0
        a, b = reference.traced(one), other.traced(partner)
        orders.setdefault(group, a.order)
        passes.setdefault(group, []).extend(_of_pass(a, b, group))
    for window, partner_window in matched(reference.windows, other.windows, key=lambda window: window.inputs):
        group = reference.windows.index(window) if steps else 0
        tables = _of_tables(
            reference.end_of(window), other.end_of(partner_window), group=group, source=window.inputs[0]
        )
        passes.setdefault(group, []).extend(tables)
    for group, ones in sorted(passes.items()):
        all_distances += _in_order(_farthest(ones), orders.get(group, []))
    return all_distances


def _farthest(ones: Sequence[Distance]) -> list[Distance]:
    """Keep one distance for each key: the largest of all passes."""
    largest: dict[Key, Distance] = {}
    for one in ones:
        if one.key not in largest or one.relative > largest[one.key].relative:
            largest[one.key] = one
    return list(largest.values())


def _in_order(ones: list[Distance], order: Sequence[Key]) -> list[Distance]:
    """Sort as executed; the gradient of a parameter comes behind that of its module's output."""
    places = {key: place for place, key in enumerate(order)}
    came_back = {key.name: place for key, place in reversed(places.items()) if key.kind is Kind.GRADIENT}

    def place(one: Distance) -> tuple[int, float]:
        kind = min(KINDS.index(one.key.kind), KINDS.index(Kind.GRADIENT))
        if one.key.kind is not Kind.PARAMETER_GRADIENT:
            return kind, places.get(one.key, -1)
        modules = [name for name in came_back if one.key.name.startswith(f"{name}.")]
        return kind, came_back[max(modules, key=len)] + 0.5 if modules else len(order)

    return sorted(ones, key=place)


def _of_pass(a: TracedPass, b: TracedPass, group: int) -> Iterator[Distance]:
    """Measure one pass. Where tp ranks disagree, the pair that is farthest apart counts."""

    def distance(key: Key, relative: float, place: int) -> Distance:
        row, token = divmod(place, a.num_columns)
        return Distance(key=key, group=group, relative=relative, source=a.source, row=row, token=token)

    for name, places, columns in ((FED, FED_PLACES, FED_COLUMNS), (PREDICTED, PREDICTED_PLACES, PREDICTED_COLUMNS)):
        both = list(product(a.tables(name, places), b.tables(name, places)))
        for number, column in enumerate(columns):
            shares = [_share_that_differs(one, partner, number) for one, partner in both]
            yield distance(Key(Kind.INPUT, column, "fed"), *max(shares))
    others = set(b.order)
    goes_back = any(key.kind is Kind.GRADIENT for key in others)
    for key in a.order:
        if key.kind is Kind.GRADIENT and goes_back and key not in others and key._replace(kind=Kind.FORWARD) in others:
            yield distance(key, math.inf, 0)  # seen in forward, and nothing came back to it
        elif key in others and key.kind in (Kind.FORWARD, Kind.GRADIENT):
            both = list(product(a.tables(key), b.tables(key)))
            yield distance(key, *max(_largest_of_tokens(key, one, partner) for one, partner in both))


def _share_that_differs(a: Table, b: Table, column: int) -> tuple[float, int]:
    """Return the share of tokens that differ, and the first. Tokens of one run alone count in the first column."""
    is_in_a, is_in_b = torch.isin(a.places_T, b.places_T), torch.isin(b.places_T, a.places_T)
    differ_T = a.values_TK[is_in_a, column] != b.values_TK[is_in_b, column]
    places = a.places_T[is_in_a][differ_T]
    if column == 0:
        places = torch.cat([places, a.places_T[~is_in_a], b.places_T[~is_in_b]])
    return len(places) / max(1, len(a.places_T), len(b.places_T)), int(places.min()) if len(places) else 0


def _largest_of_tokens(key: Key, a: Table, b: Table) -> tuple[float, int]:
    """Return the largest difference of a token that both have; other tokens are a difference of the inputs."""
    is_in_a, is_in_b = torch.isin(a.places_T, b.places_T), torch.isin(b.places_T, a.places_T)
    smallest = SMALLEST_LOG_PROB if key == Key(Kind.FORWARD, LOG_PROBS, "output") else 0.0
    relative, row = _largest(key.kind, a.values_TK[is_in_a], b.values_TK[is_in_b], smallest)
    return relative, int(a.places_T[is_in_a][row]) if is_in_a.any() else 0


def _of_tables(a: TraceFile, b: TraceFile, *, group: int, source: str | None) -> Iterator[Distance]:
    """Measure parameters, or their gradients."""
    kinds = (Kind.PARAMETER, Kind.PARAMETER_GRADIENT)
    keys = [key for key in a.order if key.kind in kinds and key in b.order]
    sketches = {key: a.tensor(key) for key in keys}
    for key, sketch_TK in sketches.items():
        siblings = [sketches[one] for one in keys if _module(one) == _module(key)]
        is_vector = len(sketch_TK) == 1
        smallest = SHARE_OF_MODULE * max(float(one.norm()) for one in siblings) if is_vector else 0.0
        relative, row = _largest(key.kind, sketch_TK, b.tensor(key), smallest)
        yield Distance(key=key, group=group, relative=relative, source=source, row=row)


def _module(key: Key) -> str:
    return key.name.rpartition(".")[0]


def _largest(kind: Kind, reference_TK: Tensor, other_TK: Tensor, smallest: float) -> tuple[float, int]:
    """Return the largest relative difference of a row, and which row; 0 where there is none. nan beside nan is none."""
    if reference_TK.shape != other_TK.shape:
        return math.inf, 0
    if not len(reference_TK):
        return 0.0, 0
    reference_TK, other_TK = reference_TK.double(), other_TK.double()
    size_T = reference_TK.norm(dim=1)
    sizes = size_T[size_T > 0]
    usual = float(sizes.quantile(USUAL[kind])) if len(sizes) else 0.0
    scale_T = size_T.clamp(min=max(smallest, usual))
    difference_T = (other_TK - reference_TK).norm(dim=1)
    relative_T = torch.where(difference_T == 0, 0.0, difference_T / scale_T)
    both_nan_T = reference_TK.isnan().any(dim=1) & other_TK.isnan().any(dim=1)
    relative_T = torch.where(both_nan_T, 0.0, relative_T.nan_to_num(nan=math.inf, posinf=math.inf))
    row = int(relative_T.argmax())
    return float(relative_T[row]), row
