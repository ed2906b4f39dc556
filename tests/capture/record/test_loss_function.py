"""A recording names the function that made a loss, whatever scaled, cast or wrapped it afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capture.record.outputs import describe_loss_function


class _DDPSink(torch.autograd.Function):
    """As DDP's: all outputs of a forward go through it."""

    @staticmethod
    def forward(ctx: Any, wrapper: object, *outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients


def compute_loss(logits_NV: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), torch.zeros(len(logits_NV), dtype=torch.long))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (compute_loss, "NllLossBackward0"),
        (lambda logits: (-compute_loss(logits) / 3).to(torch.bfloat16), "NllLossBackward0"),
        (lambda logits: compute_loss(logits) + 0.01 * logits.square().mean(), "NllLossBackward0"),
        (lambda logits: _DDPSink.apply(None, logits, compute_loss(logits))[1], "NllLossBackward0"),
        (lambda logits: _DDPSink.apply(None, compute_loss(logits), logits)[0], "NllLossBackward0"),
        (lambda logits: torch.compile(compute_loss, backend="aot_eager")(logits), "CompiledFunctionBackward"),
        (lambda logits: torch.compile(compute_loss, backend="aot_eager")(logits) * 2, "CompiledFunctionBackward"),
        (lambda logits: logits.log_softmax(-1)[:, 0].mean(), "SelectBackward0"),
    ],
)
def test_the_function_is_named(make: Callable[[Tensor], Tensor], name: str) -> None:
    logits_NV = torch.randn(4, 6, requires_grad=True) * 1.0
    assert describe_loss_function(make(logits_NV)) == {"loss_function": name}


@pytest.mark.parametrize("loss", [1.5, None, torch.tensor(2.0)])
def test_a_loss_without_a_graph_has_none(loss: object) -> None:
    assert describe_loss_function(loss) == {}
