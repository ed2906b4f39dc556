"""Gradients are clipped as torch's functions clip them, on one mesh or several."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from actor_init.schedule_and_norm import Clipping, clip_gradients

CASES: dict[str, tuple[list[Clipping], Callable[[list[nn.Parameter]], object]]] = {
    "by value": ([Clipping(order=None, limit=0.1)], lambda values: nn.utils.clip_grad_value_(values, 0.1)),
    "by the largest": (
        [Clipping(order=math.inf, limit=0.5)],
        lambda values: nn.utils.clip_grad_norm_(values, 0.5, norm_type=math.inf),
    ),
    "by the sum": (
        [Clipping(order=1.0, limit=2.0)],
        lambda values: nn.utils.clip_grad_norm_(values, 2.0, norm_type=1.0),
    ),
    "by value, then by norm": (
        [Clipping(order=None, limit=0.1), Clipping(order=2.0, limit=0.3)],
        lambda values: (nn.utils.clip_grad_value_(values, 0.1), nn.utils.clip_grad_norm_(values, 0.3)),
    ),
    "to a limit that is not reached": (
        [Clipping(order=math.inf, limit=100.0)],
        lambda values: nn.utils.clip_grad_norm_(values, 100.0, norm_type=math.inf),
    ),
}


def make_parameters() -> list[nn.Parameter]:
    """Parameters with gradients, and one that no pass reached."""
    generator = torch.Generator().manual_seed(0)
    values = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 8), (8,), (3, 3), (2,))]
    for value in values[:-1]:
        value.grad = torch.randn(value.shape, generator=generator)
    return values


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_clipped_as_torch_does(case: str, num_groups: int) -> None:
    clippings, clip = CASES[case]
    values, expected = make_parameters(), make_parameters()
    clip(expected)
    # The last of three has no gradient.
    groups = {1: [values], 2: [values[:1], values[1:]], 3: [values[:1], values[1:3], values[3:]]}
    clip_gradients(groups[num_groups], clippings)
    for value, other in zip(values, expected, strict=True):
        assert (value.grad is None) is (other.grad is None)
        if value.grad is not None and other.grad is not None:
            # The norm of several groups is of their norms, which are rounded once more.
            torch.testing.assert_close(value.grad, other.grad, rtol=1e-6, atol=0.0)
