"""Did the replay do what training did? Plain data in, plain data out.

    {"outcome": "REPRODUCED", "reason": null, "counts": {"REPRODUCED": 3}, "first": null, "worst": {...},
     "weights": {...}, "environment": {"torch": ["2.13.0", "2.11.0"]}, "passes": [...]}

First come the weights: with other ones no number means anything. Then each claim of a capture is held against the
replay's number, within a bound. A pass DIFFERS only where nothing else explains it: the weights are known to be the
job's, and the claim has no doubt.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from replay.recorded import GRAD_NORM, LOG_PROBS, LOSS, Claim, Recorded
from replay.records import PassRecord
from replay.same_weights import WeightsFound

UNIT_ROUNDOFF = {"float64": 2**-53, "float32": 2**-24, "tf32": 2**-11, "float16": 2**-11, "bfloat16": 2**-8}
LEAST_BOUND = {LOSS: 1e-5, LOG_PROBS: 1e-5, GRAD_NORM: 1e-4}  # as fp32 is held to in the tests


class Outcome(StrEnum):
    REPRODUCED = "REPRODUCED"
    DIFFERS = "DIFFERS"
    CANNOT_TELL = "CANNOT TELL"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What decides which numbers the replay can be held to."""

    dtype: str  # as torch calls it
    num_layers: int
    num_data_ranks: int
    grad_accumulation: int
    steps: bool  # the replay moves its weights
    dropout: Sequence[str] = ()  # of the config, that is not 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A claim beside the replay's number; of log-probs the row that is farthest off, as means over its tokens."""

    name: str
    row: int | None
    recorded: float
    replayed: float
    difference: float  # relative; absolute where the recorded number is below 1, as a sum of log-probs may be 0
    bound: float
    doubt: str | None

    @property
    def agrees(self) -> bool:
        return self.difference <= self.bound


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
    reason: str | None  # of CANNOT TELL
    counts: Mapping[Outcome, int]  # passes
    first: PassVerdict | None  # that differs
    worst: Sequence[Finding]  # of each quantity that was held against a claim, in the passes that were judged
    weights: WeightsFound | None  # of the first pass with other ones, else of the first pass
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
    others = [found for found in weights.values() if found.num_differ]
    return Verdict(
        outcome=outcome,
        reason=_reason(judged) if outcome is Outcome.CANNOT_TELL else None,
        counts=counts,
        first=next((one for one in judged if one.outcome is Outcome.DIFFERS), None),
        worst=_worst(judged),
        weights=next(iter(others or weights.values()), None),
        environment=_environment([recorded for _, recorded in known], setting),
        dtypes=(max((d for _, r in known for d in r.dtypes), key=_roundoff, default="unknown"), setting.dtype),
        passes=judged,
    )


def bound_of(name: str, dtypes: Sequence[str], num_layers: int, num_tokens: int) -> float:
    """How far two numbers may be apart that were computed in two of `dtypes`, in other orders and by other kernels.

    Of a mean over N tokens: u (1/2 + 3 sqrt(2 L / N)), with the unit roundoff u of the coarsest dtype and L layers.
    Each layer adds to the residual stream twice and rounds it, so a log-prob is off by about u sqrt(2 L); over tokens
    that is random and averages out, but for a part that does not. Seen: up to 0.15 u in the loss of Llama 3.1 8B with
    other kernels or tp, and single tokens to 128 at 2 to 24 layers off by 1.8 u sqrt(2 L / N) at most. Of a gradient
    norm: 2 u, where 0.2 u was seen with fp32 master weights, 0.8 u without. In fp32 sums in another order are more
    than all that, and the bounds are those of this project's tests, 1e-5 and 1e-4.
    """
    unit = max(map(_roundoff, dtypes))
    computed = 2 * unit if name == GRAD_NORM else unit * (0.5 + 3 * math.sqrt(2 * num_layers / max(num_tokens, 1)))
    return max(LEAST_BOUND[name], computed)


def _roundoff(dtype: str) -> float:
    return UNIT_ROUNDOFF[dtype]


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
    return found


def _merged(members: Sequence[WeightsFound]) -> WeightsFound:
    doubt = next((one.doubt for one in members if one.doubt is not None), None)
    num_compared = sum(one.num_compared for one in members)
    if doubt is None and not num_compared:
        doubt = "the ranks whose passes were replayed hold no samples of the job's sharded weights"
    return WeightsFound(
        num_compared=num_compared,
        num_differ=sum(one.num_differ for one in members),
        num_parameters=max(one.num_parameters for one in members),
        first=next((one.first for one in members if one.first is not None), None),
        is_sharded=True,
        doubt=doubt,
    )


def _judged(
    record: PassRecord,
    recorded: Recorded,
    weights: WeightsFound,
    known: Sequence[tuple[PassRecord, Recorded]],
    setting: Setting,
) -> PassVerdict:
    findings = [
        _finding(claim, values, record, recorded, setting)
        for claim in recorded.claims
        if (values := _replayed(claim, record)) is not None
    ]
    findings = _with_norms_doubted(findings, record, recorded, known, setting)
    outcome, reason = _outcome(findings, record, recorded, weights, setting)
    return PassVerdict(
        index=record.index, source=record.source, rank=record.rank, outcome=outcome, reason=reason, findings=findings
    )


def _outcome(
    findings: Sequence[Finding], record: PassRecord, recorded: Recorded, weights: WeightsFound, setting: Setting
) -> tuple[Outcome, str | None]:
    if record.error is not None:
        return Outcome.CANNOT_TELL, "the pass failed"
    if weights.num_differ:
        return Outcome.CANNOT_TELL, "other weights"
    if not findings:
        why = "nothing was recorded of what the job computed. Record with reproduce=True, or a ring"
        return Outcome.CANNOT_TELL, why if not recorded.claims else "what was recorded was not replayed"
    certain = [one for one in findings if one.doubt is None]
    wrong = [one for one in certain if not one.agrees]
    if wrong and setting.dropout and recorded.trains:
        return Outcome.CANNOT_TELL, f"the model trains with {', '.join(setting.dropout)}, so its numbers differ by chance"
    if wrong and not weights.are_same:
        return Outcome.CANNOT_TELL, f"{wrong[0].name} is another, but {weights.doubt or 'weights could not be compared'}"
    if wrong:
        return Outcome.DIFFERS, None
    if certain or any(one.agrees for one in findings):
        return Outcome.REPRODUCED, None
    return Outcome.CANNOT_TELL, findings[0].doubt


def _replayed(claim: Claim, record: PassRecord) -> list[float] | None:
    """What the replay computed of it; None where it did not."""
    match claim.name:
        case "loss":
            return None if record.loss is None else [record.loss]
        case "gradient norm":
            return None if record.grad_norm is None else [record.grad_norm]
        case _:
            return list(record.row_log_probs) or None


def _finding(
    claim: Claim, replayed: Sequence[float], record: PassRecord, recorded: Recorded, setting: Setting
) -> Finding:
    """The farthest of a claim's values."""
    per_row = claim.name == LOG_PROBS
    own_tokens = record.row_action_tokens if per_row else [sum(record.row_action_tokens)]
    doubt = claim.doubt
    if claim.num_tokens is not None and list(claim.num_tokens) != list(own_tokens):
        doubt = f"the job's {claim.name} is of {sum(claim.num_tokens)} tokens, the replay's of {sum(own_tokens)}"
    found = []
    for row, (there, here, tokens) in enumerate(zip(claim.values, replayed, own_tokens, strict=True)):
        share = max(tokens, 1) if per_row else 1
        dtypes = [*(recorded.dtypes or ["bfloat16"]), setting.dtype]
        bound = bound_of(claim.name, dtypes, setting.num_layers, tokens)
        found.append(
            Finding(
                name=claim.name,
                row=row if per_row else None,
                recorded=there / share,
                replayed=here / share,
                difference=difference(there / share, here / share),
                bound=bound,
                doubt=doubt,
            )
        )
    return max(found, key=lambda one: one.difference / one.bound)


def difference(recorded: float, replayed: float) -> float:
    """Relative to the recorded number, or to 1 where that is smaller; nan beside nan is none."""
    if recorded == replayed or (math.isnan(recorded) and math.isnan(replayed)):
        return 0.0
    if not (math.isfinite(recorded) and math.isfinite(replayed)):
        return math.inf
    return abs(replayed - recorded) / max(abs(recorded), 1.0)


def _with_norms_doubted(
    findings: Sequence[Finding],
    record: PassRecord,
    recorded: Recorded,
    known: Sequence[tuple[PassRecord, Recorded]],
    setting: Setting,
) -> list[Finding]:
    """A gradient norm is that of everything it was averaged over, and of the loss that was differentiated.

    It is left out where the replay's window cannot be the job's: other ranks, or more passes. It is doubted where the
    loss is, and where the file before does not show that the job's windows are of one pass.
    """
    kept = [one for one in findings if one.name != GRAD_NORM]
    norms = [one for one in findings if one.name == GRAD_NORM]
    ranks = {r.rank for other, r in known if other.index == record.index}
    is_whole = len(ranks) == setting.num_data_ranks == recorded.world_size and setting.grad_accumulation == 1
    if not norms or not is_whole:
        return kept
    is_sure_of_loss = any(one.name == LOSS and one.doubt is None for one in kept)
    doubt = norms[0].doubt
    if not is_sure_of_loss:
        doubt = "the gradient is of a loss that the replay may not compute"
    elif recorded.num_frozen:
        doubt = f"the job did not train {recorded.num_frozen} of its parameters"
    elif not _steps_each_pass(recorded, known):
        doubt = "one gradient norm does not tell how many passes it was accumulated over"
    return [*kept, replace(norms[0], doubt=doubt)]


def _steps_each_pass(recorded: Recorded, known: Sequence[tuple[PassRecord, Recorded]]) -> bool:
    own = {r.step: r for _, r in known if r.rank == recorded.rank and r.trains and r.step is not None}
    before = max((step for step in own if recorded.step is not None and step < recorded.step), default=None)
    return before is not None and any(claim.name == GRAD_NORM for claim in own[before].claims)


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
    return "other weights" if "other weights" in reasons else str(reasons.most_common(1)[0][0])


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
        coarsest = {"dtype": max(recorded.dtypes, key=_roundoff)} if recorded.dtypes else {}
        for name, value in {**recorded.settings, **coarsest}.items():
            if value not in there.setdefault(name, []):
                there[name].append(value)
    shared = [name for name in there if name in setting.environment]
    return {
        name: (", ".join(there[name]), setting.environment[name])
        for name in shared
        if there[name] != [setting.environment[name]]
    }
