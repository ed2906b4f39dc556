"""Judge whether the replay computed what training computed. Plain data in, plain data out.

    {"outcome": "REPRODUCED", "reason": null, "counts": {"REPRODUCED": 3}, "windows": {...}, "first": null,
     "worst": [...], "open": [...], "weights": {...}, "environment": {"torch": ["2.13.0", "2.11.0"]}, "passes": [...]}

First come the weights: with other ones no number means anything. Then each number that the job recorded of a pass, and
of the gradient of each of its steps, is held against the replay's, within a bound: it agrees, differs, or is not judged
for a reason that is said. DIFFERS is said only where nothing else explains a number: the weights are known to be the
job's, and there is no doubt that both computed the same quantity. Where there is, the outcome is UNSETTLED.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from actor_init.as_json import to_json
from replay.output.text import pluralise
from replay.runlog.records import PassRecord
from replay.tolerances.difference import is_coarse, roundoff
from replay.tolerances.job_bounds import GRAD_NORM, NoiseFloor
from replay.verdict.findings import (
    ROUNDING_HIDES,
    Finding,
    Setting,
    Status,
    dtypes_of,
    findings_of,
    weights_that_stay,
)
from replay.verdict.gradient_findings import Member, why_not_judged, why_steps_differ, window_findings, windows_of
from replay.verdict.job_values import MISSING_GRADIENT, Recorded, Replayed, WeightComparison, why_not_one_job

OTHER_WEIGHTS, FAILED = "other weights", "the pass failed"
NOT_OPEN = (OTHER_WEIGHTS, FAILED)
NOT_REPLAYED = "what was recorded was not replayed"


class Pass(NamedTuple):
    """A pass on one rank: its record, what the job recorded of it, and what its replay computed besides the record."""

    record: PassRecord
    recorded: Recorded | None  # None: the file could not be read
    replayed: Replayed


class Outcome(StrEnum):
    REPRODUCED = "REPRODUCED"
    DIFFERS = "DIFFERS"
    UNSETTLED = "UNSETTLED"  # a recorded number is another one here, and whose fault that is cannot be told
    CANNOT_TELL = "CANNOT TELL"


@dataclass(frozen=True, kw_only=True, slots=True)
class PassVerdict:
    """The outcome of one pass, or of the gradient of the window that it ends."""

    index: int
    source: str
    rank: int
    outcome: Outcome
    reason: str | None
    findings: Sequence[Finding]
    optimizer_step: int | None = None  # of the job, whose gradient this is; None: this is of a pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    outcome: Outcome
    reason: str | None  # of those of which one cannot tell, or that are unsettled
    counts: Mapping[Outcome, int]  # passes
    window_counts: Mapping[Outcome, int]  # gradients of the job's steps
    first: PassVerdict | None  # that differs, or is unsettled
    worst: Sequence[Finding]  # of each quantity that agrees or differs, the one nearest to its bound
    open: Sequence[Finding]  # of each quantity that was recorded and not judged, one with the reason
    weights: WeightComparison | None  # of the first pass with other ones, else of all passes together
    environment: Mapping[str, tuple[str, str]]  # what differs: in the job, here
    dtypes: tuple[str, str]  # the bounds are the looser of these two
    floors: Mapping[str, NoiseFloor] = field(default_factory=dict)  # measured
    passes: Sequence[PassVerdict] = ()
    windows: Sequence[PassVerdict] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the `verdict` of run.json."""
        values: dict[str, Any] = to_json(self)
        return values


def judge(passes: Sequence[Pass], setting: Setting) -> Verdict:
    """Judge the passes of all ranks, in the order of pass and rank."""
    known = [(record, recorded, replayed) for record, recorded, replayed in passes if recorded is not None]
    if (reason := why_not_one_job([(record, recorded) for record, recorded, _ in known])) is not None:
        return _refused(known, reason, setting)
    norms = {(one.rank, one.step) for _, one, _ in known if any(c.name == GRAD_NORM for c in one.claims)}
    members = [_member(one, norms, setting) for one in known]
    grouped = windows_of(members)
    weights = _weights([(record, recorded) for record, recorded, _ in known])
    if setting.steps is not None:
        weights = _after_steps(weights, members, grouped, setting)
    judged, same_masks = _of_passes(members, weights, setting)
    judged = _of_inputs(judged, [record.data_rank for record, _, _ in known])
    windows = [
        one
        for number, window in enumerate(grouped)
        if (one := _of_window(window, number, members, weights, setting, same_masks)) is not None
    ]
    windows = _none_judged(windows) or windows
    # in the job's time: a wrong gradient comes before what later passes make of it
    everything = sorted([*judged, *windows], key=lambda verdict: (verdict.index, verdict.optimizer_step is not None))
    outcomes = Counter(one.outcome for one in everything)
    order = (Outcome.DIFFERS, Outcome.UNSETTLED, Outcome.REPRODUCED)
    outcome = next((one for one in order if outcomes[one]), Outcome.CANNOT_TELL)
    others = [comparison for comparison in weights.values() if comparison.first is not None]
    has_reason = outcome is Outcome.UNSETTLED or outcomes[Outcome.CANNOT_TELL] or not judged
    return Verdict(
        outcome=outcome,
        reason=_reason(everything, outcome) if has_reason else None,
        counts=dict(Counter(one.outcome for one in judged)),
        window_counts=dict(Counter(one.outcome for one in windows)),
        first=next((one for one in everything if one.outcome is outcome), None)
        if outcome in (Outcome.DIFFERS, Outcome.UNSETTLED)
        else None,
        worst=_worst(everything),
        open=_open(everything),
        weights=others[0] if others else _merged(list(weights.values())) if weights else None,
        environment=_environment([recorded for _, recorded, _ in known], setting),
        dtypes=(max((d for _, r, _ in known for d in r.dtypes), key=roundoff, default="unknown"), setting.dtype),
        floors=setting.floors,
        passes=judged,
        windows=windows,
    )


def _refused(known: Sequence[tuple[PassRecord, Recorded, Replayed]], reason: str, setting: Setting) -> Verdict:
    """Judge nothing, as the passes are not one job's."""
    judged = [_verdict_on(record, (Outcome.CANNOT_TELL, reason), []) for record, _, _ in known]
    judged = _of_inputs(judged, [record.data_rank for record, _, _ in known])
    return Verdict(
        outcome=Outcome.CANNOT_TELL,
        reason=reason,
        counts={Outcome.CANNOT_TELL: len(judged)},
        window_counts={},
        first=None,
        worst=[],
        open=[],
        weights=None,
        environment={},
        dtypes=("unknown", setting.dtype),
        passes=judged,
    )


def _of_passes(
    members: Sequence[Member], weights: Mapping[int, WeightComparison], setting: Setting
) -> tuple[list[PassVerdict], Set[int]]:
    """Judge each pass, and name by id the recorded ones whose dropout masks are the job's, as their numbers are."""
    judged: list[PassVerdict] = []
    same_masks: set[int] = set()
    for _ in range(2 if setting.dropout else 1):  # again, once it is known whether masks are the job's anywhere
        judged = [
            _verdict_on(
                one.record,
                _outcome(one.findings, one, weights[id(one.recorded)], setting, has_masks=bool(same_masks)),
                one.findings,
            )
            for one in members
        ]
        same_masks |= {
            id(one.recorded)
            for one, verdict in zip(members, judged, strict=True)
            if verdict.outcome is Outcome.REPRODUCED and one.recorded.trains
        }
    return judged, same_masks


def _none_judged(windows: Sequence[PassVerdict]) -> list[PassVerdict] | None:
    """Turn windows UNSETTLED where the job recorded gradients and none could be judged: losses alone do not suffice."""
    is_open = [
        one.outcome is Outcome.CANNOT_TELL
        and one.reason not in NOT_OPEN
        and any(finding.status is Status.NOT_JUDGED and finding.doubt != ROUNDING_HIDES for finding in one.findings)
        for one in windows
    ]
    if not any(is_open) or any(one.outcome is not Outcome.CANNOT_TELL for one in windows):
        return None
    return [
        replace(one, outcome=Outcome.UNSETTLED) if is_it else one for one, is_it in zip(windows, is_open, strict=True)
    ]


def _member(
    one: tuple[PassRecord, Recorded, Replayed], norms: Set[tuple[int | None, int | None]], setting: Setting
) -> Member:
    record, recorded, replayed = one
    return Member(
        record=record,
        recorded=recorded,
        replayed=replayed,
        findings=findings_of(record, recorded, replayed, setting),
        follows_a_norm=recorded.step is not None and (recorded.rank, recorded.step - 1) in norms,
    )


def _staying(
    window: Sequence[Member], members: Sequence[Member], weights: Mapping[int, WeightComparison]
) -> list[Finding]:
    """Report a bf16 model of the job's that is the same after a step that should have moved it."""
    last = window[-1].recorded
    step = last.optimizer
    rate = max((float(group.get("lr", 0)) for group in step.settings), default=0.0) if step is not None else 0.0
    if step is None or step.gradients is None or not rate:
        return []
    moves = any(value for sample in step.gradients.samples for value in sample.values)
    if not moves or any(sample.dtype != "bfloat16" for sample in step.gradients.samples):
        return []
    after = [one.recorded for one in members if one.recorded.optimizer_step == (last.optimizer_step or 0) + 1]
    checked = [weights[id(one)] for one in (*after[:1], last)]
    if not after or not all(one.are_same for one in checked):
        return []
    return [weights_that_stay(len(checked[0].compared), rate)]


def _of_window(
    window: Sequence[Member],
    number: int,
    members: Sequence[Member],
    weights: Mapping[int, WeightComparison],
    setting: Setting,
    same_masks: Set[int],
) -> PassVerdict | None:
    """Judge the gradient of one window; None where the job recorded nothing of it.

    same_masks  the recorded passes of a model with dropout whose numbers are the job's: so are their gradient's masks
    """
    findings = [*window_findings(window, setting, number), *_staying(window, members, weights)]
    if not findings:
        return None
    last = window[-1]
    same = _merged([weights[id(one.recorded)] for one in window])
    if all(id(one.recorded) in same_masks for one in window):
        setting = replace(setting, dropout=())
    outcome = _outcome(findings, last, same, setting, has_masks=bool(same_masks))
    return replace(_verdict_on(last.record, outcome, findings), optimizer_step=last.recorded.optimizer_step or 0)


def _verdict_on(record: PassRecord, judged: tuple[Outcome, str | None], findings: Sequence[Finding]) -> PassVerdict:
    outcome, reason = judged
    return PassVerdict(
        index=record.index, source=record.source, rank=record.rank, outcome=outcome, reason=reason, findings=findings
    )


def _weights(known: Sequence[tuple[PassRecord, Recorded]]) -> dict[int, WeightComparison]:
    """Put the samples together, by recorded pass. What a rank sampled between two steps of the job's optimizer is of
    the same weights, and so is what a sharded job's ranks sampled. Ranks that have whole models may have others.
    """
    by_step: dict[Any, list[WeightComparison]] = {}
    for _, recorded in known:
        by_step.setdefault(_same_weights_key(recorded), []).append(recorded.weights)
    merged = {key: _merged(members) if len(members) > 1 else members[0] for key, members in by_step.items()}
    checked: dict[int, WeightComparison] = {}
    for _, recorded in known:
        checked[id(recorded)] = merged[_same_weights_key(recorded)]
        if recorded.weights.is_sharded and len(by_step[_same_weights_key(recorded)]) == 1:
            checked[id(recorded)] = _merged([recorded.weights])
    steps = {id(recorded): recorded.step or 0 for _, recorded in known}
    ranks = {id(recorded): _sharing_ranks(recorded) for _, recorded in known}
    others = [(ranks[key], steps[key], name) for key, weights in checked.items() for name in weights.differing]
    return {
        key: _beside(weights, steps[key], [(at, name) for rank, at, name in others if rank == ranks[key]])
        for key, weights in checked.items()
    }


def _sharing_ranks(recorded: Recorded) -> int | None:
    """Return the rank whose weights these are; None where the ranks of the job share one model's."""
    return None if recorded.weights.is_sharded else recorded.rank


def _after_steps(
    weights: Mapping[int, WeightComparison],
    members: Sequence[Member],
    windows: Sequence[Sequence[Member]],
    setting: Setting,
) -> dict[int, WeightComparison]:
    """Carry the weights on under --step: after each step that is the job's, they are the job's again.

    A step whose gradient was not held against the job's may have been another one.
    """
    checked = dict(weights)
    first = _merged([weights[id(one.recorded)] for one in windows[0]]) if windows else None
    ends = [window[-1].record.index for window in windows]
    reasons = [
        why_steps_differ(window, setting, number) or why_not_judged(window, setting, number)
        for number, window in enumerate(windows)
    ]
    for one in members:
        num_steps = sum(end < one.record.index for end in ends)
        if not num_steps or first is None:
            continue
        reason = next((said[0] for said in reasons[:num_steps] if said), None)
        reason = reason or _why_other_number_of_steps(one.recorded, windows[0], num_steps)
        if setting.unknown_rounding is not None and is_coarse(dtypes_of(one.recorded, setting)):
            reason = reason or f"how far rounding takes two trainings apart is not known: {setting.unknown_rounding}"
        doubt = first.doubt if reason is None else reason
        checked[id(one.recorded)] = replace(first, doubt=doubt)
    return checked


def _why_other_number_of_steps(recorded: Recorded, first: Sequence[Member], num_steps: int) -> str | None:
    """Say so where the job had taken other steps before a pass than the replay: some passes were not recorded."""
    began = first[0].recorded.optimizer_step
    if recorded.optimizer_step is None or began is None or recorded.optimizer_step - began == num_steps:
        return None
    taken = pluralise(recorded.optimizer_step - began, "step")
    return f"the job had taken {taken} before this pass, the replay {num_steps}"


def _same_weights_key(recorded: Recorded) -> tuple[Any, ...]:
    """Return a key that is equal for passes with the same weights."""
    if recorded.optimizer_step is not None:
        return "step", _sharing_ranks(recorded), recorded.optimizer_step
    return ("pass", recorded.step) if recorded.weights.is_sharded else ("alone", id(recorded))


def _beside(weights: WeightComparison, step: int, others: Sequence[tuple[int, str]]) -> WeightComparison:
    """Judge a pass's weights in view of parameters that were not the job's in the pass of this or another step.

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


def _merged(members: Sequence[WeightComparison]) -> WeightComparison:
    doubt = next((one.doubt for one in members if one.doubt is not None), None)
    compared = tuple(dict.fromkeys(name for one in members for name in one.compared))
    if doubt is None and not compared:
        doubt = "the ranks whose passes were replayed hold no samples of the job's sharded weights"
    return WeightComparison(
        compared=compared,
        differing=tuple(dict.fromkeys(name for one in members for name in one.differing)),
        num_parameters=max(one.num_parameters for one in members),
        first=next((one.first for one in members if one.first is not None), None),
        is_sharded=members[0].is_sharded,
        doubt=doubt,
    )


def _outcome(
    findings: Sequence[Finding], of: Member, weights: WeightComparison, setting: Setting, *, has_masks: bool
) -> tuple[Outcome, str | None]:
    """Decide on a pass or window. `has_masks`: other passes have shown that dropout masks are the job's here."""
    record, recorded = of.record, of.recorded
    if record.error is not None:
        return Outcome.CANNOT_TELL, FAILED
    if weights.differing:
        return Outcome.CANNOT_TELL, OTHER_WEIGHTS
    if not findings:
        why = "nothing was recorded of what the job computed. Record with reproduce=True, or a flight recorder"
        return Outcome.CANNOT_TELL, recorded.broke_off or why if not recorded.claims else NOT_REPLAYED
    wrong = [one for one in findings if one.status is Status.DIFFERS]
    unsettled = [one for one in findings if one.status is Status.UNSETTLED]
    # masks make no gradient vanish, but a layer that is dropped out whole has none
    is_missing = any(finding.name == MISSING_GRADIENT for finding in wrong) and "layerdrop" not in setting.dropout
    if (wrong or unsettled) and not is_missing and setting.dropout and recorded.trains:
        trains_with = f"the model trains with {', '.join(setting.dropout)}"
        if not has_masks:
            instead = ". Try: --no-packing, which draws the masks of padded rows" if setting.packs else ""
            return Outcome.CANNOT_TELL, f"{trains_with}, so its numbers differ by chance{instead}"
        if wrong:
            return Outcome.UNSETTLED, f"{trains_with}, and in other passes its masks are the job's"
    if wrong and not weights.are_same:
        doubt = weights.doubt or "weights could not be compared"
        off = f"{wrong[0].name} is off by {wrong[0].difference:.2g}" if wrong[0].said is None else wrong[0].where
        return Outcome.UNSETTLED, f"{off}, but {doubt}"
    if wrong:
        return Outcome.DIFFERS, None
    if unsettled:
        return Outcome.UNSETTLED, unsettled[0].doubt
    if any(one.agrees and one.counts for one in findings):
        return Outcome.REPRODUCED, None
    return Outcome.CANNOT_TELL, findings[0].doubt


def _of_inputs(judged: Sequence[PassVerdict], data_ranks: Sequence[int]) -> list[PassVerdict]:
    """Keep one outcome of tp and ring peers, who had the same input: the worst."""
    order = (Outcome.DIFFERS, Outcome.UNSETTLED, Outcome.CANNOT_TELL, Outcome.REPRODUCED)
    kept: dict[tuple[int, int], PassVerdict] = {}
    for one, data_rank in zip(judged, data_ranks, strict=True):
        other = kept.setdefault((one.index, data_rank), one)
        if order.index(one.outcome) < order.index(other.outcome):
            kept[one.index, data_rank] = one
    return list(kept.values())


def _reason(judged: Sequence[PassVerdict], outcome: Outcome) -> str:
    """Choose the reason: what leaves the outcome unsettled, else that of most passes whose weights were the job's."""
    if outcome is Outcome.UNSETTLED:
        return next(str(verdict.reason) for verdict in judged if verdict.outcome is outcome)
    return next(iter(reasons_of(judged)), "no pass was replayed")


def reasons_of(judged: Sequence[PassVerdict]) -> dict[str, int]:
    """Count the passes and gradients of which one cannot tell by their reason: those with the job's weights first."""
    counts = Counter(str(verdict.reason) for verdict in judged if verdict.outcome is Outcome.CANNOT_TELL)
    return dict(
        sorted(
            counts.items(), key=lambda reason: (NOT_OPEN.index(reason[0]) if reason[0] in NOT_OPEN else -1, -reason[1])
        )
    )


def _worst(judged: Sequence[PassVerdict]) -> list[Finding]:
    worst: dict[str, Finding] = {}
    for one in judged:
        for finding in one.findings if one.outcome is not Outcome.CANNOT_TELL else ():
            if finding.difference is None or not (finding.agrees or finding.status is Status.DIFFERS):
                continue
            if finding.name not in worst or finding.share > worst[finding.name].share:
                worst[finding.name] = finding
    return list(worst.values())


def _open(judged: Sequence[PassVerdict]) -> list[Finding]:
    """List the first finding of each quantity that was recorded and not judged, in passes with the job's weights."""
    not_judged: dict[str, Finding] = {}
    for one in judged:
        for finding in one.findings if one.reason != OTHER_WEIGHTS else ():
            if finding.status in (Status.NOT_JUDGED, Status.UNSETTLED):
                not_judged.setdefault(finding.name, finding)
    return list(not_judged.values())


def _environment(known: Sequence[Recorded], setting: Setting) -> dict[str, tuple[str, str]]:
    """List the settings that both have and that differ; if the job had several values, all are named."""
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
