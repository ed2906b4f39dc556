"""Which passes of a step its gradient is of: made sums of two and of three passes' gradients on one rank."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from replay.tolerances.job_bounds import GRADIENT
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence
from replay.verdict.causes.mix_rules import EXPLAINED, find_other_mix
from replay.verdict.gradient_mix import SinglePassGradient
from tests.replay.verdict.causes.made_evidence import (
    NAMES,
    draw_gradients,
    make_gradient_evidence,
    make_window,
    sample_replay,
)

PARTS = [draw_gradients(seed) for seed in range(3)]


def make_mix_evidence(shares: Sequence[float], *, clips_early: bool = False, dtype: str = "float32") -> CauseEvidence:
    """Evidence of a step of one rank, whose gradient has so many times of each pass what it should have."""
    num_passes = len(shares)
    job = {
        name: [
            sum(share * part[name][place] for share, part in zip(shares, PARTS, strict=False)) / num_passes
            for place in range(len(PARTS[0][name]))
        ]
        for name in NAMES
    }
    window = []
    for index in range(num_passes):
        [compared] = make_window([job], PARTS[0], index=index, dtype=dtype)
        step = compared.recorded.step_after
        assert step is not None
        step = replace(step, passes=tuple(range(num_passes)), shares=(1.0,) * num_passes, clips_early=clips_early)
        is_last = index == num_passes - 1
        window.append(replace(compared, recorded=replace(compared.recorded, step_after=step if is_last else None)))
    own = [
        SinglePassGradient(
            index=index, data_rank=0, rank=0, forward=index, weight=1 / num_passes, gradient=sample_replay(PARTS[index])
        )
        for index in range(num_passes)
    ]
    return replace(make_gradient_evidence(window), single_pass_gradients=own)


def make_evidence_of_ranks(
    shares: Sequence[Sequence[float]], *, num_passes: int = 1, max_norm: float | None = None
) -> CauseEvidence:
    """Evidence of a step of as many ranks as `shares` has rows, each of which has so many times of each pass' gradient.

    The passes are those of the first forward of each rank, then those of the second one.
    """
    num_ranks = len(shares)
    total = num_ranks * num_passes
    parts = [draw_gradients(seed) for seed in range(total)]
    job = [
        {
            name: [
                sum(share * part[name][place] for share, part in zip(own, parts, strict=True)) / total
                for place in range(len(parts[0][name]))
            ]
            for name in NAMES
        }
        for own in shares
    ]
    window = []
    for index in range(num_passes):
        for compared in make_window(job, parts[0], index=index):
            step = compared.recorded.step_after
            assert step is not None
            step = replace(
                step, passes=tuple(range(num_passes)), shares=(1.0,) * num_passes, max_norm=max_norm, number=1
            )
            recorded = replace(
                compared.recorded, num_steps_before=1, step_after=step if index == num_passes - 1 else None
            )
            window.append(replace(compared, recorded=recorded))
    own_gradients = [
        SinglePassGradient(
            index=number // num_ranks,
            data_rank=number % num_ranks,
            rank=number % num_ranks,
            forward=number // num_ranks,
            weight=1 / total,
            gradient=sample_replay(part),
        )
        for number, part in enumerate(parts)
    ]
    return replace(make_gradient_evidence(window), single_pass_gradients=own_gradients)


IDENTITY = [[2.0, 0.0], [0.0, 2.0]]  # each rank steps with its own gradient


@pytest.mark.parametrize(
    ("shares", "num_passes", "name", "sentence"),
    [
        (IDENTITY, 1, CauseName.NOT_REDUCED, "the ranks' gradients are not averaged, since the job's step 2: what rank "
         "0 steps with is the gradient of its own passes alone"),
        ([[2.0, 0.0, 2.0, 0.0], [0.0, 2.0, 0.0, 2.0]], 2, CauseName.NOT_REDUCED, "the ranks' gradients are not "),
        # Both ranks step with the gradient of the second rank alone.
        ([[0.0, 1.0]] * 2, 1, CauseName.NOT_REDUCED, "the gradient of rank 0 is not in the step's gradient, since "),
        ([[1.0, 0.0, 1.0, 0.0]] * 2, 2, CauseName.NOT_REDUCED, "the gradient of rank 1 is not in the step's gradient"),
        # One pass of one rank is left out, or the first pass of each.
        ([[0.0, 1.0, 1.0, 1.0]] * 2, 2, CauseName.WINDOW_WEIGHTS, "forward 0 of rank 0 has no part in the step's "),
        ([[0.0, 0.0, 1.0, 1.0]] * 2, 2, CauseName.WINDOW_WEIGHTS, "of a step's 2 passes on each rank the last alone "),
        ([[1.0, 1.0, 0.0, 0.0]] * 2, 2, CauseName.WINDOW_WEIGHTS, "forward 1 of rank 0, forward 1 of rank 1 have no "),
        ([[2.0, 2.0]] * 2, 1, CauseName.SUMMED, "the gradients of 2 ranks are added up and not averaged, since the "),
        ([[3.0, 3.0, 3.0]] * 3, 1, CauseName.SUMMED, "the gradients of 3 ranks are added up and not averaged"),
        # A factor that is not the number of ranks comes of something else.
        ([[3.0, 3.0]] * 2, 1, None, ""),
    ],
)  # fmt: skip
def test_what_is_missing_is_told_of_passes_and_of_ranks(
    shares: Sequence[Sequence[float]], num_passes: int, name: CauseName | None, sentence: str
) -> None:
    cause = find_other_mix(make_evidence_of_ranks(shares, num_passes=num_passes))
    if name is None:
        assert cause is None
        return
    assert cause is not None
    assert cause.name is name
    assert cause.sentence.startswith(sentence), cause.sentence
    assert cause.sureness is (Sureness.PROBABLY if name is CauseName.SUMMED else Sureness.IS)


@pytest.mark.parametrize(
    ("shares", "max_norm", "sureness"),
    [
        (IDENTITY, None, Sureness.IS),
        # A clipping comes before the average that the ranks may make, and no weights tell.
        (IDENTITY, 1.0, Sureness.PROBABLY),
        # Where all ranks have the same, whoever averages behind it changes nothing.
        ([[0.0, 1.0]] * 2, 1.0, Sureness.IS),
    ],
)
def test_ranks_that_clip_may_average_later(
    shares: Sequence[Sequence[float]], max_norm: float | None, sureness: Sureness
) -> None:
    cause = find_other_mix(make_evidence_of_ranks(shares, max_norm=max_norm))
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.NOT_REDUCED, sureness)


def find_cause(shares: Sequence[float], *, clips_early: bool = False, dtype: str = "float32") -> Cause | None:
    return find_other_mix(make_mix_evidence(shares, clips_early=clips_early, dtype=dtype))


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        ([1.0, 0.0], "forward 1 of rank 0 has no part in the step's gradient, since the job's step 2"),
        ([1.0, 0.0, 0.0], "forward 1 of rank 0, forward 2 of rank 0 have no part in the step's gradient"),
        ([0.0, 0.0, 1.0], "of a step's 3 passes the last alone is in the step's gradient"),
        # Of two passes the last alone: the other one is named.
        ([0.0, 1.0], "forward 0 of rank 0 has no part in the step's gradient"),
        ([0.5, 1.5], "the passes of a step count 0.5, 1.5 times what they should, since the job's step 2"),
    ],
)
def test_passes_that_count_otherwise_are_named(shares: Sequence[float], sentence: str) -> None:
    cause = find_cause(shares)
    assert cause is not None
    assert (cause.name, cause.sureness, cause.explains) == (CauseName.WINDOW_WEIGHTS, Sureness.IS, EXPLAINED)
    assert cause.sentence.startswith(sentence)


@pytest.mark.parametrize(("shares", "is_named"), [([1.0, 1.0], True), ([0.5, 1.5], False)])
def test_passes_that_weigh_the_same_in_the_job_are_replayed_so_by_an_option(
    shares: Sequence[float], is_named: bool
) -> None:
    """By their tokens the passes weigh 0.375 and 0.625 here, and half of `shares` in the job."""
    evidence = make_mix_evidence(shares)
    own = [
        replace(gradient, weight=weight)
        for gradient, weight in zip(evidence.single_pass_gradients, (0.375, 0.625), strict=True)
    ]
    cause = find_other_mix(replace(evidence, single_pass_gradients=own))
    assert cause is not None
    assert str(cause.try_next).startswith("--window mean-of-means here") is is_named


def test_other_shares_of_a_job_that_clips_early_come_of_that() -> None:
    cause = find_cause([0.5, 1.5], clips_early=True)
    assert cause is not None
    assert (cause.name, cause.sureness, cause.explains) == (CauseName.CLIPPED_EARLY, Sureness.IS, EXPLAINED)
    assert "count 0.5, 1.5 times" in cause.sentence


@pytest.mark.parametrize(
    ("shares", "dtype", "is_found"),
    [
        # A factor on all passes is no other mix of one rank's.
        ([1.0, 1.0], "float32", False),
        ([2.0, 2.0], "float32", False),
        ([0.95, 1.05], "float32", True),
        # In 16 bits rounding may do that.
        ([0.95, 1.05], "bfloat16", False),
        ([0.05, 1.0], "float32", True),
        ([0.7, 1.3], "bfloat16", True),
    ],
)
def test_shares_that_rounding_explains_are_no_cause(shares: Sequence[float], dtype: str, is_found: bool) -> None:
    assert (find_cause(shares, dtype=dtype) is not None) is is_found


def test_a_gradient_that_is_no_sum_of_the_passes_is_another_cause() -> None:
    evidence = make_mix_evidence([0.5, 1.5])
    strange = [
        replace(own, gradient=sample_replay(draw_gradients(7 + own.index))) for own in evidence.single_pass_gradients
    ]
    assert find_other_mix(replace(evidence, single_pass_gradients=strange)) is None


def test_without_the_passes_own_gradients_of_that_window_nothing_is_said() -> None:
    evidence = make_mix_evidence([0.5, 1.5])
    assert find_other_mix(replace(evidence, single_pass_gradients=())) is None
    others = [replace(own, index=own.index + 2) for own in evidence.single_pass_gradients]
    assert find_other_mix(replace(evidence, single_pass_gradients=others)) is None
    [verdict] = evidence.verdicts
    assert find_other_mix(replace(evidence, verdicts=[])) is None
    elsewhere = replace(verdict, index=9, findings=[each for each in verdict.findings if each.name == GRADIENT])
    assert find_other_mix(replace(evidence, verdicts=[elsewhere])) is None
