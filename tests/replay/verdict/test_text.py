"""A verdict's lines say each reason once, and no more numbers than are read."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from replay.verdict.findings import Finding, FindingStatus, judge_number
from replay.verdict.outcomes import Coverage, Outcome, PassVerdict, Verdict
from replay.verdict.recorded_pass import DifferingElement, WeightComparison
from replay.verdict.text import format_outcome, format_verdict, format_weights, name_numbers

RANKS = "the job's step took 2 passes of 2 ranks"
COUNT = "the norm's step was not recorded"


def make_verdict(
    *, worst: Sequence[Finding] = (), still_open: Sequence[Finding] = (), step: str | None = None
) -> Verdict:
    window = PassVerdict(
        index=4,
        rank=0,
        source="rank0 #6",
        outcome=Outcome.CANNOT_TELL,
        reason=step,
        findings=[],
        first_index=4,
        optimizer_step=2,
    )
    return Verdict(
        outcome=Outcome.REPRODUCED,
        reason=None,
        counts={Outcome.REPRODUCED: 1},
        window_counts={},
        first=None,
        worst=worst,
        open=still_open,
        weights=None,
        environment={},
        dtypes=("float32", "float32"),
        floors={},
        model_differences=[],
        coverage=Coverage(num_passes=1, num_judged=1),
        passes=[],
        windows=[] if step is None else [window],
    )


def make_open(name: str, doubt: str) -> Finding:
    return Finding(name=name, status=FindingStatus.NOT_JUDGED, recorded=0.5, doubt=doubt, is_evidence=False)


def list_lines(verdict: Verdict, label: str) -> list[str]:
    return [text for found, text in format_verdict(verdict) if found == label]


def test_the_reason_of_an_open_step_is_told_once() -> None:
    norms = [make_open("gradient norm", RANKS), make_open("gradient samples", RANKS)]
    verdict = make_verdict(still_open=norms, step=RANKS)
    assert list_lines(verdict, "open") == [f"step 3: {RANKS}"]
    assert list_lines(verdict, "not judged") == []


def test_numbers_of_one_reason_are_told_together() -> None:
    norms = [make_open("gradient norm", RANKS), make_open("loss", COUNT), make_open("gradient samples", RANKS)]
    told = list_lines(make_verdict(still_open=norms), "not judged")
    assert told == [f"gradient norm, gradient samples: {RANKS}", f"loss: {COUNT}"]


def test_numbers_that_were_compared_are_told_with_both_values_and_their_reason_once() -> None:
    norm, samples = (replace(make_open(name, RANKS), replayed=0.25) for name in ("gradient norm", "gradient samples"))
    loss = replace(make_open("loss", COUNT), replayed=0.25)
    verdict = make_verdict(still_open=[norm, loss, samples], step=RANKS)
    both = "gradient norm: 0.5 in the job, 0.25 here; gradient samples: 0.5 in the job, 0.25 here"
    assert list_lines(verdict, "not judged") == [f"{both}: {RANKS}", f"loss: 0.5 in the job, 0.25 here: {COUNT}"]


def test_the_numbers_nearest_to_their_bounds_are_told_first_and_the_others_counted() -> None:
    agreeing = [judge_number(f"q{i}", 1.0, 1.0, difference=0.1 * i, bound=1.0) for i in range(1, 7)]
    [evidence] = list_lines(make_verdict(worst=agreeing), "evidence")
    numbers = ", ".join(f"q{i} to 0.{i} (bound 1)" for i in (6, 5, 4, 3))
    assert evidence == f"{numbers}, 2 more within their bounds; computed in float32"


def test_passes_whose_forward_alone_was_judged_are_counted_beside_those_that_were_judged_whole() -> None:
    def cover(num_judged: int, num_forward_judged: int) -> list[str]:
        coverage = Coverage(num_passes=8, num_judged=num_judged, num_forward_judged=num_forward_judged, num_steps=4)
        return list_lines(replace(make_verdict(), coverage=coverage), "coverage")

    assert cover(0, 1) == ["0 of 8 passes and 0 of 4 steps judged; of 1 pass the forward alone"]
    assert cover(2, 3) == ["2 of 8 passes and 0 of 4 steps judged; of 3 passes more the forward alone"]
    assert cover(8, 0) == ["8 of 8 passes and 0 of 4 steps judged"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "pass 3"),
        ([1, 2], "passes 1 to 2"),
        ([7, 1, 3, 2], "passes 1 to 3, 7"),
        # Each data rank has a pass of this number.
        ([4, 4], "pass 4"),
        ([2, 1, 2, 1, 4, 4], "passes 1 to 2, 4"),
    ],
)
def test_passes_are_named_by_their_numbers_each_once(numbers: Sequence[int], text: str) -> None:
    assert name_numbers("pass", numbers) == text


@pytest.mark.parametrize(
    ("coverage", "limit"),
    [
        (Coverage(num_passes=8, num_judged=8, num_steps=2, num_steps_judged=2), ""),
        (Coverage(num_passes=8, num_judged=6, num_steps=2, num_steps_judged=1), " (6 of 8 passes)"),
        (Coverage(num_passes=8, num_judged=8, num_steps=4, num_steps_judged=3), " (3 of 4 steps)"),
        (Coverage(num_passes=8, num_forward_judged=8, num_steps=4), " (forwards alone)"),
        (Coverage(num_passes=8, num_forward_judged=5, num_steps=4), " (the forward of 5 of 8 passes)"),
        (Coverage(num_passes=8, num_steps=4), " (within wide bounds, 3 of 8 passes)"),
    ],
)
def test_reproduced_is_said_of_what_was_judged(coverage: Coverage, limit: str) -> None:
    verdict = replace(make_verdict(), coverage=coverage, counts={Outcome.REPRODUCED: 3, Outcome.CANNOT_TELL: 5})
    assert format_outcome(verdict) == f"REPRODUCED{limit}"


def test_where_no_pass_is_reproduced_the_gradients_are() -> None:
    verdict = replace(make_verdict(), coverage=Coverage(num_passes=8, num_steps=4), counts={Outcome.CANNOT_TELL: 8})
    assert format_outcome(verdict) == "REPRODUCED (gradients alone)"


def open_pass(index: int, reason: str, **changes: Any) -> PassVerdict:
    verdict = PassVerdict(
        index=index, source=f"{index}.pkl", rank=0, outcome=Outcome.CANNOT_TELL, reason=reason, findings=[]
    )
    return replace(verdict, **changes)


def test_open_passes_and_steps_are_told_together_by_their_reason() -> None:
    passes = [open_pass(0, "a"), open_pass(1, "loss is off by 0.2, but b"), open_pass(2, "loss is off by 0.3, but b")]
    windows = [open_pass(2, "a", first_index=0, optimizer_step=4), open_pass(4, "a", first_index=3)]
    verdict = replace(make_verdict(), passes=passes, windows=windows)
    assert list_lines(verdict, "open") == ["pass 1 and step 5 and the window of passes 4 to 5: a; passes 2 to 3: b"]


@pytest.mark.parametrize(("number", "more"), [(3, ""), (4, ""), (5, "; 2 more reasons are in run.json")])
def test_many_reasons_are_left_to_the_log(number: int, more: str) -> None:
    """One more than three takes no more place than to say so."""
    verdict = replace(make_verdict(), passes=[open_pass(index, f"reason {index}") for index in range(number)])
    told = "; ".join(f"pass {index + 1}: reason {index}" for index in range(3 if more else number))
    assert list_lines(verdict, "open") == [f"{told}{more}"]


def test_weights_of_a_pass_that_was_replayed_last_are_not_said_to_be_of_another_step() -> None:
    weights = WeightComparison(compared=("w",), num_parameters=1, differing=("w",))
    assert (
        format_weights(weights)
        == "as the job's in 1 of its 1 parameter, sampled, until a step of the job gave other ones"
    )
    doubted = format_weights(replace(weights, doubt="no step of the job took this pass"))
    assert doubted == "as the job's in 1 of its 1 parameter, sampled, but no step of the job took this pass"
    first = DifferingElement(name="w", index=3, recorded=0.5, replayed=0.25)
    behind = format_weights(replace(weights, first=first, doubt="the job had stepped"))
    assert behind.endswith("element 3: 0.5 in the job, 0.25 here; the job had stepped")
