"""Measure how far one run's numbers are from another's, input by input. Plain data in, plain data out.

A relative difference is |other - reference| / |reference|. Two values that are equal, or both nan, differ by 0; a value
that is not finite differs from any other by infinity. Where tp or ring peers disagree, the pair that is farthest apart
counts, so that no rank's number hides behind another's.
"""

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from statistics import fmean

from actor_init.dropout_settings import find_acting_dropouts
from actor_init.spec import UsageError
from replay.comparison.comparable import differences_to_tell, reasons_to_refuse
from replay.output.text import PHASES, pluralise
from replay.runlog.reader import GradientWindow, PastRun, SharedPass, group_passes_and_windows, match_by_key
from replay.runlog.summary import find_peak_bytes
from replay.tolerances.difference import absolute_difference, as_share

Placed = Sequence[tuple[int, SharedPass, SharedPass]]  # place among the reference's passes, the pass, its partner


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One value in both runs."""

    source: str
    place: int  # of its pass among the reference's
    reference: float
    other: float
    name: str = ""  # of the parameter
    apart: float | None = None  # of what is no number, such as a gradient: `reference` and `other` are sizes
    num_values: int = 1  # that it is the farthest of

    @property
    def difference(self) -> float:
        return absolute_difference(self.other, self.reference) if self.apart is None else self.apart

    @property
    def relative(self) -> float:
        return as_share(self.difference, abs(self.reference))


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """One quantity over all matched passes; `unit` is "", "seconds" or "bytes"."""

    name: str
    unit: str
    num_matched: int  # passes, or accumulation windows
    mean_reference: float
    mean_other: float
    max_difference: float
    mean_difference: float
    max_relative: float
    source: str | None  # where the relative difference is largest; None where nothing differs
    num_not_finite: int
    points: Sequence[Point]

    @classmethod
    def of(cls, name: str, points: Sequence[Point], unit: str = "") -> "Quantity":
        worst = max(points, key=lambda point: point.relative)
        finite = [math.isfinite(point.reference) and math.isfinite(point.other) for point in points]
        return cls(
            name=name,
            unit=unit,
            num_matched=len({point.place for point in points}),
            mean_reference=fmean(point.reference for point in points),
            mean_other=fmean(point.other for point in points),
            max_difference=max(point.difference for point in points),
            mean_difference=fmean(point.difference for point in points),
            max_relative=worst.relative,
            source=(f"{worst.name} at {worst.source}" if worst.name else worst.source) if worst.relative else None,
            num_not_finite=finite.count(False),
            points=points,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """How far one run is from the reference."""

    num_matched: int
    num_only_in_reference: int
    num_only_in_other: int
    results: list[Quantity]  # what the threshold decides on: loss, log-probs, token log-probs, gradient norm, gradients
    costs: list[Quantity]  # seconds of the phases, peak of memory
    notes: list[str]  # what could not be compared, and why
    told: list[str] = field(default_factory=list)  # in what the other run did other work, and was compared all the same

    @property
    def max_relative(self) -> float:
        return max(quantity.max_relative for quantity in self.results)


def _without_name(command: str) -> str:
    """Leave out `--name`: each run has its own."""
    words = shlex.split(command)
    return shlex.join(word for before, word in pairwise(["", *words]) if "--name" not in (before, word))


def compare(reference: PastRun, other: PastRun, *, tells_of_code: bool = False) -> Differences:
    """Compare two runs. Raises UsageError, with every reason, if the two did not do the same work.

    tells_of_code  other code of the model or the loss, and another --window, are told of and no reason to refuse
    """
    told = differences_to_tell(reference, other) if tells_of_code else []
    passes, windows = group_passes_and_windows(reference.records)
    other_passes, other_windows = group_passes_and_windows(other.records)
    pairs = match_by_key(passes, other_passes, key=lambda one: one.source)
    reasons = reasons_to_refuse(reference, other, pairs, windows, other_windows)
    if reasons := [reason for reason in reasons if reason not in told]:
        raise UsageError(
            f"{other.folder} did not do the work of {reference.folder}: {'; '.join(reasons)}. "
            f"Try: {_without_name(reference.command)}, changed in nothing but what is to be compared"
        )
    places = {id(one): place for place, one in enumerate(passes)}
    placed = [(places[id(one)], one, partner) for one, partner in pairs]
    notes: list[str] = []
    results = [Quantity.of("loss", _losses(placed))]
    if points := _log_probs(placed):
        results.append(Quantity.of("log-probs", points))
    has_details = reference.measure.keeps_details and other.measure.keeps_details
    if points and has_details:
        results.append(Quantity.of("token log-probs", _token_log_probs(placed, reference, other)))
    both = match_by_key(windows, other_windows, key=lambda window: window.inputs)
    if points := _norms(both):
        results.append(Quantity.of("gradient norm", points))
        if has_details:
            results.append(Quantity.of("gradients", _gradients(both, reference, other)))
    elif windows or other_windows:
        notes.append(
            "gradient norms are not compared: no gradient was averaged over the same inputs "
            f"({_window_size(windows)}, against {_window_size(other_windows)})"
        )
    costs, more = _costs(placed, reference, other)
    return Differences(
        num_matched=len(pairs),
        num_only_in_reference=len(passes) - len(pairs),
        num_only_in_other=len(other_passes) - len(pairs),
        results=results,
        costs=costs,
        notes=notes + more + _dropout_notes(reference),
        told=told,
    )


def _dropout_notes(reference: PastRun) -> list[str]:
    drops = find_acting_dropouts(reference.config)
    return [f"the model trains with {', '.join(drops)}, so its numbers differ by chance"] if drops else []


def _window_size(windows: Sequence[GradientWindow]) -> str:
    return f"{pluralise(len(windows[0].inputs), 'input')} each" if windows else "none"


def _farthest(source: str, place: int, references: Iterable[float], others: Iterable[float]) -> Point:
    pairs = product(references, others)
    points = [Point(source=source, place=place, reference=a, other=b) for a, b in pairs]
    return max(points, key=lambda point: point.relative)


def _losses(placed: Placed) -> list[Point]:
    points = []
    for place, one, partner in placed:
        losses = ([peer.result.loss for peer in each.peers if peer.result.loss is not None] for each in (one, partner))
        points.append(_farthest(one.source, place, *losses))
    return points


def _log_probs(placed: Placed) -> list[Point]:
    """Make a point for each row."""
    points: list[Point] = []
    for place, one, partner in placed:
        rows = (zip(*(peer.result.row_log_probs for peer in each.peers), strict=True) for each in (one, partner))
        points.extend(_farthest(one.source, place, *row) for row in zip(*rows, strict=True))
    return points


def _token_log_probs(placed: Placed, reference: PastRun, other: PastRun) -> list[Point]:
    """Make a point for each pass: its farthest token, relative to the mean size of the pass's log-probs."""
    from replay.runlog.token_log_probs import compare, read

    points = []
    for place, one, partner in placed:
        runs = (reference.folder, one.peers), (other.folder, partner.peers)
        tokens = ([read(folder, peer.index, peer.rank) for peer in peers] for folder, peers in runs)
        size, other_size, apart, count = compare(*tokens)
        points.append(
            Point(source=one.source, place=place, reference=size, other=other_size, apart=apart, num_values=count)
        )
    return points


def _norms(pairs: Iterable[tuple[GradientWindow, GradientWindow]]) -> list[Point]:
    return [_farthest(one.name, one.last_pass, one.norms, partner.norms) for one, partner in pairs]


def _gradients(
    pairs: Iterable[tuple[GradientWindow, GradientWindow]], reference: PastRun, other: PastRun
) -> list[Point]:
    """Make a point for each parameter and window."""
    from replay.runlog.gradient_sketches import compare, read

    return [
        Point(
            source=one.name,
            place=one.last_pass,
            reference=gradient.size,
            other=gradient.other_norm,
            name=gradient.name,
            apart=gradient.distance,
        )
        for one, partner in pairs
        for gradient in compare(read(reference.folder, one.index), read(other.folder, partner.index))
    ]


def _costs(placed: Placed, reference: PastRun, other: PastRun) -> tuple[list[Quantity], list[str]]:
    """Compare the cost of passes that count in both runs, on their slowest and fullest ranks; note what is left out."""
    both = [(place, one, partner) for place, one, partner in placed if one.is_counted and partner.is_counted]
    if not both:
        return [], ["time and memory are not compared: no pass counts in both runs (warm-up, a new graph, or traced)"]
    costs: list[Quantity] = []
    for phase in PHASES:
        values = [(place, one.source, _seconds(one, phase), _seconds(partner, phase)) for place, one, partner in both]
        points = [
            Point(source=source, place=place, reference=a, other=b)
            for place, source, a, b in values
            if a is not None and b is not None
        ]
        if points:
            costs.append(Quantity.of(phase, points, unit="seconds"))
    if reference.memory_kind != other.memory_kind:
        return costs, [f"memory is not compared: {reference.memory_kind} against {other.memory_kind}"]
    peaks = [
        Point(source=one.source, place=place, reference=_peak(one), other=_peak(partner))
        for place, one, partner in both
    ]
    return [*costs, Quantity.of("peak", peaks, unit="bytes")], []


def _seconds(one: SharedPass, phase: str) -> float | None:
    return max((peer.cost.phases[phase].seconds for peer in one.peers if phase in peer.cost.phases), default=None)


def _peak(one: SharedPass) -> int:
    return max(find_peak_bytes(peer) for peer in one.peers)
