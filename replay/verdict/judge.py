"""Judge whether the replay computed what training computed. Plain data in, plain data out.

    {"outcome": "REPRODUCED", "reason": null, "counts": {"REPRODUCED": 3}, "window_counts": {"REPRODUCED": 1},
     "first": null, "worst": [...], "open": [...], "weights": {...}, "environment": {"torch": ["2.13.0", "2.11.0"]},
     "dtypes": ["bfloat16", "bfloat16"], "floors": {...}, "passes": [...], "windows": [...], "causes": [], ...}

With other weights than the job's no number means anything, so each pass is judged only on the job's. Each number that
the job recorded of a pass, or of the gradient of an optimizer step, is compared with the replay's number. It agrees
within its bound, or it differs, or it is not judged and the verdict says why. The outcome is DIFFERS only where nothing
else explains it: the weights are known to be the job's, and both computed the same quantity. Where there is a doubt, it
is UNSETTLED.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from replay.runlog.records import PassRecord
from replay.tolerances.difference import is_coarse, roundoff
from replay.tolerances.job_bounds import GRAD_NORM
from replay.verdict.causes.evidence import Evidence
from replay.verdict.causes.table import find_causes, list_unexplained
from replay.verdict.causes.trial import TrialReport
from replay.verdict.coverage import measure_coverage
from replay.verdict.dropout_masks import (
    PROVEN_MASKS,
    MaskStatus,
    compare_masks,
    is_about_masks,
    judge_masks,
)
from replay.verdict.findings import (
    ROUNDING_HIDES,
    Finding,
    FindingStatus,
    VerdictSettings,
    compare_pass,
    list_dtypes,
)
from replay.verdict.gradient_findings import (
    ComparedPass,
    compare_window,
    group_into_windows,
)
from replay.verdict.gradient_mix import OwnGradient
from replay.verdict.model_comparison import find_unreduced_steps
from replay.verdict.outcomes import (
    FAILED,
    NOT_REPLAYED,
    OTHER_WEIGHTS,
    WHOLE_PASS_REASONS,
    Outcome,
    PassVerdict,
    Verdict,
    count_reasons,
    select_worst_findings,
)
from replay.verdict.pass_values import (
    MISSING_GRADIENT,
    RecordedPass,
    ReplayedPass,
    describe_mixed_recordings,
)
from replay.verdict.pass_weights import (
    check_weights,
    choose_shown_weights,
    find_miscounted_steps,
    find_unmoved_weights,
    follow_weights_through_steps,
    merge_comparisons,
    note_coarse_steps,
)
from replay.verdict.route_findings import compare_routes


class PassEvidence(NamedTuple):
    """What a verdict needs of one pass on one rank.

    record    the replay's record of the pass
    recorded  what the job recorded of it; None where the capture could not be read
    replayed  what the replay computed besides its record
    """

    record: PassRecord
    recorded: RecordedPass | None
    replayed: ReplayedPass


def judge(
    passes: Sequence[PassEvidence],
    settings: VerdictSettings,
    trials: TrialReport | None = None,
    own_gradients: Sequence[OwnGradient] = (),
) -> Verdict:
    """Judge whether the replay reproduced the job, from the passes of all ranks, in the order of pass and rank.

    A window is the passes, of all data ranks, that one optimizer step takes its gradient from. The plan:

    1. Compare the numbers that the job recorded of each pass with the replay's. Passes that come from several
       recordings in one folder are not judged.
    2. Check that each pass ran on the job's weights. The passes between two optimizer steps ran on the same weights, so
       their samples of the weights are merged. Where the replay makes optimizer steps too (--step), its weights stay
       the job's as long as each of its steps equalled the job's step.
    3. Judge each pass. With other dropout masks its numbers differ by chance, so they are judged only where the masks
       are known to be the job's (`dropout_masks` says by what). Where the job did not record these, a training pass
       whose numbers agree had the job's masks.
    4. Judge the gradient of each window. Under dropout that needs step 3: the gradient is comparable if all passes of
       the window had the job's masks.
    5. Choose the outcome of the run: DIFFERS if any pass or gradient differs, else UNSETTLED if any is unsettled, else
       REPRODUCED if any is reproduced, else CANNOT TELL.

    trials         what came of running a wrong forward again under hypotheses
    own_gradients  of each pass of a window whose gradient is wrong, replayed alone

    Trials and own gradients tell causes, and change no outcome.
    """
    recorded = [(record.index, recorded) for record, recorded, _ in passes if recorded is not None]
    differences = [*settings.model_differences, *find_unreduced_steps([recorded_pass for _, recorded_pass in recorded])]
    settings = note_coarse_steps(recorded, replace(settings, model_differences=differences))
    compared_passes = _compare_passes(passes, settings)
    mixed_recordings = describe_mixed_recordings(
        [(compared_pass.record, compared_pass.recorded) for compared_pass in compared_passes]
    )
    if mixed_recordings is not None:
        return _refuse_to_judge(compared_passes, mixed_recordings, settings)

    compared_passes = check_weights(compared_passes)
    if settings.steps is not None:
        compared_passes = follow_weights_through_steps(compared_passes, settings)

    compared_passes = _mark_job_dropout_masks(compared_passes, settings)
    pass_verdicts = _keep_worst_of_peers(compared_passes, _judge_passes(compared_passes, settings))
    window_verdicts = _judge_windows(compared_passes, settings)

    # In the job's order: a window's verdict comes after that of its last pass. So a wrong gradient comes before the
    # wrong numbers that it causes in later passes.
    verdicts = sorted(
        [*pass_verdicts, *window_verdicts], key=lambda verdict: (verdict.index, verdict.optimizer_step is not None)
    )
    outcome = _choose_outcome(verdicts)
    environment = _compare_environments(compared_passes, settings)
    windows = group_into_windows(compared_passes)
    evidence = Evidence(
        passes=compared_passes,
        windows=windows,
        verdicts=verdicts,
        settings=settings,
        environment=environment,
        trials=trials,
        own_gradients=own_gradients,
    )
    causes = find_causes(evidence)
    unexplained, may_follow = list_unexplained(evidence, causes)
    return Verdict(
        outcome=outcome,
        reason=_choose_reason(verdicts, outcome),
        counts=dict(Counter(verdict.outcome for verdict in pass_verdicts)),
        window_counts=dict(Counter(verdict.outcome for verdict in window_verdicts)),
        first=_find_first_difference(verdicts, outcome),
        worst=select_worst_findings(verdicts),
        open=_select_open_findings(verdicts),
        weights=choose_shown_weights(compared_passes),
        environment=environment,
        dtypes=(_find_coarsest_dtype(compared_passes), settings.dtype),
        floors=settings.floors,
        model_differences=settings.model_differences,
        passes=pass_verdicts,
        windows=window_verdicts,
        causes=causes,
        unexplained=unexplained,
        may_follow=may_follow,
        coverage=measure_coverage(windows, pass_verdicts, window_verdicts),
        trials=trials,
    )


def _compare_passes(passes: Sequence[PassEvidence], settings: VerdictSettings) -> list[ComparedPass]:
    """Compare the numbers of each pass whose capture could be read."""
    readable = [(record, recorded, replayed) for record, recorded, replayed in passes if recorded is not None]
    # If the pass before has a gradient norm too, each step took one pass. Otherwise a norm does not tell how many
    # passes it is of.
    passes_with_grad_norm = {
        (recorded.rank, recorded.forward)
        for _, recorded, _ in readable
        if any(claim.name == GRAD_NORM for claim in recorded.claims)
    }
    compared_passes = [
        ComparedPass(
            record=record,
            recorded=recorded,
            replayed=replayed,
            findings=[
                *compare_pass(record, recorded, replayed, settings),
                *compare_routes(record, recorded, replayed, settings),
            ],
            weights=recorded.weights,
            previous_pass_has_grad_norm=recorded.forward is not None
            and (recorded.rank, recorded.forward - 1) in passes_with_grad_norm,
        )
        for record, recorded, replayed in readable
    ]
    return [_compare_masks(compared_pass, settings) for compared_pass in compared_passes]


def _compare_masks(compared_pass: ComparedPass, settings: VerdictSettings) -> ComparedPass:
    """Return the pass with what is known of its dropout masks, and with the findings that this leaves."""
    recorded = compared_pass.recorded
    masks = compare_masks(recorded, compared_pass.replayed, settings)
    findings, masks = judge_masks(compared_pass.findings, masks, recorded, settings)
    return replace(compared_pass, findings=findings, masks=masks)


def _refuse_to_judge(compared_passes: Sequence[ComparedPass], reason: str, settings: VerdictSettings) -> Verdict:
    """Return the verdict CANNOT TELL on passes that cannot be judged together."""
    verdicts = [
        _make_pass_verdict(replace(compared_pass, findings=()), Outcome.CANNOT_TELL, reason)
        for compared_pass in compared_passes
    ]
    verdicts = _keep_worst_of_peers(compared_passes, verdicts)
    return Verdict(
        outcome=Outcome.CANNOT_TELL,
        reason=reason,
        counts={Outcome.CANNOT_TELL: len(verdicts)},
        window_counts={},
        first=None,
        worst=[],
        open=[],
        weights=None,
        environment={},
        dtypes=("unknown", settings.dtype),
        model_differences=settings.model_differences,
        passes=verdicts,
    )


# Judging passes


def _mark_job_dropout_masks(compared_passes: Sequence[ComparedPass], settings: VerdictSettings) -> list[ComparedPass]:
    """Mark the training passes whose dropout masks are the job's.

    What is known of the masks tells it, or, where nothing is, the numbers: with other masks they would differ.
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


def _judge_passes(compared_passes: Sequence[ComparedPass], settings: VerdictSettings) -> list[PassVerdict]:
    replay_draws_job_masks = _has_shown_job_masks(compared_passes)
    return [
        _make_pass_verdict(
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

    CANNOT TELL  the pass failed; its weights are not the job's; nothing was recorded, or nothing of it was replayed
    CANNOT TELL  the dropout masks are not proven to be the job's, and numbers differ, or agree within a coarse bound
    CANNOT TELL  numbers differ or are unsettled, dropout can explain it, and no pass had the job's masks; where the job
                 recorded no end of its generators
    UNSETTLED    there too: numbers differ, and dropout can explain it, though the masks of other passes are the job's
    UNSETTLED    numbers differ, and it is not certain that the weights are the job's
    DIFFERS      numbers differ
    UNSETTLED    a finding is unsettled
    REPRODUCED   a number agrees and is evidence
    CANNOT TELL  nothing that was recorded is evidence

    Behind steps that nobody asked for, doubts of the weights and of findings are CANNOT TELL, not UNSETTLED.

    replay_draws_job_masks  some pass has shown that the replay draws the job's dropout masks

    Returns the outcome, and its reason where one is needed.
    """
    findings, weights, recorded = compared_pass.findings, compared_pass.weights, compared_pass.recorded
    if compared_pass.record.error is not None:
        return Outcome.CANNOT_TELL, FAILED
    if weights.differing:
        return Outcome.CANNOT_TELL, OTHER_WEIGHTS
    if not findings:
        if recorded.claims:
            return Outcome.CANNOT_TELL, NOT_REPLAYED
        nothing_recorded = (
            "nothing was recorded of what the job computed. Record with reproduce=True, or a flight recorder"
        )
        # An incident ended the pass in the job before it computed a number.
        return Outcome.CANNOT_TELL, recorded.incident or nothing_recorded
    differing = [finding for finding in findings if finding.status is FindingStatus.DIFFERS]
    unsettled = [finding for finding in findings if finding.status is FindingStatus.UNSETTLED]
    # Without steps nobody would have judged what lies behind them, so steps that nobody asked for raise no question.
    is_behind_steps = settings.steps_unasked and compared_pass.record.result.num_steps > 0
    unsettled_outcome = Outcome.CANNOT_TELL if is_behind_steps else Outcome.UNSETTLED
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
            return Outcome.UNSETTLED, f"{trains_with}, and in other passes its masks are the job's"
    if differing and not weights.are_same:
        doubt = weights.doubt or "weights could not be compared"
        first = differing[0]
        # What is text is no number. Of a missing gradient `where` is a sentence: which parameters have none.
        difference = (
            f"{first.name} is off by {first.difference:.2g}"
            if first.values_as_text is None
            else first.where or first.values_as_text
        )
        return unsettled_outcome, f"{difference}, but {doubt}"
    if differing:
        return Outcome.DIFFERS, None
    if unsettled:
        return unsettled_outcome, unsettled[0].doubt
    if any(finding.agrees and finding.is_evidence for finding in findings):
        return Outcome.REPRODUCED, None
    return Outcome.CANNOT_TELL, masks.why or findings[0].doubt


def _make_pass_verdict(compared_pass: ComparedPass, outcome: Outcome, reason: str | None) -> PassVerdict:
    record = compared_pass.record
    return PassVerdict(
        index=record.index,
        source=record.source,
        rank=record.rank,
        outcome=outcome,
        reason=reason,
        findings=compared_pass.findings,
    )


def _keep_worst_of_peers(compared_passes: Sequence[ComparedPass], verdicts: Sequence[PassVerdict]) -> list[PassVerdict]:
    """Keep one verdict for each micro-batch: the worst of the tp and ring peers that computed it together."""
    severity = (Outcome.DIFFERS, Outcome.UNSETTLED, Outcome.CANNOT_TELL, Outcome.REPRODUCED)
    worst: dict[tuple[int, int], PassVerdict] = {}
    for compared_pass, verdict in zip(compared_passes, verdicts, strict=True):
        micro_batch = verdict.index, compared_pass.record.data_rank
        other = worst.setdefault(micro_batch, verdict)
        if severity.index(verdict.outcome) < severity.index(other.outcome):
            worst[micro_batch] = verdict
    return list(worst.values())


# Judging gradients


def _judge_windows(compared_passes: Sequence[ComparedPass], settings: VerdictSettings) -> list[PassVerdict]:
    """Judge the gradient of each window of which the job recorded something.

    A gradient that was recorded is what training is about, so agreeing losses alone do not make a run REPRODUCED: if no
    window's gradient could be judged, those verdicts become UNSETTLED whose gradient was recorded and is left open
    (`_is_open_gradient`).
    """
    verdicts = [
        verdict
        for window in group_into_windows(compared_passes)
        if (verdict := _judge_window(window, window[0].record.result.num_steps, compared_passes, settings)) is not None
    ]
    if any(verdict.outcome is not Outcome.CANNOT_TELL for verdict in verdicts):
        return verdicts
    return [
        replace(verdict, outcome=Outcome.UNSETTLED) if _is_open_gradient(verdict) else verdict for verdict in verdicts
    ]


def _judge_window(
    window: Sequence[ComparedPass], number: int, compared_passes: Sequence[ComparedPass], settings: VerdictSettings
) -> PassVerdict | None:
    """Judge the gradient of one window; None where the job recorded nothing of it.

    number           how many steps the replay had taken before
    compared_passes  of the whole run
    """
    findings = [
        *compare_window(window, settings, number),
        *find_unmoved_weights(window, compared_passes, settings),
        *find_miscounted_steps(window, compared_passes, settings),
    ]
    if not findings:
        return None
    weights = merge_comparisons([compared_pass.weights for compared_pass in window])
    masks = next((passed.masks for passed in window if not passed.has_job_dropout_masks), PROVEN_MASKS)
    window_as_pass = replace(window[-1], findings=findings, weights=weights, masks=masks)
    replay_draws_job_masks = _has_shown_job_masks(compared_passes)
    outcome, reason = _decide_outcome(window_as_pass, settings, replay_draws_job_masks=replay_draws_job_masks)
    return replace(
        _make_pass_verdict(window_as_pass, outcome, reason),
        optimizer_step=window_as_pass.recorded.num_steps_before or 0,
    )


def _is_open_gradient(verdict: PassVerdict) -> bool:
    """Tell whether a recorded gradient could not be judged, for another reason than rounding or other dropout masks."""
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


def _choose_outcome(verdicts: Sequence[PassVerdict]) -> Outcome:
    """DIFFERS if any pass or gradient differs, else UNSETTLED, else REPRODUCED, else CANNOT TELL."""
    outcomes = {verdict.outcome for verdict in verdicts}
    decisive = (Outcome.DIFFERS, Outcome.UNSETTLED, Outcome.REPRODUCED)
    return next((outcome for outcome in decisive if outcome in outcomes), Outcome.CANNOT_TELL)


def _choose_reason(verdicts: Sequence[PassVerdict], outcome: Outcome) -> str | None:
    """Choose the reason to show: why the outcome is UNSETTLED, else why most of the CANNOT TELL are.

    None if there are verdicts and none is CANNOT TELL.
    Passes with other weights and passes that failed explain nothing of the others, so their reasons come last.
    """
    if outcome is Outcome.UNSETTLED:
        return next(str(verdict.reason) for verdict in verdicts if verdict.outcome is outcome)
    return next(iter(count_reasons(verdicts)), None if verdicts else "no pass was replayed")


def _find_first_difference(verdicts: Sequence[PassVerdict], outcome: Outcome) -> PassVerdict | None:
    """Find the first pass or gradient that differs or is unsettled, if that is the outcome of the run."""
    if outcome not in (Outcome.DIFFERS, Outcome.UNSETTLED):
        return None
    return next(verdict for verdict in verdicts if verdict.outcome is outcome)


def _select_open_findings(verdicts: Sequence[PassVerdict]) -> list[Finding]:
    """Select the first finding of each quantity not judged, or unsettled, where weights and masks are the job's."""
    first: dict[str, Finding] = {}
    for verdict in verdicts:
        for finding in verdict.findings if verdict.reason != OTHER_WEIGHTS else ():
            is_open = finding.status in (FindingStatus.NOT_JUDGED, FindingStatus.UNSETTLED)
            if is_open and not is_about_masks(finding.doubt):
                first.setdefault(finding.name, finding)
    return list(first.values())


def _compare_environments(
    compared_passes: Sequence[ComparedPass], settings: VerdictSettings
) -> dict[str, tuple[str, str]]:
    """List the settings that the job recorded and the replay knows, where they differ.

    If the job had several values, all are named.
    """
    job_values: dict[str, list[str]] = {}
    for compared_pass in compared_passes:
        recorded = compared_pass.recorded
        coarsest = {"dtype": max(recorded.dtypes, key=roundoff)} if recorded.dtypes else {}
        for name, value in {**recorded.settings, **coarsest}.items():
            if value not in job_values.setdefault(name, []):
                job_values[name].append(value)
    shared = [name for name in job_values if name in settings.environment]
    return {
        name: (", ".join(job_values[name]), settings.environment[name])
        for name in shared
        if job_values[name] != [settings.environment[name]]
    }


def _find_coarsest_dtype(compared_passes: Sequence[ComparedPass]) -> str:
    """Find the coarsest dtype that the job is known to have computed in."""
    dtypes = [dtype for compared_pass in compared_passes for dtype in compared_pass.recorded.dtypes]
    return max(dtypes, key=roundoff, default="unknown")
