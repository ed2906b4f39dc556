"""What Liger's kernels compute, in plain torch: so what is fused, and how, is tested where no Triton runs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


def product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + weight.float())).to(x.dtype)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    return turned(q), turned(k)


@contextmanager
def liger_on_a_cpu() -> Iterator[None]:
    exchanged = {
        "liger.find_liger_lack": lambda where: None,
        "rotary.read_liger_version": lambda: "in torch",
        "swiglu.liger_product": product,
        "rms_norm.liger_norm": norm,
        "rotary.liger_rotary": rotary,
    }
    with ExitStack() as stack:
        for name, other in exchanged.items():
            stack.enter_context(patch(f"actor_init.fused.{name}", other))
        yield
