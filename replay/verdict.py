"""Did the replay do what training did? Plain data in, plain data out.

    {"outcome": "REPRODUCED", "reason": null, "counts": {"REPRODUCED": 3}, "first": null, "worst": {...},
     "weights": {...}, "environment": {"torch": ["2.13.0", "2.11.0"]}, "passes": [...]}

First come the weights: with other ones no number means anything. Then each claim of a capture is held against the
replay's number, within a bound. A pass DIFFERS only where nothing else explains it: the weights are known to be the
job's, and the claim has no doubt.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from replay.findings import Finding, Setting, findings_of, roundoff
from replay.recorded import Recorded, WeightsFound
from replay.records import PassRecord

OTHER_WEIGHTS = "other weights"


class Outcome(StrEnum):
    REPRODUCED = "REPRODUCED"
    DIFFERS = "DIFFERS"
    CANNOT_TELL = "CANNOT TELL"


@dataclass(frozen=True, kw_only=True, slots=True)
class PassVerdict:
    index: int
    source: str
    rank: int
    outcome: Outcome
    reason: str | None
    findings: Sequence[Finding]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    outcome: Outcome
    reason: str | None  # of the passes of which one cannot tell
    counts: Mapping[Outcome, int]  # passes
    first: PassVerdict | None  # that differs
    worst: Sequence[Finding]  # of each quantity that was held against a claim, in the passes that were judged
    weights: WeightsFound | None  # of the first pass with other ones, else of all passes together
    environment: Mapping[str, tuple[str, str]]  # what differs: in the job, here
    dtypes: tuple[str, str]  # the bounds are the looser of these two
    passes: Sequence[PassVerdict]


def judge(passes: Sequence[tuple[PassRecord, Recorded | None]], setting: Setting) -> Verdict:
    """`passes`: of all ranks, by pass and rank. None: the file could not be read."""
    known = [(record, recorded) for record, recorded in passes if recorded is not None]
    weights = _weights(known, setting)
    judged = [_judged(record, recorded, weights[id(recorded)], known, setting) for record, recorded in known]
    judged = _of_inputs(judged, [record.data_rank for record, _ in known])
    counts = Counter(one.outcome for one in judged)
    outcome = next((o for o in (Outcome.DIFFERS, Outcome.REPRODUCED) if counts[o]), Outcome.CANNOT_TELL)
    others = [found for found in weights.values() if found.first is not None]
    return Verdict(
        outcome=outcome,
        reason=_reason(judged) if counts[Outcome.CANNOT_TELL] or not judged else None,
        counts=dict(counts),
        first=next((one for one in judged if one.outcome is Outcome.DIFFERS), None),
        worst=_worst(judged),
        weights=others[0] if others else _merged(list(weights.values())) if weights else None,
        environment=_environment([recorded for _, recorded in known], setting),
        dtypes=(max((d for _, r in known for d in r.dtypes), key=roundoff, default="unknown"), setting.dtype),
        passes=judged,
    )


def _weights(known: Sequence[tuple[PassRecord, Recorded]], setting: Setting) -> dict[int, WeightsFound]:
    """By recorded pass. What a sharded job's ranks sampled in one step is put together."""
    found = {id(recorded): recorded.weights for _, recorded in known}
    by_step: dict[int | None, list[WeightsFound]] = {}
    for _, recorded in known:
        if recorded.weights.is_sharded:
            by_step.setdefault(recorded.step, []).append(recorded.weights)
    merged = {step: _merged(members) for step, members in by_step.items()}
    for record, recorded in known:
        if recorded.weights.is_sharded:
            found[id(recorded)] = merged[recorded.step]
        if setting.steps and record.index >= setting.grad_accumulation:
            doubt = "the replay has stepped since, so its weights are known before the first step alone"
            found[id(recorded)] = WeightsFound(doubt=doubt)
    steps = {id(recorded): recorded.step or 0 for _, recorded in known}
    others = [(steps[key], name) for key, one in found.items() for name in one.differing]
    return {key: _beside(one, steps[key], others) for key, one in found.items()}


def _beside(weights: WeightsFound, step: int, others: Sequence[tuple[int, str]]) -> WeightsFound:
    """A pass's weights, in view of parameters that were not the job's in the pass of some step, this one or another.

    Of those that this pass has no sample of: what was another one before is another one here too, unless something else
    that was is the job's by now, so that the job has moved its weights in between.
    """
    unseen = [(at, name) for at, name in others if name not in weights.compared]
    if not unseen or not weights.are_same:
        return weights
    before = tuple(dict.fromkeys(name for at, name in unseen if at <= step))
    if before and not any(name in weights.compared for _, name in others):
        return replace(weights, differing=before)
    return replace(weights, doubt=f"in another pass {unseen[0][1]} is not the job's, and this one has no sample of it")


def _merged(members: Sequence[WeightsFound]) -> WeightsFound:
    doubt = next((one.doubt for one in members if one.doubt is not None), None)
    compared = tuple(dict.fromkeys(name for one in members for name in one.compared))
    if doubt is None and not compared:
        doubt = "the ranks whose passes were replayed hold no samples of the job's sharded weights"
    return WeightsFound(
        compared=compared,
        differing=tuple(dict.fromkeys(name for one in members for name in one.differing)),
        num_parameters=max(one.num_parameters for one in members),
        first=next((one.first for one in members if one.first is not None), None),
        is_sharded=members[0].is_sharded,
        doubt=doubt,
    )


def _judged(
    record: PassRecord,
    recorded: Recorded,
    weights: WeightsFound,
    known: Sequence[tuple[PassRecord, Recorded]],
    setting: Setting,
) -> PassVerdict:
    findings = findings_of(record, recorded, known, setting)
    outcome, reason = _outcome(findings, record, recorded, weights, setting)
    return PassVerdict(
        index=record.index, source=record.source, rank=record.rank, outcome=outcome, reason=reason, findings=findings
    )


def _outcome(
    findings: Sequence[Finding], record: PassRecord, recorded: Recorded, weights: WeightsFound, setting: Setting
) -> tuple[Outcome, str | None]:
    if record.error is not None:
        return Outcome.CANNOT_TELL, "the pass failed"
    if weights.differing:
        return Outcome.CANNOT_TELL, OTHER_WEIGHTS
    if not findings:
        why = "nothing was recorded of what the job computed. Record with reproduce=True, or a ring"
        return Outcome.CANNOT_TELL, why if not recorded.claims else "what was recorded was not replayed"
    certain = [one for one in findings if one.doubt is None]
    wrong = [one for one in certain if not one.agrees]
    if wrong and setting.dropout and recorded.trains:
        return (
            Outcome.CANNOT_TELL,
            f"the model trains with {', '.join(setting.dropout)}, so its numbers differ by chance",
        )
    if wrong and not weights.are_same:
        doubt = weights.doubt or "weights could not be compared"
        return Outcome.CANNOT_TELL, f"{wrong[0].name} is off by {wrong[0].difference:.2g}, but {doubt}"
    if wrong:
        return Outcome.DIFFERS, None
    if certain or any(one.agrees for one in findings):
        return Outcome.REPRODUCED, None
    return Outcome.CANNOT_TELL, findings[0].doubt


def _of_inputs(judged: Sequence[PassVerdict], data_ranks: Sequence[int]) -> list[PassVerdict]:
    """tp and ring peers had the same input: the one that is farthest off counts."""
    order = (Outcome.DIFFERS, Outcome.CANNOT_TELL, Outcome.REPRODUCED)
    kept: dict[tuple[int, int], PassVerdict] = {}
    for one, data_rank in zip(judged, data_ranks, strict=True):
        other = kept.setdefault((one.index, data_rank), one)
        if order.index(one.outcome) < order.index(other.outcome):
            kept[one.index, data_rank] = one
    return list(kept.values())


def _reason(judged: Sequence[PassVerdict]) -> str:
    """Other weights before all else, then what is true of most passes."""
    reasons = Counter(one.reason for one in judged if one.reason is not None)
    if not reasons:
        return "no pass was replayed"
    return OTHER_WEIGHTS if OTHER_WEIGHTS in reasons else str(reasons.most_common(1)[0][0])


def _worst(judged: Sequence[PassVerdict]) -> list[Finding]:
    found: dict[str, Finding] = {}
    for one in judged:
        for finding in one.findings if one.outcome is not Outcome.CANNOT_TELL else ():
            if finding.doubt is not None and not finding.agrees:
                continue
            if finding.name not in found or finding.difference > found[finding.name].difference:
                found[finding.name] = finding
    return list(found.values())


def _environment(known: Sequence[Recorded], setting: Setting) -> dict[str, tuple[str, str]]:
    """Settings that both have and that differ; several values in the job are all named."""
    there: dict[str, list[str]] = {}
    for recorded in known:
        coarsest = {"dtype": max(recorded.dtypes, key=roundoff)} if recorded.dtypes else {}
        for name, value in {**recorded.settings, **coarsest}.items():
            if value not in there.setdefault(name, []):
                there[name].append(value)
    shared = [name for name in there if name in setting.environment]
    return {
        name: (", ".join(there[name]), setting.environment[name])
        for name in shared
        if there[name] != [setting.environment[name]]
    }
