"""Weights of fp32 that are all numbers of bf16 behind a step: the model was cast, and cast back."""

import random
from dataclasses import replace

import pytest
import torch

from replay.tolerances.job_bounds import STEPPED
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.weight_rules import find_other_update
from tests.replay.lint.recorded import make_pass, make_sample, make_samples
from tests.replay.verdict.causes.made_evidence import draw_gradients, make_gradient_evidence, make_window

NUM_WEIGHTS = 20


@pytest.mark.parametrize(
    ("num_before", "num_behind", "is_found"),
    [
        (0, NUM_WEIGHTS, True),
        (0, NUM_WEIGHTS - 1, False),
        # They were numbers of bf16 before, as where the job holds bf16 weights.
        (NUM_WEIGHTS, NUM_WEIGHTS, False),
        (0, 0, False),
    ],
)
def test_weights_that_become_numbers_of_bf16_were_cast(num_before: int, num_behind: int, is_found: bool) -> None:
    draws = random.Random(0)
    sound = draw_gradients()
    passes = []
    for number, num_rounded in enumerate([num_before, num_behind]):
        values = [float(torch.tensor(draws.gauss(0, 1))) for _ in range(NUM_WEIGHTS)]
        values[:num_rounded] = [float(torch.tensor(value).bfloat16()) for value in values[:num_rounded]]
        samples = [make_sample(f"layers.{place}.weight", value) for place, value in enumerate(values)]
        [compared] = make_window([sound], sound, index=number)
        recorded = make_pass(number=number, weights=make_samples(*samples))
        passes.append(replace(compared, recorded=replace(compared.recorded, samples=recorded.samples)))
    evidence = make_gradient_evidence(passes[:1], names=(STEPPED,))
    cause = find_other_update(replace(evidence, passes=passes))
    assert cause is not None
    assert cause.name is CauseName.WEIGHTS_CHANGED
    assert ("was cast to bf16 and cast back" in cause.sentence) is is_found
    assert (cause.sureness is Sureness.IS) is is_found
