"""Compare each number that the job recorded of a pass with the replay's.

A finding is one recorded quantity beside the replay's: their difference, its bound, and whether it agrees. The bounds
are those of `replay/tolerances`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from actor_init.as_json import AnyFloat
from actor_init.spec import ActorSpec
from replay.output.text import pluralise
from replay.runlog.records import PassRecord
from replay.tolerances.difference import absolute_difference, is_coarse, roundoff
from replay.tolerances.job_bounds import (
    ACTION_TOKENS,
    GRAD_NORM,
    GRADIENT,
    GRADIENT_QUANTITIES,
    HIDING_BOUND,
    LOG_PROBS,
    LOSS,
    ROUTES_FACTOR,
    TOKEN_LOG_PROBS,
    TOKENS_RMS,
    NoiseFloor,
    compute_bound,
    compute_norm_bound,
    compute_rms_bound,
    compute_signature_bound,
    measure_difference,
    name_signature_floor,
)
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from replay.verdict.recorded_pass import (
    MOVED,
    OPTIMIZER,
    WEIGHTING,
    WEIGHTS_OF_RANKS,
    Claim,
    RecordedPass,
    ReplayedPass,
)

MAX_LISTED_SHARES = 8
ROUNDING_HIDES = "rounding hides it"
RANKS_DIFFER = "the ranks' optimizers have other settings in"
OTHER_WEIGHTS_OF_RANKS = "no replay begins with the weights of several ranks at once"
SETTINGS_OF_RANKS = "no replay takes a step with several settings at once"


class FindingStatus(StrEnum):
    AGREES = "agrees"
    DIFFERS = "differs"
    UNSETTLED = "differs, and cannot be judged"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictSettings:
    """The settings of a replay that decide which of the job's numbers it can be held to, and how closely.

    dtype             as torch names it
    is_dtype_typed    the dtype was typed, whatever the job computed in
    has_user_model    the model is a user's own, with weights from --weights; other models have weights from --model
    lacks_weights     the model is a user's own, and its weights are random, since --weights was not given
    stepping_actor    the actor, if its optimizer steps (with --step, or as the job); None: the replay takes no step
    loaded_counts     counts of steps in the optimizer state with which the replay begins; None: it begins without one
    exchanged_states  pairs of parameters: the job's optimizer held for the first the state that the replay's optimizer
                      was given for the second
    setting_names_from_job  torch's names of the settings that the replay takes from each of the job's steps
    steps_unasked     the replay steps though --step was not typed, and leaves out steps that it cannot take as the job
                      did
    step_dtype        the coarse dtype that the optimizer rounds a step to; None: it rounds no step, or does not step
    num_steps_before  the steps that the job had taken before the first pass of the replay
    dropout           the model's dropout settings that are not 0
    packs             rows are packed, so that dropout masks have other shapes than a padded job's
    why_other_draws   why dropout draws other masks here, even if the rows are fed as captured; None: no reason is known
    why_no_draws      why some dropout of the job cannot act here; None: all of it can
    is_mixture        the model is a mixture of experts
    has_job_routes    in every pass each token went to the experts that the job chose
    model_differences  the known differences between the job's model and the replay's
    floors            noise floors by quantity: how far two replays of these inputs that differ in rounding alone were
                      apart
    step_floors       by pass index, the noise floors of that pass, measured with two replays that step
    why_no_floors     why the floors could not be measured; None: they could, or were not needed
    follows_frozen    the job changed which parameters it trained, and the replay changes them at the same steps
    job_code_clip_norm  the norm to which the job's own code clipped gradients before they were recorded; the replay
                      clips to it too
    """

    dtype: str
    num_layers: int
    num_data_ranks: int
    grad_accumulation: int
    stepping_actor: ActorSpec | None = None
    loaded_counts: Sequence[int] | None = None
    exchanged_states: Sequence[tuple[str, str]] = ()
    setting_names_from_job: frozenset[str] = frozenset()
    steps_unasked: bool = False
    step_dtype: str | None = None
    num_steps_before: int = 0
    dropout: Sequence[str] = ()
    packs: bool = False
    why_other_draws: str | None = None
    why_no_draws: str | None = None
    is_mixture: bool = False
    has_job_routes: bool = False
    model_differences: Sequence[ModelDifference] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    floors: Mapping[str, NoiseFloor] = field(default_factory=dict)
    step_floors: Mapping[int, Mapping[str, NoiseFloor]] = field(default_factory=dict)
    why_no_floors: str | None = None
    is_dtype_typed: bool = False
    has_user_model: bool = False
    lacks_weights: bool = False
    follows_frozen: bool = False
    job_code_clip_norm: float | None = None

    @property
    def follows_steps(self) -> bool:
        """Does the replay's optimizer step where the job's did?"""
        return self.stepping_actor is not None

    @property
    def has_other_trained_parameters(self) -> bool:
        """Did the job freeze a parameter, at first or later, that the replay trains, or the other way round?"""
        return any(difference.kind is ModelDifferenceKind.FROZEN for difference in self.model_differences)

    @property
    def chooses_experts(self) -> bool:
        """Did tokens choose their experts here, so that a token at a tie may have other experts than in the job?"""
        return self.is_mixture and not self.has_job_routes

    def choose_bound(self, name: str, dtypes: Sequence[str], num_tokens: int, index: int) -> float:
        """Return how far a number of the pass `index` may be from the job's. Earlier steps can only widen the bound."""
        step_floor = self.step_floors.get(index, {}).get(TOKEN_LOG_PROBS if name == ACTION_TOKENS else name)
        bound = compute_bound(name, dtypes, self.num_layers, num_tokens, self.floors, is_mixture=self.chooses_experts)
        if step_floor is None:
            return bound
        widened = step_floor.bound
        if name == GRAD_NORM and (signed := self._list_signature_floors(index)):
            # A floor that was measured with a few norms is poor. The whole norm is off by no more than the elements of
            # most kinds of parameters are.
            typical = signed[len(signed) // 2]
            elements = compute_signature_bound(dtypes, self.num_layers, typical, has_stepped=True)
            widened = min(widened, compute_norm_bound(elements, dtypes))
        return max(bound, widened)

    def choose_signature_bound(
        self, kind: str, dtypes: Sequence[str], index: int, num_passes: int = 1, *, has_stepped: bool = False
    ) -> float:
        """Return how large the root mean square of a signature's differences may be, for a kind of parameters.

        A kind without a measured floor gets the largest floor of the other kinds. The last two arguments are those of
        `compute_signature_bound`.
        """
        floors = self.step_floors.get(index) or self.floors
        largest = next(iter(self._list_signature_floors(index)[-1:]), None)
        floor = floors.get(name_signature_floor(kind), largest)
        return compute_signature_bound(dtypes, self.num_layers, floor, num_passes, has_stepped=has_stepped)

    def _list_signature_floors(self, index: int) -> list[NoiseFloor]:
        """List the floors of all kinds of parameters, the smallest first."""
        floors = self.step_floors.get(index) or self.floors
        signed = [floor for name, floor in floors.items() if name.startswith(name_signature_floor(""))]
        return sorted(signed, key=lambda floor: floor.value)

    def doubt_expert_routes(
        self,
        name: str,
        difference: float,
        dtypes: Sequence[str],
        index: int,
        num_tokens: int = 1,
        least_floor: float = 0.0,
    ) -> str | None:
        """Say why a difference in a mixture of experts proves nothing: tokens may have been routed to other experts.

        Two experts' scores of a token may be equal except for rounding: a tie. Then the job and the replay may choose
        different experts, and so may the two replays with which the floor is measured. This happens only in a coarse
        dtype, one with less precision than fp32.

        Returns None if routes do not explain a difference of this size. If each token went to the job's experts, routes
        explain nothing, and the only doubt is a rounding that could not be measured.

        num_tokens   the number of tokens over which the number is a mean: the routes of tokens are independent
        least_floor  the least floor to assume, since the replays of a measured floor may have had no token at a tie
        """
        if not (self.is_mixture and is_coarse(dtypes)):
            return None
        floors = self.step_floors.get(index) or self.floors
        quantity = name if name in (TOKENS_RMS, GRAD_NORM, GRADIENT) else TOKEN_LOG_PROBS
        floor = floors.get(quantity)
        if self.has_job_routes and (floor is not None or self.why_no_floors is None):
            return None
        formula = 0.0 if quantity == TOKENS_RMS else compute_bound(quantity, dtypes, self.num_layers, 1)
        if floor is not None:
            limit = max(ROUTES_FACTOR * max(floor.value, least_floor), formula)
        else:
            limit = ROUTES_FACTOR * formula if self.why_no_floors is not None else 0.0
        if difference > limit / math.sqrt(max(num_tokens, 1)):
            return None
        if self.has_job_routes:
            return f"in a mixture of experts its rounding is not known: {self.why_no_floors}"
        rounding = "its rounding is not known" if floor is None else f"two replays are {floor.value:.2g} apart"
        return f"tokens at a tie may take another expert: {rounding}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One recorded quantity beside the replay's. Where it has many values, this is the farthest of them.

    where           which of many values this is: a row, a token, a parameter; None: there is only one
    replayed        None: the replay has no such number
    difference      relative; absolute if the recorded number is below 1, since a sum of log-probs may be 0; None:
                    nothing was compared
    bound           the largest difference with which the numbers agree; None: nothing was compared
    doubt           why a different number proves nothing, or why there is nothing to compare; None: there is no doubt
    is_evidence     an equal number is evidence that the replay does what the job did, even if there is a doubt
    num_values      how many values were compared
    values_as_text  what was compared, in words; None: numbers were compared
    """

    name: str
    status: FindingStatus
    recorded: AnyFloat
    replayed: AnyFloat | None = None
    difference: AnyFloat | None = None
    bound: AnyFloat | None = None
    where: str | None = None
    doubt: str | None = None
    is_evidence: bool = True
    num_values: int = 1
    values_as_text: str | None = None

    @property
    def agrees(self) -> bool:
        return self.status is FindingStatus.AGREES

    @property
    def is_wrong(self) -> bool:
        """Is it another number than the job's, whether or not that proves a difference?"""
        return self.status in (FindingStatus.DIFFERS, FindingStatus.UNSETTLED)

    @property
    def share_of_bound(self) -> float:
        """The difference as a share of its bound."""
        return 0.0 if self.difference is None or not self.bound else self.difference / self.bound


def judge_number(
    name: str,
    recorded: float,
    replayed: float,
    *,
    difference: float,
    bound: float,
    doubt: str | None = None,
    is_evidence: bool | None = None,
    where: str | None = None,
    num_values: int = 1,
) -> Finding:
    """Judge a number that the job recorded, by its difference from the replay's number and the bound of the difference.

    If the bound is so wide that a loss or a gradient could be wrong by about its own size, agreement within the bound
    means nothing, and the number is not judged. Equal infinities have the difference 0, and so has nan beside nan or an
    infinity: a replay reproduces an overflow of the job by its own overflow.

    is_evidence  an equal number is evidence; None: it is evidence unless there is a doubt
    """
    if math.isnan(difference):
        difference = absolute_difference(replayed, recorded)
    if difference <= bound and bound > HIDING_BOUND and name in (LOSS, *GRADIENT_QUANTITIES):
        status, doubt, is_evidence = FindingStatus.NOT_JUDGED, ROUNDING_HIDES, False
    elif difference <= bound:
        status = FindingStatus.AGREES
    else:
        status = FindingStatus.DIFFERS if doubt is None else FindingStatus.UNSETTLED
    return Finding(
        name=name,
        status=status,
        recorded=recorded,
        replayed=replayed,
        difference=difference,
        bound=bound,
        where=where,
        doubt=doubt,
        is_evidence=doubt is None if is_evidence is None else is_evidence,
        num_values=num_values,
    )


def choose_worst(findings: Sequence[Finding]) -> Finding:
    """Choose the worst finding. One that differs without a doubt is worse than a doubted one, however far off."""
    return max(findings, key=lambda finding: (finding.status is FindingStatus.DIFFERS, finding.share_of_bound))


def report_unmoved_weights(num_sampled: int, rate: float) -> Finding:
    """Report that the job stepped and that no sampled weight changed."""
    return Finding(
        name=MOVED,
        status=FindingStatus.UNSETTLED,
        recorded=0.0,
        doubt="in bf16 a step that is smaller than half the spacing of a weight is lost. Are there fp32 masters?",
        is_evidence=False,
        values_as_text=f"none of {num_sampled} sampled parameters moved in a step at learning rate {rate:g}",
    )


def report_other_settings(differences: Sequence[str]) -> Finding:
    """Report that the job stepped with other optimizer settings than the replay."""
    return Finding(
        name=OPTIMIZER,
        status=FindingStatus.UNSETTLED,
        recorded=math.nan,
        doubt="--step steps otherwise than the job did",
        is_evidence=False,
        values_as_text="; ".join(differences),
    )


def report_miscounted_steps(number: int, counted: int, counted_later: int) -> Finding:
    """Report how many steps the job's optimizer had counted before its step `number`, from 0, and before the next."""
    return Finding(
        name=OPTIMIZER,
        status=FindingStatus.UNSETTLED,
        recorded=math.nan,
        doubt="a step may have been taken twice, and the replay takes none",
        is_evidence=False,
        values_as_text=f"the optimizer had counted {pluralise(counted, 'step')} before step {number + 1}, and "
        f"{counted_later} before step {number + 2}",
    )


def report_settings_of_ranks(number: int, difference: str) -> Finding:
    """Report that the job's ranks, which hold whole models, took step `number`, from 0, with different settings."""
    return _report_ranks(OPTIMIZER, f"{RANKS_DIFFER} step {number + 1}: {difference}", SETTINGS_OF_RANKS)


def report_weights_of_ranks(difference: str) -> Finding:
    """Report that the job's ranks, which hold whole models, began with weights of their own."""
    return _report_ranks(WEIGHTS_OF_RANKS, difference, OTHER_WEIGHTS_OF_RANKS)


def _report_ranks(name: str, difference: str, doubt: str) -> Finding:
    return Finding(
        name=name,
        status=FindingStatus.UNSETTLED,
        recorded=math.nan,
        doubt=doubt,
        is_evidence=False,
        values_as_text=difference,
    )


def report_other_weighting(job_shares: Sequence[float], replay_shares: Sequence[float], why: str) -> Finding:
    """Report that the job gave its passes other shares of the gradient than the replay does."""
    job, replay = (
        ", ".join(f"{share:.3g}" for share in shares[:MAX_LISTED_SHARES]) for shares in (job_shares, replay_shares)
    )
    return Finding(
        name=WEIGHTING,
        status=FindingStatus.UNSETTLED,
        recorded=math.nan,
        doubt=why,
        is_evidence=False,
        values_as_text=f"{job} in the job, {replay} here",
    )


def make_unjudged_finding(name: str, recorded: float, why: str, replayed: float | None = None) -> Finding:
    """Make the finding of a recorded number that can be compared with nothing."""
    return Finding(
        name=name, status=FindingStatus.NOT_JUDGED, recorded=recorded, replayed=replayed, doubt=why, is_evidence=False
    )


def compare_pass(
    record: PassRecord, recorded: RecordedPass, replayed: ReplayedPass, settings: VerdictSettings
) -> list[Finding]:
    """Compare each claim of a pass with the replay's numbers, except the gradient norm, which belongs to a window.

    A pass that failed has no numbers, and no finding.
    """
    if record.error is not None:
        return []
    claims = [claim for claim in recorded.claims if claim.name != GRAD_NORM]
    findings = [_compare_claim(claim, record, recorded, replayed, settings) for claim in claims]
    together = [_compare_root_mean_square(claim, record, recorded, replayed, settings) for claim in claims]
    return findings + [finding for finding in together if finding is not None]


def _compare_root_mean_square(
    claim: Claim, record: PassRecord, recorded: RecordedPass, replayed: ReplayedPass, settings: VerdictSettings
) -> Finding | None:
    """Compare all sampled tokens together; None if no floor was measured for them, or if there are none."""
    floor = (settings.step_floors.get(record.index) or settings.floors).get(TOKENS_RMS)
    pairs = _pair_values(claim, record, replayed)
    is_unknown = settings.why_no_floors is not None and is_coarse(list_dtypes(recorded, settings))
    if claim.name != TOKEN_LOG_PROBS or floor is None or is_unknown or not pairs:
        return None
    rms_difference = root_mean_square(
        [measure_difference(job_value, replay_value) for _, job_value, replay_value, _ in pairs]
    )
    dtypes = list_dtypes(recorded, settings)
    return judge_number(
        TOKENS_RMS,
        root_mean_square([job_value for _, job_value, _, _ in pairs]),
        root_mean_square([replay_value for _, _, replay_value, _ in pairs]),
        difference=rms_difference,
        bound=compute_rms_bound(floor),
        doubt=settings.doubt_expert_routes(TOKENS_RMS, rms_difference, dtypes, record.index),
        is_evidence=True,
        num_values=len(pairs),
    )


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / max(len(values), 1))


def list_dtypes(recorded: RecordedPass, settings: VerdictSettings) -> list[str]:
    """List the dtypes that bounds depend on: the job's (bf16 if unknown), the replay's, and that of earlier steps.

    Some optimizers, such as Muon, round a step to a coarse dtype. After such a step job and replay have the same
    weights only to that dtype's precision.
    """
    is_after_step = recorded.num_steps_before is None or recorded.num_steps_before > settings.num_steps_before
    step_dtypes = [settings.step_dtype] if is_after_step and settings.step_dtype is not None else []
    return [*(recorded.dtypes or ["bfloat16"]), settings.dtype, *step_dtypes]


def _compare_claim(
    claim: Claim, record: PassRecord, recorded: RecordedPass, replayed: ReplayedPass, settings: VerdictSettings
) -> Finding:
    """Compare the values of a claim, each a mean over its tokens, and return the finding of the worst value.

    A loss is a function of log-probs, so the steeper the function, the wider the bound. A value that the job stored in
    a 16-bit dtype was rounded once more, which widens the bound too.
    """
    findings = []
    dtypes = list_dtypes(recorded, settings)
    for where, job_value, replay_value, tokens in _pair_values(claim, record, replayed):
        doubt = claim.doubt
        if claim.num_tokens is not None and list(claim.num_tokens) != _count_tokens(claim, record):
            replay_tokens = sum(record.result.row_action_tokens)
            doubt = f"the job's {claim.name} is of {sum(claim.num_tokens)} tokens, the replay's of {replay_tokens}"
        bound = settings.choose_bound(claim.name, dtypes, tokens, record.index)
        if claim.name == LOSS:
            bound *= max(1.0, replayed.log_prob_weights.size)
        if claim.stored_as in ("bfloat16", "float16"):
            bound += roundoff(claim.stored_as)
        distance = measure_difference(job_value, replay_value)
        findings.append(
            judge_number(
                claim.name,
                job_value,
                replay_value,
                difference=distance,
                bound=bound,
                doubt=doubt or settings.doubt_expert_routes(claim.name, distance, dtypes, record.index, tokens),
                is_evidence=doubt is None,
                where=where,
            )
        )
    if not findings:
        return make_unjudged_finding(claim.name, claim.values[0], claim.doubt or f"the replay has no such {claim.name}")
    return replace(max(findings, key=lambda finding: finding.share_of_bound), num_values=len(findings))


def _count_tokens(claim: Claim, record: PassRecord) -> list[int]:
    """Count the replay's tokens that belong to each value of a claim."""
    return list(record.result.row_action_tokens) if claim.name == LOG_PROBS else [sum(record.result.row_action_tokens)]


def _pair_values(
    claim: Claim, record: PassRecord, replayed: ReplayedPass
) -> list[tuple[str | None, float, float, int]]:
    """Pair the values: where they are, the job's, the replay's, and over how many tokens both are means."""
    if claim.name == LOSS:
        [job_value], replay_value = claim.values, record.result.loss
        return [] if replay_value is None else [(None, job_value, replay_value, sum(record.result.row_action_tokens))]
    if claim.name in (TOKEN_LOG_PROBS, ACTION_TOKENS):
        log_probs = (
            replayed.log_probs_at_recorded_positions if claim.name == TOKEN_LOG_PROBS else replayed.all_action_log_probs
        )
        pairs = zip(claim.values, log_probs, strict=False)
        return [
            (f"{'sampled' if claim.name == TOKEN_LOG_PROBS else 'action'} token {number}", job_value, replay_value, 1)
            for number, (job_value, replay_value) in enumerate(pairs)
            if replay_value is not None
        ]
    rows = zip(
        claim.values,
        record.result.row_log_probs,
        record.result.row_action_tokens,
        strict=bool(record.result.row_log_probs),
    )
    return [
        (f"row {row}", job_sum / max(tokens, 1), replay_sum / max(tokens, 1), tokens)
        for row, (job_sum, replay_sum, tokens) in enumerate(rows)
    ]
