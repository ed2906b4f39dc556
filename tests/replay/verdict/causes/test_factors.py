"""What a factor on a job's gradients may be of: a loss scale, its passes, its ranks, padding, a wrong reduction."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from replay.verdict.causes.factors import (
    explain_loss_scale,
    explain_padding,
    explain_share,
    find_uniform_factor,
    may_come_of_reduction,
)
from replay.verdict.causes.wrong_gradient import WrongGradient, find_factor
from replay.verdict.gradient_evidence import ComparedGradient, GradientEvidence
from replay.verdict.gradient_findings import ComparedPass
from tests.replay.verdict.causes.made_evidence import draw_gradients, make_verdict, make_window

SOUND = draw_gradients()


@pytest.mark.parametrize(
    ("factor", "is_scale"),
    [(65536.0, True), (64.0, True), (64.5, True), (32.0, False), (100.0, False), (-1024.0, False), (0.0, False)],
)
def test_a_loss_scale_is_a_power_of_two_and_large(factor: float, is_scale: bool) -> None:
    assert explain_loss_scale(factor) == (" (a loss scale?)" if is_scale else "")


def make_ranks(num_ranks: int, num_passes: int) -> list[ComparedPass]:
    windows = [make_window([SOUND] * num_ranks, SOUND, index=index) for index in range(num_passes)]
    return [compared for window in windows for compared in window]


PASSES, RANKS = "1 over the 4 passes of a step on each rank", "1 over the 2 ranks"


@pytest.mark.parametrize(
    ("num_ranks", "num_passes", "factor", "reasons"),
    [
        (1, 4, 0.25, [PASSES]),
        (2, 4, 0.5, [RANKS]),
        (2, 4, 0.25, [PASSES]),
        (2, 2, 0.5, ["1 over the 2 passes", RANKS]),
        (2, 4, 0.3, []),
        (1, 1, 1.0, []),
    ],
)
def test_a_factor_may_be_one_over_the_passes_or_the_ranks(
    num_ranks: int, num_passes: int, factor: float, reasons: Sequence[str]
) -> None:
    text = explain_share(factor, make_ranks(num_ranks, num_passes))
    assert [reason for reason in ("1 over the 2 passes", PASSES, RANKS) if reason in text] == reasons
    assert bool(text) is bool(reasons)


@pytest.mark.parametrize(
    ("num_ranks", "factor", "may"),
    [(2, 2.0, True), (2, 0.5, True), (2, 1.9, True), (2, 3.0, False), (4, 0.25, True), (1, 1.0, False)],
)
def test_a_factor_near_the_number_of_ranks_may_be_of_their_reduction(num_ranks: int, factor: float, may: bool) -> None:
    assert may_come_of_reduction(factor, make_ranks(num_ranks, 1)) is may


def make_wrong(
    gradients: Mapping[str, ComparedGradient], window: Sequence[ComparedPass] = (), *, is_coarse: bool = False
) -> WrongGradient:
    return WrongGradient(
        verdict=make_verdict(0, [], optimizer_step=0),
        window=window,
        gradient=GradientEvidence(parameters=gradients),
        is_first=True,
        is_coarse=is_coarse,
        norm_bounds=dict.fromkeys(gradients, 0.1),
    )


def compare(job: float | None, replay: float = 1.0, cosine: float | None = 1.0) -> ComparedGradient:
    return ComparedGradient(name="w", names=("w",), job_norm=job, replay_norm=replay, cosine=cosine)


@pytest.mark.parametrize(
    ("gradient", "factor"),
    [
        (compare(3.0), 3.0),
        (compare(3.0, 2.0), 1.5),
        (compare(3.0, cosine=-1.0), -3.0),
        (compare(3.0, cosine=None), 3.0),
        (compare(3.0, cosine=0.0), 3.0),
        (compare(None), None),
        (compare(3.0, 0.0), None),
    ],
)
def test_the_factor_of_a_gradient_has_its_direction(gradient: ComparedGradient, factor: float | None) -> None:
    assert find_factor(gradient) == factor


@pytest.mark.parametrize(
    ("gradients", "factor"),
    [
        ([compare(2.0), compare(4.0, 2.0), compare(2.002)], 2.0),
        # One that is 0 here tells nothing; one that no rank knows, or of another direction or factor, tells that no
        # number is that of all.
        ([compare(2.0), compare(0.0, 0.0)], 2.0),
        ([compare(2.0), compare(None)], None),
        ([compare(2.0), compare(2.0, cosine=0.5)], None),
        ([compare(2.0), compare(2.1), compare(2.0)], None),
        ([compare(0.0), compare(0.0)], None),
        ([], None),
    ],
)
def test_one_factor_is_that_of_every_gradient(gradients: Sequence[ComparedGradient], factor: float | None) -> None:
    assert find_uniform_factor(make_wrong({str(n): each for n, each in enumerate(gradients)})) == factor


def test_in_sixteen_bits_factors_may_lie_apart() -> None:
    gradients = {"a": compare(2.0), "b": compare(2.4, cosine=0.95)}
    assert find_uniform_factor(make_wrong(gradients)) is None
    assert find_uniform_factor(make_wrong(gradients, is_coarse=True)) == 2.4


@pytest.mark.parametrize(
    ("num_tokens", "weights", "factor", "share"),
    [
        # Passes of 2 rows and 100 positions, of which 98 predict a token.
        ([49], [1.0], 0.5, "0.5"),
        ([50], [1.0], 0.5, "0.5"),
        ([49], [1.0], 0.6, None),
        ([49, 98], [1.0, 1.0], 0.75, "0.75"),
        ([49, 98], [3.0, 1.0], 0.625, "0.625"),
        ([100], [1.0], 1.0, None),
        ([49], [0.0], 0.5, None),
        ([0], [1.0], 0.5, None),
    ],
)
def test_a_factor_may_be_the_share_of_positions_that_have_a_loss(
    num_tokens: Sequence[int], weights: Sequence[float], factor: float, share: str | None
) -> None:
    window = []
    for tokens, weight in zip(num_tokens, weights, strict=True):
        [compared] = make_window([SOUND], SOUND)
        record = replace(compared.record, result=replace(compared.record.result, weight=weight))
        window.append(replace(compared, record=record, recorded=replace(compared.recorded, num_tokens=tokens)))
    expected = "" if share is None else f", as the loss's tokens are {share} of all positions, padded ones too"
    assert explain_padding(factor, make_wrong({}, window)) == expected
