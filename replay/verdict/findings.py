"""Hold each number that the job recorded of a pass against the replay's; the bounds are in `replay/tolerances`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from actor_init.as_json import AnyFloat
from actor_init.spec import ActorSpec
from replay.runlog.records import PassRecord
from replay.tolerances.difference import is_coarse, roundoff
from replay.tolerances.job_bounds import (
    ACTION_TOKENS,
    GRAD_NORM,
    GRADIENT,
    LOG_PROBS,
    LOSS,
    ROUTES_FACTOR,
    TOKENS,
    TOKENS_RMS,
    NoiseFloor,
    compute_bound,
    compute_rms_bound,
    measure_difference,
)
from replay.verdict.job_values import MOVED, OPTIMIZER, WEIGHTING, Claim, Recorded, Replayed

MAX_SHARES = 8  # that are listed
ROUNDING_HIDES = "rounding hides it"


class Status(StrEnum):
    AGREES = "agrees"
    DIFFERS = "differs"
    UNSETTLED = "differs, and cannot be judged"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The settings that decide which numbers the replay can be held to.

    floors            by quantity, how far two replays of these inputs were apart that differ in rounding alone
    step_floors       under --step, by pass, how far they were apart up to there
    unknown_rounding  why they could not be measured, if they could not
    """

    dtype: str  # as torch calls it
    num_layers: int
    num_data_ranks: int
    grad_accumulation: int
    steps: ActorSpec | None = None  # the replay moves its weights, with this optimizer
    dropout: Sequence[str] = ()  # of the config, that is not 0
    packs: bool = False  # rows are packed, so that masks of dropout have other shapes than a padded job's
    is_mixture: bool = False  # of experts
    environment: Mapping[str, str] = field(default_factory=dict)
    floors: Mapping[str, NoiseFloor] = field(default_factory=dict)
    step_floors: Mapping[int, Mapping[str, NoiseFloor]] = field(default_factory=dict)
    unknown_rounding: str | None = None

    def bound(self, name: str, dtypes: Sequence[str], num_tokens: int, index: int) -> float:
        """Return how far a number of the pass `index` may be from the job's. Steps before it only widen the bound."""
        grown = self.step_floors.get(index, {}).get(TOKENS if name == ACTION_TOKENS else name)
        least = compute_bound(name, dtypes, self.num_layers, num_tokens, self.floors, is_mixture=self.is_mixture)
        return least if grown is None else max(least, grown.bound)

    def doubt_of_routes(
        self,
        name: str,
        difference: float,
        dtypes: Sequence[str],
        index: int,
        num_tokens: int = 1,
        least_floor: float = 0.0,
    ) -> str | None:
        """Doubt a number of a mixture of experts in a coarse dtype that other routes may explain.

        Two experts' scores may be equal but for rounding. Then the job and the replay may take different ones, and so
        may the two replays that the floor is measured between.

        num_tokens   that the number is the mean of: routes of different tokens are independent
        least_floor  what a floor that was measured without a token at a tie is taken for
        """
        if not (self.is_mixture and is_coarse(dtypes)):
            return None
        floors = self.step_floors.get(index) or self.floors
        own_name = name if name in (TOKENS_RMS, GRAD_NORM, GRADIENT) else TOKENS
        floor = floors.get(own_name)
        formula = 0.0 if own_name == TOKENS_RMS else compute_bound(own_name, dtypes, self.num_layers, 1)
        if floor is not None:
            limit = max(ROUTES_FACTOR * max(floor.value, least_floor), formula)
        else:
            limit = ROUTES_FACTOR * formula if self.unknown_rounding is not None else 0.0
        if difference > limit / math.sqrt(max(num_tokens, 1)):
            return None
        known = "its rounding is not known" if floor is None else f"two replays are {floor.value:.2g} apart"
        return f"tokens at a tie may take another expert: {known}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One recorded quantity beside the replay's. Where it has many values, this is the farthest of them.

    where       of many values: which, such as a row, a token, a parameter
    replayed    None where the replay has no such number
    difference  relative; absolute where the recorded number is below 1, as a sum of log-probs may be 0
    doubt       why another number proves nothing, or why there is nothing to compare
    counts      an equal number is evidence, in spite of a doubt
    said        of what is no number: both values, as text
    """

    name: str
    status: Status
    recorded: AnyFloat
    replayed: AnyFloat | None = None
    difference: AnyFloat | None = None
    bound: AnyFloat | None = None
    where: str | None = None
    doubt: str | None = None
    counts: bool = True
    num_values: int = 1
    said: str | None = None

    @property
    def agrees(self) -> bool:
        return self.status is Status.AGREES

    @property
    def share(self) -> float:
        """The difference as a share of its bound."""
        return 0.0 if self.difference is None or not self.bound else self.difference / self.bound


def finding(
    name: str,
    recorded: float,
    replayed: float,
    *,
    difference: float,
    bound: float,
    doubt: str | None = None,
    counts: bool | None = None,
    where: str | None = None,
    num_values: int = 1,
) -> Finding:
    """Make a finding with its status. Where `counts` is not given, an equal number is evidence if there is no doubt."""
    status = Status.AGREES if difference <= bound else Status.DIFFERS if doubt is None else Status.UNSETTLED
    return Finding(
        name=name,
        status=status,
        recorded=recorded,
        replayed=replayed,
        difference=difference,
        bound=bound,
        where=where,
        doubt=doubt,
        counts=doubt is None if counts is None else counts,
        num_values=num_values,
    )


def weights_that_stay(num_sampled: int, rate: float) -> Finding:
    """Report that the job stepped and that no sampled weight changed."""
    return Finding(
        name=MOVED,
        status=Status.UNSETTLED,
        recorded=0.0,
        doubt="in bf16 a step that is smaller than half the spacing of a weight is lost. Are there fp32 masters?",
        counts=False,
        said=f"none of {num_sampled} sampled parameters moved in a step at learning rate {rate:g}",
    )


def other_settings(differences: Sequence[str]) -> Finding:
    """Report that the job stepped with other optimizer settings than the replay."""
    return Finding(
        name=OPTIMIZER,
        status=Status.UNSETTLED,
        recorded=math.nan,
        doubt="--step steps otherwise than the job did",
        counts=False,
        said="; ".join(differences),
    )


def other_weighting(there: Sequence[float], here: Sequence[float], why: str) -> Finding:
    """Report that the job gave its passes other shares of the gradient than the replay does."""
    job, replay = (", ".join(f"{share:.3g}" for share in shares[:MAX_SHARES]) for shares in (there, here))
    return Finding(
        name=WEIGHTING,
        status=Status.UNSETTLED,
        recorded=math.nan,
        doubt=why,
        counts=False,
        said=f"{job} in the job, {replay} here",
    )


def not_judged(name: str, recorded: float, why: str, replayed: float | None = None) -> Finding:
    return Finding(name=name, status=Status.NOT_JUDGED, recorded=recorded, replayed=replayed, doubt=why, counts=False)


def findings_of(record: PassRecord, recorded: Recorded, replayed: Replayed, setting: Setting) -> list[Finding]:
    """Judge each claim of a pass but the gradient norm, which belongs to a window."""
    claims = [one for one in recorded.claims if one.name != GRAD_NORM and record.error is None]
    findings = [_finding(claim, record, recorded, replayed, setting) for claim in claims]
    return findings + [
        one for claim in claims if (one := _root_mean_square(claim, record, recorded, replayed, setting)) is not None
    ]


def _root_mean_square(
    claim: Claim, record: PassRecord, recorded: Recorded, replayed: Replayed, setting: Setting
) -> Finding | None:
    """Judge all sampled tokens together, where a floor was measured for them."""
    floor = (setting.step_floors.get(record.index) or setting.floors).get(TOKENS_RMS)
    pairs = _pairs(claim, record, replayed)
    is_unknown = setting.unknown_rounding is not None and is_coarse(dtypes_of(recorded, setting))
    if claim.name != TOKENS or floor is None or is_unknown or not pairs:
        return None
    apart = [measure_difference(there, here) for _, there, here, _ in pairs]
    there, here, rms = (
        math.sqrt(sum(x * x for x in xs) / len(pairs)) for xs in ([p[1] for p in pairs], [p[2] for p in pairs], apart)
    )
    bound = compute_rms_bound(floor)
    doubt = setting.doubt_of_routes(TOKENS_RMS, rms, dtypes_of(recorded, setting), record.index)
    return finding(
        TOKENS_RMS, there, here, difference=rms, bound=bound, doubt=doubt, counts=True, num_values=len(pairs)
    )


def dtypes_of(recorded: Recorded, setting: Setting) -> list[str]:
    """List the dtypes that bounds depend on: the job's (bf16 where it does not say) and the replay's."""
    return [*(recorded.dtypes or ["bfloat16"]), setting.dtype]


def _finding(claim: Claim, record: PassRecord, recorded: Recorded, replayed: Replayed, setting: Setting) -> Finding:
    """Judge a claim by the farthest of its values, each a mean over its tokens."""
    findings = []
    dtypes = dtypes_of(recorded, setting)
    for where, there, here, tokens in _pairs(claim, record, replayed):
        doubt = claim.doubt
        if claim.num_tokens is not None and list(claim.num_tokens) != _own_tokens(claim, record):
            own = sum(record.result.row_action_tokens)
            doubt = f"the job's {claim.name} is of {sum(claim.num_tokens)} tokens, the replay's of {own}"
        bound = setting.bound(claim.name, dtypes, tokens, record.index)
        if claim.name == LOSS:
            bound *= max(1.0, replayed.loss_gain)
        if claim.stored_as in ("bfloat16", "float16"):
            bound += roundoff(claim.stored_as)
        apart = measure_difference(there, here)
        findings.append(
            finding(
                claim.name,
                there,
                here,
                difference=apart,
                bound=bound,
                doubt=doubt or setting.doubt_of_routes(claim.name, apart, dtypes, record.index, tokens),
                counts=doubt is None,
                where=where,
            )
        )
    if not findings:
        return not_judged(claim.name, claim.values[0], claim.doubt or f"the replay has no such {claim.name}")
    return replace(max(findings, key=lambda one: one.share), num_values=len(findings))


def _own_tokens(claim: Claim, record: PassRecord) -> list[int]:
    return list(record.result.row_action_tokens) if claim.name == LOG_PROBS else [sum(record.result.row_action_tokens)]


def _pairs(claim: Claim, record: PassRecord, replayed: Replayed) -> list[tuple[str | None, float, float, int]]:
    """Pair the values: where they are, the job's, the replay's, and the number of tokens that they are means of."""
    if claim.name == LOSS:
        [there], here = claim.values, record.result.loss
        return [] if here is None else [(None, there, here, sum(record.result.row_action_tokens))]
    if claim.name in (TOKENS, ACTION_TOKENS):
        ours = replayed.token_log_probs if claim.name == TOKENS else replayed.action_log_probs
        pairs = zip(claim.values, ours, strict=False)
        return [
            (f"{'sampled' if claim.name == TOKENS else 'action'} token {number}", there, here, 1)
            for number, (there, here) in enumerate(pairs)
            if here is not None
        ]
    rows = zip(
        claim.values,
        record.result.row_log_probs,
        record.result.row_action_tokens,
        strict=bool(record.result.row_log_probs),
    )
    return [
        (f"row {row}", there / max(tokens, 1), here / max(tokens, 1), tokens)
        for row, (there, here, tokens) in enumerate(rows)
    ]
