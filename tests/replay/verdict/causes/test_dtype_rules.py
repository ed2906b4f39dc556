"""Gradients and weights that went through a 16-bit dtype."""

import pytest
import torch

from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.dtype_rules import SUMMED, find_half_dtype
from replay.verdict.causes.table import find_causes
from tests.replay.verdict.causes.made_evidence import NAMES, draw_gradients, make_gradient_evidence, make_window

pytestmark = pytest.mark.quick

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


def test_gradients_that_were_rounded_are_told_from_changed_ones() -> None:
    rounded = {name: torch.tensor(values).bfloat16().tolist() for name, values in SOUND.items()}
    cause = find_causes(make_gradient_evidence(make_window([rounded], SOUND)))[0]
    assert (cause.name, cause.sureness) == (CauseName.DTYPE, Sureness.IS)
    assert "rounded to bf16" in cause.sentence
    # A job of bf16 has such gradients, and so has its replay.
    causes = find_causes(make_gradient_evidence(make_window([rounded], rounded)))
    assert CauseName.DTYPE not in [cause.name for cause in causes]
