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

from actor_init.as_json import AnyFloat
from actor_init.dropout_settings import find_acting_dropouts
from actor_init.spec import UsageError
from replay.comparison.comparable import find_reasons_to_refuse, list_tolerated_differences
from replay.output.text import PHASES, pluralise
from replay.runlog.reader import GradientWindow, PastRun, SharedPass, group_passes_and_windows, match_by_key
from replay.runlog.summary import find_peak_bytes
from replay.tolerances.difference import absolute_difference, as_share

# The position of a pass among the reference's passes, the pass, and the pass of the other run on the same input.
MatchedPasses = Sequence[tuple[int, SharedPass, SharedPass]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPoint:
    """One value in both runs.

    place       of its pass among the reference's passes
    name        of the parameter, if it is a parameter's
    apart       the distance of tensors, such as gradients; `reference` and `other` are then their sizes
    num_values  of how many values this one differs most
    """

    source: str
    place: int
    reference: AnyFloat
    other: AnyFloat
    name: str = ""
    apart: AnyFloat | None = None
    num_values: int = 1

    @property
    def difference(self) -> float:
        return absolute_difference(self.other, self.reference) if self.apart is None else self.apart

    @property
    def relative(self) -> float:
        return as_share(self.difference, abs(self.reference))


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """One quantity over all matched passes.

    unit         "", "seconds" or "bytes"
    num_matched  passes, or accumulation windows
    source       the input with the largest relative difference; None where nothing differs
    """

    name: str
    unit: str
    num_matched: int
    mean_reference: AnyFloat
    mean_other: AnyFloat
    max_difference: AnyFloat
    mean_difference: AnyFloat
    max_relative: AnyFloat
    source: str | None
    num_not_finite: int
    points: Sequence[ComparedPoint]

    @classmethod
    def summarize(cls, name: str, points: Sequence[ComparedPoint], unit: str = "") -> "Quantity":
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
    """How far one run is from the reference.

    results  the quantities that the threshold decides on: loss, log-probs, gradient norm, and details if both have them
    costs    the seconds of the phases, and the peak of memory
    notes    what could not be compared, and why
    told     in what the other run did other work and was compared all the same
    """

    num_matched: int
    num_only_in_reference: int
    num_only_in_other: int
    results: list[Quantity]
    costs: list[Quantity]
    notes: list[str]
    told: list[str] = field(default_factory=list)

    @property
    def max_relative(self) -> float:
        return max(quantity.max_relative for quantity in self.results)


def _without_name(command: str) -> str:
    """Leave out `--name` and its value: each run has its own."""
    words = shlex.split(command)
    return shlex.join(word for previous, word in pairwise(["", *words]) if "--name" not in (previous, word))


def compare(reference: PastRun, other: PastRun, *, tolerates_other_code: bool = False) -> Differences:
    """Compare two runs. Raises UsageError, with every reason, if the two did not do the same work.

    The plan: match the passes of both runs by their inputs, and refuse if something else than what is compared differs.
    Then compare each quantity that both runs have, and note what could not be compared. Norms and gradients belong to
    windows, which are matched by the inputs of all their passes.

    tolerates_other_code  other code of the model or the loss, and another --window, are reported and not refused
    """
    tolerated = list_tolerated_differences(reference, other) if tolerates_other_code else []
    passes, windows = group_passes_and_windows(reference.records)
    other_passes, other_windows = group_passes_and_windows(other.records)
    pairs = match_by_key(passes, other_passes, key=lambda shared_pass: shared_pass.source)
    reasons = find_reasons_to_refuse(reference, other, pairs, windows, other_windows)
    if reasons := [reason for reason in reasons if reason not in tolerated]:
        raise UsageError(
            f"{other.folder} did not do the work of {reference.folder}: {'; '.join(reasons)}. "
            f"Try: {_without_name(reference.command)}, changed in nothing but what is to be compared"
        )
    places = {id(shared_pass): place for place, shared_pass in enumerate(passes)}
    matches = [(places[id(shared_pass)], shared_pass, partner) for shared_pass, partner in pairs]
    notes: list[str] = []
    results = [Quantity.summarize("loss", _compare_losses(matches))]
    if points := _compare_log_probs(matches):
        results.append(Quantity.summarize("log-probs", points))
    has_details = reference.measure.keeps_details and other.measure.keeps_details
    if points and has_details:
        results.append(Quantity.summarize("token log-probs", _compare_token_log_probs(matches, reference, other)))
    window_pairs = match_by_key(windows, other_windows, key=lambda window: window.inputs)
    if points := _compare_norms(window_pairs):
        results.append(Quantity.summarize("gradient norm", points))
        if has_details:
            results.append(Quantity.summarize("gradients", _compare_gradients(window_pairs, reference, other)))
    elif windows or other_windows:
        notes.append(
            "gradient norms are not compared: no gradient was averaged over the same inputs "
            f"({_describe_window_size(windows)}, against {_describe_window_size(other_windows)})"
        )
    costs, cost_notes = _compare_costs(matches, reference, other)
    return Differences(
        num_matched=len(pairs),
        num_only_in_reference=len(passes) - len(pairs),
        num_only_in_other=len(other_passes) - len(pairs),
        results=results,
        costs=costs,
        notes=notes + cost_notes + _note_dropout(reference),
        told=tolerated,
    )


def _note_dropout(reference: PastRun) -> list[str]:
    drops = find_acting_dropouts(reference.config)
    return [f"the model trains with {', '.join(drops)}, so its numbers differ by chance"] if drops else []


def _describe_window_size(windows: Sequence[GradientWindow]) -> str:
    return f"{pluralise(len(windows[0].inputs), 'input')} each" if windows else "none"


def _find_farthest(source: str, place: int, references: Iterable[float], others: Iterable[float]) -> ComparedPoint:
    """Compare the values of all peers of a pass, and return the pair that is farthest apart."""
    pairs = product(references, others)
    points = [
        ComparedPoint(source=source, place=place, reference=value, other=other_value) for value, other_value in pairs
    ]
    return max(points, key=lambda point: point.relative)


def _compare_losses(matches: MatchedPasses) -> list[ComparedPoint]:
    points = []
    for place, reference_pass, other_pass in matches:
        losses = (
            [peer.result.loss for peer in shared_pass.peers if peer.result.loss is not None]
            for shared_pass in (reference_pass, other_pass)
        )
        points.append(_find_farthest(reference_pass.source, place, *losses))
    return points


def _compare_log_probs(matches: MatchedPasses) -> list[ComparedPoint]:
    """Make a point for each row."""
    points: list[ComparedPoint] = []
    for place, reference_pass, other_pass in matches:
        # For each run its rows, and for each row the values of all peers.
        rows = (
            zip(*(peer.result.row_log_probs for peer in shared_pass.peers), strict=True)
            for shared_pass in (reference_pass, other_pass)
        )
        points.extend(_find_farthest(reference_pass.source, place, *row) for row in zip(*rows, strict=True))
    return points


def _compare_token_log_probs(matches: MatchedPasses, reference: PastRun, other: PastRun) -> list[ComparedPoint]:
    """Make a point for each pass: its farthest token, relative to the mean size of the pass's log-probs."""
    # Imported here, since logs without details are compared without torch.
    from replay.runlog import token_log_probs

    points = []
    for place, reference_pass, other_pass in matches:
        runs = (reference.folder, reference_pass.peers), (other.folder, other_pass.peers)
        tokens = ([token_log_probs.read(folder, peer.index, peer.rank) for peer in peers] for folder, peers in runs)
        size, other_size, distance, num_values = token_log_probs.compare(*tokens)
        points.append(
            ComparedPoint(
                source=reference_pass.source,
                place=place,
                reference=size,
                other=other_size,
                apart=distance,
                num_values=num_values,
            )
        )
    return points


def _compare_norms(pairs: Iterable[tuple[GradientWindow, GradientWindow]]) -> list[ComparedPoint]:
    return [_find_farthest(window.name, window.last_pass, window.norms, partner.norms) for window, partner in pairs]


def _compare_gradients(
    pairs: Iterable[tuple[GradientWindow, GradientWindow]], reference: PastRun, other: PastRun
) -> list[ComparedPoint]:
    """Make a point for each parameter and window."""
    from replay.runlog import gradient_sketches

    return [
        ComparedPoint(
            source=window.name,
            place=window.last_pass,
            reference=gradient.size,
            other=gradient.other_norm,
            name=gradient.name,
            apart=gradient.distance,
        )
        for window, partner in pairs
        for gradient in gradient_sketches.compare(
            gradient_sketches.read(reference.folder, window.index), gradient_sketches.read(other.folder, partner.index)
        )
    ]


def _compare_costs(matches: MatchedPasses, reference: PastRun, other: PastRun) -> tuple[list[Quantity], list[str]]:
    """Compare the cost of passes that count in both runs, on their slowest and fullest ranks; note what is left out."""
    counted = [match for match in matches if match[1].is_counted and match[2].is_counted]
    if not counted:
        return [], ["time and memory are not compared: no pass counts in both runs (warm-up, a new graph, or traced)"]
    costs: list[Quantity] = []
    for phase in PHASES:
        points = [
            ComparedPoint(source=reference_pass.source, place=place, reference=seconds, other=other_seconds)
            for place, reference_pass, other_pass in counted
            if (seconds := _find_slowest(reference_pass, phase)) is not None
            and (other_seconds := _find_slowest(other_pass, phase)) is not None
        ]
        if points:
            costs.append(Quantity.summarize(phase, points, unit="seconds"))
    if reference.memory_kind != other.memory_kind:
        return costs, [f"memory is not compared: {reference.memory_kind} against {other.memory_kind}"]
    peaks = [
        ComparedPoint(
            source=reference_pass.source,
            place=place,
            reference=_find_peak(reference_pass),
            other=_find_peak(other_pass),
        )
        for place, reference_pass, other_pass in counted
    ]
    return [*costs, Quantity.summarize("peak", peaks, unit="bytes")], []


def _find_slowest(shared_pass: SharedPass, phase: str) -> float | None:
    """Find the seconds of a phase on the slowest rank; None where no rank has measured it."""
    costs = [peer.cost.phases[phase] for peer in shared_pass.peers if phase in peer.cost.phases]
    return max((cost.seconds for cost in costs), default=None)


def _find_peak(shared_pass: SharedPass) -> int:
    return max(find_peak_bytes(peer) for peer in shared_pass.peers)
