"""Decide the outcome of each pass, and of the gradient of each window, from what their comparison found."""

from collections.abc import Sequence
from dataclasses import replace

from replay.tolerances.difference import UNIT_ROUNDOFF, is_coarse, roundoff
from replay.verdict.dropout_masks import PROVEN_MASKS, MaskStatus, is_about_masks
from replay.verdict.findings import (
    OTHER_WEIGHTS_OF_RANKS,
    ROUNDING_HIDES,
    SETTINGS_OF_RANKS,
    FindingStatus,
    VerdictSettings,
    list_dtypes,
)
from replay.verdict.gradient_findings import ComparedPass
from replay.verdict.outcomes import (
    FAILED,
    FINER_DTYPE,
    NOT_REPLAYED,
    OTHER_WEIGHTS,
    WHOLE_PASS_REASONS,
    Outcome,
    PassVerdict,
)
from replay.verdict.pass_weights import (
    find_miscounted_steps,
    find_settings_of_ranks,
    find_unmoved_weights,
    find_weights_of_ranks,
    merge_comparisons,
)
from replay.verdict.pass_windows import group_into_windows
from replay.verdict.recorded_pass import MISSING_GRADIENT


def mark_job_dropout_masks(compared_passes: Sequence[ComparedPass], settings: VerdictSettings) -> list[ComparedPass]:
    """Mark the training passes whose dropout masks are the job's.

    The ends of the random generators show it, or numbers that agree: with other masks they would differ.
    """
    # `replay_draws_job_masks` does not matter for the outcome REPRODUCED.
    return [
        replace(
            compared_pass,
            has_job_dropout_masks=compared_pass.recorded.trains
            and (
                compared_pass.masks.status is MaskStatus.SAME
                or _decide_outcome(compared_pass, settings, replay_draws_job_masks=False)[0] is Outcome.REPRODUCED
            ),
        )
        for compared_pass in compared_passes
    ]


def _has_shown_job_masks(compared_passes: Sequence[ComparedPass]) -> bool:
    """Tell whether the numbers alone show, in some pass, that the replay draws the job's masks."""
    return any(
        compared_pass.has_job_dropout_masks and compared_pass.masks.status is MaskStatus.NOT_RECORDED
        for compared_pass in compared_passes
    )


def judge_passes(compared_passes: Sequence[ComparedPass], settings: VerdictSettings) -> list[PassVerdict]:
    replay_draws_job_masks = _has_shown_job_masks(compared_passes)
    return [
        make_pass_verdict(
            compared_pass, *_decide_outcome(compared_pass, settings, replay_draws_job_masks=replay_draws_job_masks)
        )
        for compared_pass in compared_passes
    ]


def _decide_outcome(
    compared_pass: ComparedPass, settings: VerdictSettings, *, replay_draws_job_masks: bool
) -> tuple[Outcome, str | None]:
    """Decide on a pass, or on a window.

    For a window, `compared_pass` is its last pass, with findings, weights and masks of the whole window. The first of
    these that holds decides:

    CANNOT TELL  the pass failed, or its weights are not the job's, or nothing was recorded, or nothing of that was
                 replayed
    CANNOT TELL  the masks are NOT_PROVEN, and numbers differ or are unsettled or the dtype is coarse; but not where a
                 parameter lacks its gradient, which dropout cannot explain
    CANNOT TELL  the masks are NOT_RECORDED, numbers differ or are unsettled, dropout can explain it, and no pass shows
                 that the replay draws the job's masks
    UNSETTLED    the masks are NOT_RECORDED, numbers differ, and dropout can explain it, though another pass shows that
                 the replay draws the job's masks
    UNSETTLED    numbers differ, and it is not certain that the weights are the job's
    DIFFERS      numbers differ
    UNSETTLED    a finding is unsettled
    REPRODUCED   a number agrees and is evidence
    CANNOT TELL  nothing that was recorded is evidence

    After steps that nobody asked for, CANNOT TELL stands in place of UNSETTLED, but for settings or first weights that
    are not the same on all ranks of the job: no step of the replay has a part in that.

    replay_draws_job_masks  some pass has shown that the replay draws the job's dropout masks

    Returns the outcome, and its reason where one is needed.
    """
    findings, weights, recorded = compared_pass.findings, compared_pass.weight_comparison, compared_pass.recorded
    if compared_pass.record.error is not None:
        return Outcome.CANNOT_TELL, FAILED
    if any(finding.doubt == OTHER_WEIGHTS_OF_RANKS for finding in findings):
        return Outcome.UNSETTLED, OTHER_WEIGHTS_OF_RANKS
    if weights.differing:
        return Outcome.CANNOT_TELL, OTHER_WEIGHTS
    if not findings:
        if recorded.claims:
            return Outcome.CANNOT_TELL, NOT_REPLAYED
        nothing_recorded = (
            "nothing was recorded of the job's numbers, or they were redacted. Record with reproduce=True, or a "
            "flight recorder"
        )
        # Where an incident ended the pass in the job before it computed a number, that is the reason.
        return Outcome.CANNOT_TELL, recorded.incident or nothing_recorded
    differing = [finding for finding in findings if finding.status is FindingStatus.DIFFERS]
    unsettled = [finding for finding in findings if finding.status is FindingStatus.UNSETTLED]
    unsettled_outcome = Outcome.CANNOT_TELL if _is_after_unasked_step(compared_pass, settings) else Outcome.UNSETTLED
    # Dropout cannot explain a parameter without a gradient: under a mask each parameter still gets one. LayerDrop can,
    # since it skips a layer whole, which then has none.
    lacks_gradient = (
        any(finding.name == MISSING_GRADIENT for finding in differing) and "layerdrop" not in settings.dropout
    )
    masks, is_coarse_here = compared_pass.masks, is_coarse(list_dtypes(recorded, settings))
    if masks.status is MaskStatus.NOT_PROVEN and not lacks_gradient and (differing or unsettled or is_coarse_here):
        return Outcome.CANNOT_TELL, masks.why
    may_be_chance = settings.dropout and recorded.trains and masks.status is MaskStatus.NOT_RECORDED
    if (differing or unsettled) and not lacks_gradient and may_be_chance:
        trains_with = f"the model trains with {', '.join(settings.dropout)}"
        if not replay_draws_job_masks:
            advice = ". Try: --no-packing, which draws the masks of padded rows" if settings.packs else ""
            return Outcome.CANNOT_TELL, f"{trains_with}, so its numbers differ by chance{advice}"
        if differing:
            return unsettled_outcome, f"{trains_with}, and in other passes its masks are the job's"
    if differing and not weights.are_same:
        doubt = weights.doubt or "weights could not be compared"
        first = differing[0]
        # A finding with `values_as_text` compares no numbers. Of a missing gradient `where` names the parameters.
        difference = (
            f"{first.name} is off by {first.difference:.2g}"
            if first.values_as_text is None
            else first.where or first.values_as_text
        )
        return unsettled_outcome, f"{difference}, but {doubt}"
    if differing:
        return Outcome.DIFFERS, None
    if any(finding.doubt == SETTINGS_OF_RANKS for finding in unsettled):
        return Outcome.UNSETTLED, SETTINGS_OF_RANKS
    if unsettled:
        return unsettled_outcome, unsettled[0].doubt
    if any(finding.agrees and finding.is_evidence for finding in findings):
        return Outcome.REPRODUCED, None
    return Outcome.CANNOT_TELL, masks.why or findings[0].doubt


def _is_after_unasked_step(compared_pass: ComparedPass, settings: VerdictSettings) -> bool:
    """Tell whether the replay has followed a step of the job before this pass, though nobody asked for steps.

    If it did not follow them, a pass after them would have other weights: CANNOT TELL. So a doubt after such steps is
    CANNOT TELL too: steps that are followed by default make no verdict worse.
    """
    return settings.steps_unasked and compared_pass.record.result.num_steps > 0


def make_pass_verdict(compared_pass: ComparedPass, outcome: Outcome, reason: str | None) -> PassVerdict:
    record = compared_pass.record
    return PassVerdict(
        index=record.index,
        source=record.source,
        rank=record.rank,
        outcome=outcome,
        reason=reason,
        findings=compared_pass.findings,
    )


def explain_finer_dtype(job_dtype: str, settings: VerdictSettings) -> str | None:
    """Say that a higher precision was asked for than the job is known to have computed in; None where it was not.

    Numbers that agree then are as far apart as the job's own rounding allows, and it may hide what is wrong.
    """
    if not settings.is_dtype_typed or job_dtype not in UNIT_ROUNDOFF or roundoff(job_dtype) <= roundoff(settings.dtype):
        return None
    return f"{FINER_DTYPE}: in {settings.dtype}, as typed, and the job in {job_dtype}, whose rounding hides more"


def downgrade_reproduced_to_unsettled(verdicts: Sequence[PassVerdict], reason: str) -> list[PassVerdict]:
    """Return the verdicts with UNSETTLED in place of REPRODUCED."""
    return [
        replace(verdict, outcome=Outcome.UNSETTLED, reason=reason) if verdict.outcome is Outcome.REPRODUCED else verdict
        for verdict in verdicts
    ]


def keep_worst_of_tp_and_ring_ranks(
    compared_passes: Sequence[ComparedPass], verdicts: Sequence[PassVerdict]
) -> list[PassVerdict]:
    """Keep one verdict for each micro-batch: the worst of the tp and ring peers that computed it together."""
    severity = (Outcome.DIFFERS, Outcome.UNSETTLED, Outcome.CANNOT_TELL, Outcome.REPRODUCED)
    worst: dict[tuple[int, int], PassVerdict] = {}
    for compared_pass, verdict in zip(compared_passes, verdicts, strict=True):
        micro_batch = verdict.index, compared_pass.record.data_rank
        other = worst.setdefault(micro_batch, verdict)
        if severity.index(verdict.outcome) < severity.index(other.outcome):
            worst[micro_batch] = verdict
    return list(worst.values())


def judge_windows(compared_passes: Sequence[ComparedPass], settings: VerdictSettings) -> list[PassVerdict]:
    """Judge the gradient of each window of which the job recorded something.

    Training is about gradients, so agreeing losses alone do not make a run REPRODUCED if gradients were recorded. If no
    window's gradient could be judged, the verdict on each window whose recorded gradient is left open
    (`_is_inconclusive_gradient`) becomes UNSETTLED; but not after steps that nobody asked for.
    """
    verdicts = [
        (window[-1], verdict)
        for window in group_into_windows(compared_passes)
        if (verdict := _judge_window(window, compared_passes, settings)) is not None
    ]
    if any(verdict.outcome is not Outcome.CANNOT_TELL for _, verdict in verdicts):
        return [verdict for _, verdict in verdicts]
    return [
        replace(verdict, outcome=Outcome.UNSETTLED)
        if _is_inconclusive_gradient(verdict) and not _is_after_unasked_step(last_pass, settings)
        else verdict
        for last_pass, verdict in verdicts
    ]


def _judge_window(
    window: Sequence[ComparedPass], compared_passes: Sequence[ComparedPass], settings: VerdictSettings
) -> PassVerdict | None:
    """Judge the gradient of one window; None where the job recorded nothing of it.

    compared_passes  of the whole run
    """
    findings = [
        *window[-1].window_findings,
        *window[-1].step_findings,
        *find_unmoved_weights(window, compared_passes, settings),
        *find_miscounted_steps(window, compared_passes, settings),
        *find_settings_of_ranks(window),
    ]
    # The gradient of several models is none of the replay's, and its numbers beside these would tell nothing.
    findings = find_weights_of_ranks(window, compared_passes, settings) or findings
    if not findings:
        return None
    weights = merge_comparisons([compared_pass.weight_comparison for compared_pass in window])
    # The window's masks are the job's if those of all its passes are; else they are as those of the first other pass.
    masks = next((member.masks for member in window if not member.has_job_dropout_masks), PROVEN_MASKS)
    window_as_pass = replace(window[-1], findings=findings, weight_comparison=weights, masks=masks)
    replay_draws_job_masks = _has_shown_job_masks(compared_passes)
    outcome, reason = _decide_outcome(window_as_pass, settings, replay_draws_job_masks=replay_draws_job_masks)
    return replace(
        make_pass_verdict(window_as_pass, outcome, reason),
        first_index=window[0].record.index,
        optimizer_step=window_as_pass.recorded.num_steps_before,
    )


def _is_inconclusive_gradient(verdict: PassVerdict) -> bool:
    """Tell whether a recorded gradient could not be judged, and neither rounding nor other dropout masks explain that.

    Nor a reason of the whole pass: other weights, or a pass that failed.
    """
    return (
        verdict.outcome is Outcome.CANNOT_TELL
        and verdict.reason not in WHOLE_PASS_REASONS
        and any(
            finding.status is FindingStatus.NOT_JUDGED
            and finding.doubt != ROUNDING_HIDES
            and not is_about_masks(finding.doubt)
            for finding in verdict.findings
        )
    )
