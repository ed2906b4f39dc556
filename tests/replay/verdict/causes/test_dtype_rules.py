"""Gradients and weights that went through a 16-bit dtype."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from capture.file_format.optimizer_step import Sample
from replay.tolerances.job_bounds import GRADIENT_QUANTITIES, LOSS, STEPPED
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.dtype_rules import (
    SUMMED,
    find_finer_dtype,
    find_half_dtype,
    find_rounded_gradient,
    find_rounded_weights,
)
from replay.verdict.causes.table import find_causes
from replay.verdict.judge import PassEvidence, judge
from replay.verdict.outcomes import Outcome
from replay.verdict.recorded_pass import Claim
from tests.replay.verdict.causes.made_evidence import (
    NAMES,
    SETTINGS,
    draw_gradients,
    make_forward_evidence,
    make_gradient_evidence,
    make_window,
)

# Values that fp32 has, as a capture keeps them.
SOUND = {name: torch.tensor(values, dtype=torch.float32).tolist() for name, values in draw_gradients().items()}


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_the_dtype_of_rounded_values_is_found(dtype: torch.dtype, name: str) -> None:
    values = torch.tensor(SOUND[NAMES[0]])
    assert find_half_dtype(values.to(dtype).tolist()) == name
    assert find_half_dtype(values.tolist()) is None
    # Each rank rounds its gradient, and then the ranks' are added up.
    other = torch.tensor(SOUND[NAMES[1]]).to(dtype).float()
    assert find_half_dtype((values.to(dtype).float() + other).tolist()) == SUMMED
    # A single value that is not of the dtype shows that not all are, and few values tell nothing.
    assert find_half_dtype([*values.to(dtype).tolist(), 0.1]) != name
    assert find_half_dtype([1.0] * 15) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_no_sign_of_a_dtype(value: float) -> None:
    assert find_half_dtype([value] * 64) is None
    assert find_half_dtype([*torch.randn(64).tolist(), *[value] * 640]) is None


def test_gradients_that_were_rounded_are_told_from_changed_ones() -> None:
    rounded = {name: torch.tensor(values).bfloat16().tolist() for name, values in SOUND.items()}
    cause = find_causes(make_gradient_evidence(make_window([rounded], SOUND)))[0]
    assert (cause.name, cause.sureness) == (CauseName.DTYPE, Sureness.IS)
    assert "rounded to bf16" in cause.sentence
    # A job of bf16 has such gradients, and so has its replay.
    causes = find_causes(make_gradient_evidence(make_window([rounded], rounded)))
    assert CauseName.DTYPE not in [cause.name for cause in causes]


@pytest.mark.parametrize(
    ("job_dtype", "is_typed", "outcome"),
    [
        ("bfloat16", True, Outcome.UNSETTLED),
        # As of a job of fp16 on a CPU.
        ("bfloat16", False, Outcome.REPRODUCED),
        ("float32", True, Outcome.REPRODUCED),
    ],
)
def test_nothing_is_reproduced_in_a_finer_dtype_than_the_jobs_that_was_typed(
    job_dtype: str, is_typed: bool, outcome: Outcome
) -> None:
    [compared] = make_window([SOUND], SOUND, dtype=job_dtype)
    claims = [Claim(name=LOSS, values=[1.5])]
    recorded = replace(compared.recorded, claims=claims, num_tokens=80, environment={"autocast": "bfloat16"})
    settings = replace(SETTINGS, is_dtype_typed=is_typed)
    verdict = judge([PassEvidence(compared.record, recorded, compared.replayed)], settings)
    assert verdict.outcome is outcome
    sentences = [cause.sentence for cause in verdict.causes]
    assert sentences == (
        ["the job computes in bfloat16, under autocast, and float32 was typed"] if outcome is Outcome.UNSETTLED else []
    )


def test_gradients_of_which_the_ranks_parts_were_rounded_are_told() -> None:
    parts = [[torch.tensor(values).bfloat16().float() for values in draw_gradients(seed).values()] for seed in (1, 2)]
    summed = {name: (first + second).tolist() for name, first, second in zip(NAMES, *parts, strict=True)}
    cause = find_rounded_gradient(make_gradient_evidence(make_window([summed], SOUND)))
    assert cause is not None
    assert cause.sentence.endswith(
        "rounded to a 16-bit dtype, since the job's step 1: the sampled elements are values "
        "of that dtype, or sums of some"
    )
    assert cause.explains == GRADIENT_QUANTITIES
    assert find_rounded_gradient(make_gradient_evidence(make_window([SOUND], SOUND))) is None
    assert find_rounded_gradient(make_forward_evidence(LOSS)) is None


EXACT = tuple(torch.linspace(0.1, 0.9, 24).tolist())
ROUNDED = tuple(torch.linspace(0.1, 0.9, 24).bfloat16().tolist())


@pytest.mark.parametrize(
    ("versions", "dtype", "step"),
    [
        ([(0, EXACT), (1, ROUNDED)], "float32", 1),
        ([(0, EXACT), (0, EXACT), (3, ROUNDED)], "float32", 3),
        ([(0, EXACT), (1, EXACT), (2, ROUNDED)], "float32", 2),
        ([(0, ROUNDED), (1, EXACT), (2, ROUNDED), (3, EXACT)], "float32", 2),
        # Weights that were 16-bit numbers before the first step say nothing, nor do those that another dtype stores.
        ([(0, ROUNDED), (1, ROUNDED)], "float32", None),
        ([(0, EXACT), (1, ROUNDED)], "bfloat16", None),
        # A norm's weights of 1 are of any dtype.
        ([(0, EXACT), (1, (1.0,) * 24)], "float32", None),
        ([(1, ROUNDED)], "float32", None),
        ([(None, EXACT), (None, ROUNDED)], "float32", None),
    ],
)
def test_weights_that_a_step_rounds_are_told(
    versions: Sequence[tuple[int | None, tuple[float, ...]]], dtype: str, step: int | None
) -> None:
    passes = []
    for index, (number, values) in enumerate(versions):
        [compared] = make_window([SOUND], SOUND, index=index)
        samples = [Sample(name="w", dtype=dtype, shape=(24,), start=0, values=values)]
        recorded = replace(compared.recorded, samples=samples, num_steps_before=number)
        passes.append(replace(compared, recorded=recorded))
    cause = find_rounded_weights(replace(make_forward_evidence(LOSS), passes=passes))
    assert (cause is None) is (step is None)
    if cause is not None:
        assert (cause.name, cause.sureness) == (CauseName.DTYPE, Sureness.IS)
        assert f"rounded to bf16 after step {step}: " in cause.sentence
        # Once, and not in each step from then on.
        assert ("was cast to that dtype and cast back" in cause.sentence) is (versions[-1][1] is EXACT)
        assert {LOSS, STEPPED, *GRADIENT_QUANTITIES} <= set(cause.explains)
    # Where no number is wrong, nothing has to be explained.
    assert find_rounded_weights(replace(make_forward_evidence(), passes=passes)) is None


def test_without_a_wrong_number_and_a_finer_dtype_no_dtype_is_told() -> None:
    assert find_finer_dtype(make_forward_evidence()) is None
    assert find_finer_dtype(make_forward_evidence(LOSS)) is None
