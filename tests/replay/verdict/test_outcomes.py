"""Which findings and reasons stand for a run: of several passes, the worst number and the most frequent reason."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from replay.tolerances.job_bounds import GRAD_NORM, LOSS, TOKEN_LOG_PROBS
from replay.verdict.findings import Finding, FindingStatus, choose_worst, judge_number
from replay.verdict.outcomes import (
    FAILED,
    OTHER_WEIGHTS,
    Coverage,
    Outcome,
    PassVerdict,
    count_reasons,
    select_worst_findings,
)


def judge_pass(
    index: int, *findings: Finding, outcome: Outcome = Outcome.REPRODUCED, reason: str | None = None
) -> PassVerdict:
    return PassVerdict(index=index, source=f"{index}.pkl", rank=0, outcome=outcome, reason=reason, findings=findings)


def find(name: str, difference: float, bound: float = 1.0, doubt: str | None = None) -> Finding:
    return judge_number(name, 1.0, 2.0, difference=difference, bound=bound, doubt=doubt)


def test_the_worst_of_each_number_used_most_of_its_bound() -> None:
    near, nearer, beyond = find(TOKEN_LOG_PROBS, 0.1), find(TOKEN_LOG_PROBS, 0.3, 0.4), find(LOSS, 3.0)
    verdicts = [judge_pass(0, near), judge_pass(1, nearer, beyond), judge_pass(2, find(TOKEN_LOG_PROBS, 0.6))]
    assert select_worst_findings(verdicts) == [nearer, beyond]
    # A first one of two that are equally near stays.
    assert select_worst_findings([judge_pass(0, near), judge_pass(1, near)])[0] is near


@pytest.mark.parametrize(
    "verdict",
    [
        # Numbers on other weights tell nothing.
        judge_pass(1, find(LOSS, 9.0), outcome=Outcome.CANNOT_TELL, reason=OTHER_WEIGHTS),
        judge_pass(1, find(LOSS, 9.0, doubt="another objective"), outcome=Outcome.UNSETTLED),
        judge_pass(1, Finding(name=LOSS, status=FindingStatus.NOT_JUDGED, recorded=1.0, difference=9.0, bound=1.0)),
        # What was compared in words has no distance.
        judge_pass(1, Finding(name=LOSS, status=FindingStatus.DIFFERS, recorded=1.0), outcome=Outcome.DIFFERS),
    ],
)
def test_a_number_that_was_not_judged_is_no_worst_one(verdict: PassVerdict) -> None:
    small = find(LOSS, 0.1, 0.4)
    assert select_worst_findings([judge_pass(0, small), verdict]) == [small]


@pytest.mark.parametrize(
    ("reasons", "order"),
    [
        (["a", "b", "b"], {"b": 2, "a": 1}),
        # Reasons of whole passes come last, however many there are; a pass that failed comes behind other weights.
        ([OTHER_WEIGHTS, OTHER_WEIGHTS, "a"], {"a": 1, OTHER_WEIGHTS: 2}),
        ([FAILED, FAILED, OTHER_WEIGHTS, "a", "b", "b"], {"b": 2, "a": 1, OTHER_WEIGHTS: 1, FAILED: 2}),
        ([], {}),
    ],
)
def test_reasons_are_counted_in_the_order_in_which_they_tell(reasons: Sequence[str], order: dict[str, int]) -> None:
    verdicts = [judge_pass(index, outcome=Outcome.CANNOT_TELL, reason=reason) for index, reason in enumerate(reasons)]
    verdicts += [judge_pass(9), judge_pass(10, outcome=Outcome.UNSETTLED, reason="c")]
    assert list(count_reasons(verdicts).items()) == list(order.items())


def test_a_finding_without_a_doubt_is_worse_than_a_doubted_one() -> None:
    sure, doubted, agreeing = find(GRAD_NORM, 0.5, 0.4), find(GRAD_NORM, 9.0, 0.4, "perhaps"), find(GRAD_NORM, 0.3, 0.4)
    assert choose_worst([agreeing, doubted, sure]) is sure
    assert choose_worst([agreeing, doubted]) is doubted
    assert choose_worst([find(GRAD_NORM, 0.1, 0.4), agreeing]) is agreeing


def test_a_run_is_covered_whole_by_passes_and_by_steps() -> None:
    whole = Coverage(num_passes=4, num_judged=4, num_steps=2, num_steps_judged=2)
    assert whole.is_whole
    assert not replace(whole, num_judged=3).is_whole
    assert not replace(whole, num_steps_judged=1).is_whole


def test_a_window_is_named_by_the_jobs_step_or_by_its_passes() -> None:
    verdict = replace(judge_pass(5), first_index=4)
    assert verdict.window_name == "the window of passes 5 to 6"
    assert replace(verdict, first_index=5).window_name == "the window of pass 6"
    assert replace(verdict, optimizer_step=0).window_name == "the job's step 1"
    assert (verdict.is_window, judge_pass(5).is_window) == (True, False)
