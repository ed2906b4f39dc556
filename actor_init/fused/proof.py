"""Compare a fused form with a module's own forward on a few random numbers, in fp32 and in bf16.

What is replaced is shown to be of the form, never assumed from a name. The numbers are small enough for a norm's
epsilon to matter, and no two weights are alike, so that (1 + weight) is not weight.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Relative to the norm of the module's own result. fp32: sums in another order. bf16: the fused form rounds a product
# once where the module rounds its factors first, 2**-8 each time. A form that is not the module's is off by 0.01.
FP32_BOUND = 1e-5
BF16_BOUND = 2**-7
DTYPES = (torch.float32, torch.bfloat16)
TRIED = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, AssertionError, NotImplementedError)


def bound_in(dtype: torch.dtype) -> float:
    """Return the bound in one of DTYPES."""
    return FP32_BOUND if dtype is torch.float32 else BF16_BOUND


def is_equal(
    own: Callable[..., Tensor | Sequence[Tensor]],
    fused: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    bound: float,
) -> bool:
    """Say whether both give the same results and the same gradients of `inputs`. False where one of them raises."""
    try:
        wanted, found = (_with_gradients(form, inputs) for form in (own, fused))
    except TRIED:
        return False
    if [one.shape for one in wanted] != [one.shape for one in found]:
        return False
    apart = [(f.float() - w.float()).norm() / w.float().norm() for w, f in zip(wanted, found, strict=True)]
    return bool(torch.stack(apart).max() <= bound)  # false for nan


def _with_gradients(form: Callable[..., Tensor | Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        made = form(*leaves)
        results = [made] if isinstance(made, Tensor) else list(made)
        upstream = [_ramp(result) for result in results]
        gradients = torch.autograd.grad(results, leaves, upstream)
    return [*(result.detach() for result in results), *gradients]


def _ramp(like: Tensor) -> Tensor:
    """Return different numbers of either sign in the shape of `like`."""
    return torch.linspace(-1, 1.5, like.numel(), device=like.device).view(like.shape).to(like.dtype)


def random_numbers(*shape: int, where: torch.device, seed: int = 0) -> Tensor:
    """Return fp32 numbers of the normal distribution on `where`, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(where)
