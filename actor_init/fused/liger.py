"""Call Liger's Triton kernels; https://github.com/linkedin/Liger-Kernel."""

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from actor_init.spec import Kernels, UsageError
from capture.facts import Setting


def lack_of_liger(where: torch.device) -> str | None:
    """Return why Liger's kernels cannot run on `where`, as a predicate; None if they can."""
    if where.type != "cuda":
        return "has no CPU kernels"
    if find_spec("liger_kernel") is None or find_spec("triton") is None:
        return "is not installed (pip install liger-kernel)"
    return None


def check_liger(kernels: Kernels, where: torch.device) -> None:
    """Raise UsageError for --kernels fused where Liger's kernels cannot run."""
    if kernels is Kernels.FUSED and (lack := lack_of_liger(where)):
        fused = Setting("kernels", Kernels.FUSED)
        raise UsageError(fused, f"is Liger's, which {lack}", f"Try: {fused.of(Kernels.MODEL)}")


def liger_version() -> str:
    return version("liger-kernel")


@cache
def _operators() -> tuple[Any, Any, Any]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction, LigerRopeFunction, LigerRMSNormFunction


def liger_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. Its backward writes over gate and up."""
    product: Tensor = _operators()[0].apply(gate, up)
    return product


def liger_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of `x` times 1 + weight, in fp32 until its end."""
    normed: Tensor = _operators()[2].apply(x, weight, eps, 1.0, "gemma", False)
    return normed


def liger_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn q and k [B, heads, S, D] by cos and sin [B or 1, S, D]. It may write over q and k."""
    turned: tuple[Tensor, Tensor] = _operators()[1].apply(q, k, cos, sin)
    return turned
