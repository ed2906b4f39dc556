"""Count the passes and the optimizer steps of a run that were judged."""

from collections.abc import Sequence

from replay.tolerances.job_bounds import GRADIENT_QUANTITIES, HIDING_BOUND, LOG_PROBS, LOSS, TOKEN_LOG_PROBS
from replay.verdict.findings import Finding, FindingStatus
from replay.verdict.gradient_findings import ComparedPass, list_steps
from replay.verdict.outcomes import Coverage, Outcome, PassVerdict
from replay.verdict.recorded_pass import MISSING_GRADIENT

FORWARD_QUANTITIES = (LOSS, TOKEN_LOG_PROBS, LOG_PROBS)


def measure_coverage(
    windows: Sequence[Sequence[ComparedPass]],
    pass_verdicts: Sequence[PassVerdict],
    window_verdicts: Sequence[PassVerdict],
) -> Coverage:
    """Count what was judged.

    windows          the passes of each window of the replay
    pass_verdicts    one for each micro-batch
    window_verdicts  one for each window of whose gradient the job recorded something
    """
    judged_ends = {
        verdict.index for verdict in window_verdicts if _is_judged(verdict, (*GRADIENT_QUANTITIES, MISSING_GRADIENT))
    }
    end_of_pass = {compared.record.index: window[-1].record.index for window in windows for compared in window}
    with_forward = [verdict for verdict in pass_verdicts if _is_judged(verdict, FORWARD_QUANTITIES)]
    whole = [
        verdict
        for verdict in with_forward
        if verdict.index not in end_of_pass or end_of_pass[verdict.index] in judged_ends
    ]
    return Coverage(
        num_passes=len(pass_verdicts),
        num_judged=len(whole),
        num_forward_judged=len(with_forward) - len(whole),
        num_steps=max(_count_steps(windows), len(judged_ends)),
        num_steps_judged=len(judged_ends),
    )


def _count_steps(windows: Sequence[Sequence[ComparedPass]]) -> int:
    """Count the steps that the job is known to have taken after these passes; a pass may go into no step."""
    before = {
        number
        for window in windows
        for compared in window
        if (number := compared.recorded.num_steps_before) is not None
    }
    recorded = {step.number for window in windows for step in list_steps(window)}
    return len(recorded | (before - {max(before, default=0)}))


def _is_judged(verdict: PassVerdict, quantities: Sequence[str]) -> bool:
    is_inconclusive = verdict.outcome in (Outcome.CANNOT_TELL, Outcome.UNSETTLED)
    return not is_inconclusive and any(_is_sharp(finding) for finding in verdict.findings if finding.name in quantities)


def _is_sharp(finding: Finding) -> bool:
    """Tell whether a finding was judged by a bound that would show that the quantity had vanished."""
    is_judged = finding.status in (FindingStatus.AGREES, FindingStatus.DIFFERS)
    return is_judged and (finding.bound is None or finding.bound <= HIDING_BOUND)
