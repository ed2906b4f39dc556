"""A verdict's lines say each reason once, and no more numbers than are read."""

from collections.abc import Sequence
from dataclasses import replace

from replay.verdict.findings import Finding, FindingStatus, judge_number
from replay.verdict.outcomes import Coverage, Outcome, PassVerdict, Verdict
from replay.verdict.text import format_verdict

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
