"""Judge whether the replay computed what training computed.

`judge` returns a `Verdict`, whose `to_dict` gives the JSON that run.json holds:

    {"outcome": "REPRODUCED", "reason": null, "counts": {"REPRODUCED": 3}, "window_counts": {"REPRODUCED": 1},
     "first": null, "worst": [...], "open": [...], "weights": {...}, "environment": {"torch": ["2.13.0", "2.11.0"]},
     "dtypes": ["bfloat16", "bfloat16"], "floors": {...}, "passes": [...], "windows": [...], "causes": [], ...}

With other weights than the job's no number means anything, so a pass that is known to have run on other weights is not
judged. A number has a status; a pass, a step's gradient and a run have an outcome. Each number that the job recorded of
a pass, or of the gradient of an optimizer step, is compared with the replay's number. The status says that it agrees
within its bound, differs, is unsettled, or is not judged. The verdict says why a number is unsettled or not judged. The
outcome is DIFFERS only if nothing else explains the difference: the weights are known to be the job's, and job and
replay computed the same quantity. If there is a doubt, the outcome is UNSETTLED or CANNOT TELL (`Outcome` says when).

`floors` are noise floors: how far apart two replays are that differ in rounding alone.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from replay.runlog.records import PassRecord
from replay.tolerances.difference import roundoff
from replay.tolerances.job_bounds import GRAD_NORM
from replay.verdict.causes.evidence import CauseEvidence
from replay.verdict.causes.table import find_causes, split_unexplained
from replay.verdict.causes.trial import TrialReport
from replay.verdict.coverage import measure_coverage
from replay.verdict.dropout_masks import (
    compare_masks,
    is_about_masks,
    revise_findings_for_masks,
)
from replay.verdict.findings import (
    Finding,
    FindingStatus,
    VerdictSettings,
    compare_pass,
)
from replay.verdict.gradient_findings import (
    ComparedPass,
    add_window_findings,
)
from replay.verdict.gradient_mix import SinglePassGradient
from replay.verdict.job_clipping import clip_as_the_job
from replay.verdict.model_comparison import find_unreduced_step_differences
from replay.verdict.outcomes import (
    OTHER_WEIGHTS,
    Outcome,
    PassVerdict,
    Verdict,
    count_reasons,
    select_worst_findings,
)
from replay.verdict.pass_verdicts import (
    downgrade_reproduced_to_unsettled,
    explain_finer_dtype,
    judge_passes,
    judge_windows,
    keep_worst_of_tp_and_ring_ranks,
    make_pass_verdict,
    mark_job_dropout_masks,
)
from replay.verdict.pass_weights import (
    choose_weights_to_show,
    explain_unfollowed_steps,
    infer_weights_after_steps,
    merge_weight_samples,
    widen_bounds_after_rounded_step,
)
from replay.verdict.pass_windows import group_into_windows
from replay.verdict.recorded_pass import (
    RecordedPass,
    ReplayedPass,
    describe_mixed_recordings,
)
from replay.verdict.route_findings import compare_routes


class PassEvidence(NamedTuple):
    """The evidence from which a verdict judges one pass on one rank: what the replay computed, and the job recorded.

    record    the pass in the replay's log
    recorded  what the job recorded of the pass; None: the capture could not be read
    replayed  what else the verdict needs to know of the replayed pass
    """

    record: PassRecord
    recorded: RecordedPass | None
    replayed: ReplayedPass


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedRun:
    """The verdict on a run before its causes are found. `add_causes` may be called again when more is known.

    verdict   without causes
    evidence  what the causes are found from; None: the passes cannot be judged
    """

    verdict: Verdict
    evidence: CauseEvidence | None

    @property
    def agrees_throughout(self) -> bool:
        """Do all passes and steps agree with the job, none of them inconclusive?"""
        return self.verdict.outcome is Outcome.REPRODUCED and self.verdict.coverage.is_whole

    def add_causes(
        self, trials: TrialReport | None = None, single_pass_gradients: Sequence[SinglePassGradient] = ()
    ) -> Verdict:
        """Return the verdict with its causes.

        trials  what came of running a wrong forward again, with one suspected cause changed at a time; None: it was not
                run again
        single_pass_gradients  if the first wrong number is of a window's gradient: the gradient of each pass of that
                window, replayed as a window of its own; empty: no pass was replayed like this
        """
        if self.evidence is None:
            return self.verdict
        evidence = replace(self.evidence, trials=trials, single_pass_gradients=single_pass_gradients)
        causes = find_causes(evidence)
        # Both lists name findings that no cause explains. Those in the second list are wrong only after a wrong step
        # that a cause does explain, so they may be consequences of that step.
        unexplained, possible_consequences = split_unexplained(evidence, causes)
        return replace(
            self.verdict, causes=causes, unexplained=unexplained, may_follow=possible_consequences, trials=trials
        )


def judge(passes: Sequence[PassEvidence], settings: VerdictSettings) -> Verdict:
    """Judge whether the replay reproduced the job, and find the causes that the passes alone tell."""
    return judge_without_causes(passes, settings).add_causes()


def judge_without_causes(passes: Sequence[PassEvidence], settings: VerdictSettings) -> JudgedRun:
    """Judge whether the replay reproduced the job, from the passes of all ranks, in the order of pass and rank.

    A window is the passes, of all data ranks, whose gradients make one optimizer step. The plan:

    1. Compare the numbers that the job recorded of each pass with the replay's. Passes that come from several
       recordings in one folder are not judged. Where the job's own code clipped gradients, the replay's are clipped
       too, before the windows are compared.
    2. Check that each pass ran on the job's weights. The passes between two optimizer steps ran on the same weights, so
       their samples of the weights are merged. Where the replay makes optimizer steps too, with --step or by default,
       its weights stay the job's as long as each of its steps equalled the job's step. A step whose gradient could not
       be judged leaves a doubt. So the gradients of the windows are compared before this, and judged in point 4.
    3. Judge each pass. With other dropout masks than the job's, numbers differ by chance. So a training pass that may
       have had other masks is not DIFFERS because of its numbers. Its masks are known to be the job's if the random
       generators had the job's states before and after the forward, and all else that shapes the masks, such as rows,
       kernel and device, is the job's too. Numbers that agree show it as well, unless a coarse dtype may hide what
       other masks do. If job and replay drew different amounts of random numbers, and nothing explains that, it is a
       finding of its own, `dropout masks`.
    4. Judge the gradient of each window. Under dropout this judgment needs point 3: the gradient is comparable if all
       passes of the window had the job's masks. But dropout, unless it skips layers, does not explain that a parameter
       lacks its gradient.
    5. If a finer dtype than the job's was typed, what would be REPRODUCED is UNSETTLED: the numbers agree within bounds
       as wide as the job's coarse rounding, and an error of the job may be smaller than these.
    6. Choose the outcome of the run: DIFFERS if any pass or gradient differs, else UNSETTLED if any is unsettled, else
       REPRODUCED if any is reproduced, else CANNOT TELL.
    """
    indexed_passes = [(record.index, recorded) for record, recorded, _ in passes if recorded is not None]
    # The job's DDP may not have reduced the gradients of the last pass before a step, since `no_sync` was left on. This
    # is added to the differences between the job's model and the replay's, which `find_causes` is given.
    unreduced_steps = find_unreduced_step_differences([recorded for _, recorded in indexed_passes])
    model_differences = [*settings.model_differences, *unreduced_steps]
    # Some optimizers, such as Muon, round each step to bf16, so after a step the weights of job and replay may differ
    # by this rounding. Then later passes get the bounds of this rounding, in place of the noise floors that were
    # measured with two replays that step (`settings.step_floors`).
    settings = widen_bounds_after_rounded_step(indexed_passes, replace(settings, model_differences=model_differences))
    compared_passes = _compare_passes(passes, settings)
    mixed_recordings = describe_mixed_recordings(
        [(compared_pass.record, compared_pass.recorded) for compared_pass in compared_passes]
    )
    if mixed_recordings is not None:
        verdict = _refuse_to_judge(compared_passes, mixed_recordings, settings)
        return JudgedRun(verdict=verdict, evidence=None)

    compared_passes = clip_as_the_job(compared_passes, settings)
    compared_passes = merge_weight_samples(compared_passes)
    compared_passes = add_window_findings(compared_passes, settings)
    if settings.follows_steps:
        compared_passes = infer_weights_after_steps(compared_passes, settings)
    else:
        compared_passes = explain_unfollowed_steps(compared_passes)

    compared_passes = mark_job_dropout_masks(compared_passes, settings)
    pass_verdicts = keep_worst_of_tp_and_ring_ranks(compared_passes, judge_passes(compared_passes, settings))
    window_verdicts = judge_windows(compared_passes, settings)
    job_dtype = _find_coarsest_dtype(compared_passes)
    if (why_unsettled := explain_finer_dtype(job_dtype, settings)) is not None:
        pass_verdicts = downgrade_reproduced_to_unsettled(pass_verdicts, why_unsettled)
        window_verdicts = downgrade_reproduced_to_unsettled(window_verdicts, why_unsettled)

    # Verdicts are in the order of the passes. The verdict of a window, a PassVerdict too, comes after the verdict of
    # its last pass. So a wrong gradient comes before the wrong numbers that it causes in later passes.
    verdicts = sorted(
        [*pass_verdicts, *window_verdicts], key=lambda pass_verdict: (pass_verdict.index, pass_verdict.is_window)
    )
    outcome = _choose_outcome(verdicts)
    environment = _compare_environments(compared_passes, settings)
    windows = group_into_windows(compared_passes)
    evidence = CauseEvidence(
        passes=compared_passes,
        windows=windows,
        verdicts=verdicts,
        settings=settings,
        environment=environment,
    )
    first_wrong_or_unsettled = _find_first_wrong_or_unsettled(verdicts, outcome)
    worst_findings = select_worst_findings(verdicts)
    verdict = Verdict(
        outcome=outcome,
        reason=_choose_reason(verdicts, outcome),
        counts=dict(Counter(pass_verdict.outcome for pass_verdict in pass_verdicts)),
        window_counts=dict(Counter(window_verdict.outcome for window_verdict in window_verdicts)),
        first=first_wrong_or_unsettled,
        worst=worst_findings,
        open=_select_open_findings(verdicts),
        weights=choose_weights_to_show(compared_passes),
        environment=environment,
        dtypes=(job_dtype, settings.dtype),
        floors=settings.floors,
        model_differences=settings.model_differences,
        passes=pass_verdicts,
        windows=window_verdicts,
        coverage=measure_coverage(windows, pass_verdicts, window_verdicts),
    )
    return JudgedRun(verdict=verdict, evidence=evidence)


def _compare_passes(passes: Sequence[PassEvidence], settings: VerdictSettings) -> list[ComparedPass]:
    """Compare the numbers of each pass whose capture could be read."""
    readable = [(record, recorded, replayed) for record, recorded, replayed in passes if recorded is not None]
    # `claims` are the quantities that the job recorded. A gradient norm comes with the last pass of a window. So if two
    # passes in a row have a norm, the later pass is a window of its own. Otherwise only a recorded step tells how many
    # passes the norm covers.
    passes_with_grad_norm = {
        (recorded.rank, recorded.forward_number)
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
            weight_comparison=recorded.weight_comparison,
            previous_pass_has_grad_norm=recorded.forward_number is not None
            and (recorded.rank, recorded.forward_number - 1) in passes_with_grad_norm,
        )
        for record, recorded, replayed in readable
    ]
    return [_account_for_masks(compared_pass, settings) for compared_pass in compared_passes]


def _account_for_masks(compared_pass: ComparedPass, settings: VerdictSettings) -> ComparedPass:
    """Return the pass with what is known of its dropout masks, and with its findings revised for that."""
    recorded = compared_pass.recorded
    masks = compare_masks(recorded, compared_pass.replayed, settings)
    findings, masks = revise_findings_for_masks(compared_pass.findings, masks, recorded, settings)
    return replace(compared_pass, findings=findings, masks=masks)


def _refuse_to_judge(compared_passes: Sequence[ComparedPass], reason: str, settings: VerdictSettings) -> Verdict:
    """Return the verdict CANNOT TELL on passes that cannot be judged together."""
    verdicts = [
        make_pass_verdict(replace(compared_pass, findings=()), Outcome.CANNOT_TELL, reason)
        for compared_pass in compared_passes
    ]
    verdicts = keep_worst_of_tp_and_ring_ranks(compared_passes, verdicts)
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


def _choose_outcome(verdicts: Sequence[PassVerdict]) -> Outcome:
    """Return DIFFERS if any pass or gradient differs, else UNSETTLED if any is, else REPRODUCED, else CANNOT TELL."""
    outcomes = {verdict.outcome for verdict in verdicts}
    decisive = (Outcome.DIFFERS, Outcome.UNSETTLED, Outcome.REPRODUCED)
    return next((outcome for outcome in decisive if outcome in outcomes), Outcome.CANNOT_TELL)


def _choose_reason(verdicts: Sequence[PassVerdict], outcome: Outcome) -> str | None:
    """Choose the reason to show.

    If the outcome is UNSETTLED, it is the reason of the first UNSETTLED verdict; otherwise the most frequent reason of
    verdicts that are CANNOT TELL, and None if there are none. Passes with other weights and passes that failed tell
    nothing about the other passes, so their reasons come last, however many there are. If there is no verdict at all,
    the reason is that no pass was replayed.
    """
    if outcome is Outcome.UNSETTLED:
        return next(str(verdict.reason) for verdict in verdicts if verdict.outcome is outcome)
    return next(iter(count_reasons(verdicts)), None if verdicts else "no pass was replayed")


def _find_first_wrong_or_unsettled(verdicts: Sequence[PassVerdict], outcome: Outcome) -> PassVerdict | None:
    """Find the first pass or gradient that differs or is unsettled, if that is the outcome of the run."""
    if outcome not in (Outcome.DIFFERS, Outcome.UNSETTLED):
        return None
    return next(verdict for verdict in verdicts if verdict.outcome is outcome)


def _select_open_findings(verdicts: Sequence[PassVerdict]) -> list[Finding]:
    """Select, for each quantity, the first finding whose status is NOT_JUDGED or UNSETTLED.

    Left out are the findings of passes with other weights than the job's, and those that are not judged because the
    replay drew other dropout masks. The finding `dropout masks`, of the random numbers themselves, is not left out.
    """
    first: dict[str, Finding] = {}
    for verdict in verdicts:
        for finding in verdict.findings if verdict.reason != OTHER_WEIGHTS else ():
            is_inconclusive = finding.status in (FindingStatus.NOT_JUDGED, FindingStatus.UNSETTLED)
            if is_inconclusive and not is_about_masks(finding.doubt):
                first.setdefault(finding.name, finding)
    return list(first.values())


def _compare_environments(
    compared_passes: Sequence[ComparedPass], settings: VerdictSettings
) -> dict[str, tuple[str, str]]:
    """List the settings that the job recorded and the replay knows, where they differ.

    Returns, by the setting's name, the job's value and the replay's. If the job had several values, all are named.
    """
    job_values: dict[str, list[str]] = {}
    for compared_pass in compared_passes:
        recorded = compared_pass.recorded
        coarsest = {"dtype": max(recorded.dtypes, key=roundoff)} if recorded.dtypes else {}
        for name, value in {**recorded.environment, **coarsest}.items():
            if value not in job_values.setdefault(name, []):
                job_values[name].append(value)
    shared = [name for name in job_values if name in settings.environment]
    return {
        name: (", ".join(job_values[name]), settings.environment[name])
        for name in shared
        if job_values[name] != [settings.environment[name]]
    }


def _find_coarsest_dtype(compared_passes: Sequence[ComparedPass]) -> str:
    """Find the coarsest dtype that the job is known to have computed in; `unknown` if none is."""
    dtypes = [dtype for compared_pass in compared_passes for dtype in compared_pass.recorded.dtypes]
    return max(dtypes, key=roundoff, default="unknown")
