"""Call Liger's Triton kernels (https://github.com/linkedin/Liger-Kernel), and show that a module computes their form.

A module is replaced only after a trial on a few random numbers in fp32 and in bf16 has shown that it computes the same
as the kernel; that is never assumed from a name.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from actor_init.spec import Kernels, UsageError
from capture.facts import Setting

# Relative to the norm of the module's own result. fp32: sums in another order. bf16: the fused form rounds a product
# once where the module rounds its factors first, 2**-8 each time. A form that is not the module's is off by 0.01.
FP32_BOUND = 1e-5
BF16_BOUND = 2**-7
DTYPES = (torch.float32, torch.bfloat16)
TRIAL_ERRORS = (
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    IndexError,
    KeyError,
    AssertionError,
    NotImplementedError,
)


def find_liger_lack(where: torch.device) -> str | None:
    """Find why Liger's kernels cannot run on `where`, as a predicate; None if they can."""
    if where.type != "cuda":
        return "has no CPU kernels"
    if find_spec("liger_kernel") is None or find_spec("triton") is None:
        return "is not installed (pip install liger-kernel)"
    return None


def check_liger(kernels: Kernels, where: torch.device) -> None:
    """Raise UsageError for --kernels fused where Liger's kernels cannot run."""
    if kernels is Kernels.FUSED and (lack := find_liger_lack(where)):
        fused = Setting("kernels", Kernels.FUSED)
        raise UsageError(fused, f"is Liger's, which {lack}", f"Try: {fused.with_value(Kernels.MODEL)}")


def read_liger_version() -> str:
    return version("liger-kernel")


@cache
def _import_operators() -> tuple[Any, Any, Any]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction, LigerRopeFunction, LigerRMSNormFunction


def liger_product(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up. Its backward writes over gate and up."""
    product: Tensor = _import_operators()[0].apply(gate, up)
    return product


def liger_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the RMSNorm of `values` times 1 + weight, in fp32 until its end."""
    product: Tensor = _import_operators()[2].apply(values, weight, eps, 1.0, "gemma", False)
    return product


def liger_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn q and k [B, heads, S, D] by cos and sin [B or 1, S, D]. It may write over q and k."""
    turned: tuple[Tensor, Tensor] = _import_operators()[1].apply(q, k, cos, sin)
    return turned


def compute_liger_losses(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    soft_cap: float | None,
    *,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the fp32 cross entropy [N] of each token, and the gradients of hidden states, weight and bias if each
    loss has a gradient of 1.

    It calls what Liger's fused linear cross entropy calls for a sum; its own loss of each token computes everything
    once more in backward.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    # Whether gradients are computed is read off the tensors.
    loss_N, *_, hidden_gradient, weight_gradient, bias_gradient = fused_linear_cross_entropy_forward(
        hidden_NH.detach().requires_grad_(needs_gradient),
        weight_VH.detach().requires_grad_(needs_gradient and weight_VH.requires_grad),
        target_N,
        bias=bias_V,
        reduction="none",
        softcap=soft_cap,
    )
    return loss_N, hidden_gradient, weight_gradient, bias_gradient


def choose_bound(dtype: torch.dtype) -> float:
    """Choose the bound for one of DTYPES."""
    return FP32_BOUND if dtype is torch.float32 else BF16_BOUND


def computes_same(
    module_form: Callable[..., Tensor | Sequence[Tensor]],
    fused_form: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    bound: float,
) -> bool:
    """Do both give the same results and the same gradients of `inputs`? No where one of them raises.

    The numbers are small enough for a norm's epsilon to matter, and no two weights are alike, so that (1 + weight) is
    not weight.
    """
    try:
        expected, actual = (_compute_with_gradients(form, inputs) for form in (module_form, fused_form))
    except TRIAL_ERRORS:
        return False
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in actual]:
        return False
    errors = [
        (fused_tensor.float() - module_tensor.float()).norm() / module_tensor.float().norm()
        for module_tensor, fused_tensor in zip(expected, actual, strict=True)
    ]
    # A NaN among the errors makes this False.
    return bool(torch.stack(errors).max() <= bound)


def _compute_with_gradients(form: Callable[..., Tensor | Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        outputs = form(*leaves)
        results = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        upstream = [_make_ramp(result) for result in results]
        gradients = torch.autograd.grad(results, leaves, upstream)
    return [*(result.detach() for result in results), *gradients]


def _make_ramp(like: Tensor) -> Tensor:
    """Make different numbers of either sign in the shape of `like`."""
    return torch.linspace(-1, 1.5, like.numel(), device=like.device).view(like.shape).to(like.dtype)


def make_random_numbers(*shape: int, where: torch.device, seed: int = 0) -> Tensor:
    """Make fp32 numbers of the normal distribution on `where`, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(where)
