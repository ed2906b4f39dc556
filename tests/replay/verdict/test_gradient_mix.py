"""What a gradient is made of: sums of made gradients with known weights, and the causes that follow."""

from dataclasses import replace

import pytest

from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.table import find_causes
from replay.verdict.gradient_mix import SinglePassGradient, find_mixes
from tests.replay.verdict.causes.made_evidence import (
    NAMES,
    Gradients,
    draw_gradients,
    make_gradient_evidence,
    make_window,
    sample_replay,
)

FIRST, SECOND = draw_gradients(1), draw_gradients(2)
OWN = [
    SinglePassGradient(index=0, data_rank=rank, rank=rank, forward=0, weight=0.5, gradient=sample_replay(gradient))
    for rank, gradient in enumerate((FIRST, SECOND))
]


def add_gradients(first: float, second: float) -> Gradients:
    return {
        name: [first * own + second * other for own, other in zip(FIRST[name], SECOND[name], strict=True)]
        for name in NAMES
    }


def find_cause(*ranks: Gradients) -> Cause:
    """The cause, where the replay's gradient is the mean of both ranks' and the job's ranks had these."""
    evidence = make_gradient_evidence(make_window(ranks, add_gradients(0.5, 0.5)), names=(GRAD_NORM, GRADIENT))
    return find_causes(replace(evidence, single_pass_gradients=OWN))[0]


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.5), (1.0, 1.0), (0.5, 0.0), (0.2, 0.8)])
def test_weights_are_found(first: float, second: float) -> None:
    window = make_window([add_gradients(first, second)], FIRST)
    [mix] = find_mixes([compared.recorded for compared in window], OWN)
    assert mix.shares == pytest.approx((2 * first, 2 * second), abs=1e-6)
    assert mix.residual < 1e-9


def test_what_is_no_sum_of_them_leaves_a_residual() -> None:
    window = make_window([draw_gradients(3)], FIRST)
    [mix] = find_mixes([compared.recorded for compared in window], OWN)
    assert mix.residual > 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_no_sum(value: float) -> None:
    broken = {NAMES[0]: [value] * len(FIRST[NAMES[0]])}
    window = make_window([{**FIRST, **broken}, FIRST], FIRST)
    assert [mix.rank for mix in find_mixes([compared.recorded for compared in window], OWN)] == [1]
    own = [replace(OWN[0], gradient=sample_replay({**FIRST, **broken})), OWN[1]]
    assert find_mixes([compared.recorded for compared in window], own) == []


def test_a_rank_that_is_left_out_is_named() -> None:
    halved = add_gradients(0.5, 0.0)
    cause = find_cause(halved, halved)
    assert (cause.name, cause.sureness) == (CauseName.NOT_REDUCED, Sureness.IS)
    assert "the gradient of rank 1 is not in the step's gradient" in cause.sentence


def test_ranks_that_step_on_their_own_gradients_are_found() -> None:
    cause = find_cause(FIRST, SECOND)
    assert (cause.name, cause.sureness) == (CauseName.NOT_REDUCED, Sureness.IS)
    assert "its own passes alone" in cause.sentence


def test_ranks_that_count_otherwise_are_found() -> None:
    other = add_gradients(0.2, 0.8)
    cause = find_cause(other, other)
    assert (cause.name, cause.sureness) == (CauseName.WINDOW_WEIGHTS, Sureness.IS)
    assert "count 0.4, 1.6 times" in cause.sentence


def test_a_sum_of_the_ranks_is_told_from_a_mean() -> None:
    both = add_gradients(1.0, 1.0)
    cause = find_cause(both, both)
    assert (cause.name, cause.sureness) == (CauseName.SUMMED, Sureness.PROBABLY)
