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


def losses(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    soft_cap: float | None,
    *,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(needs_gradient)
        for tensor in (hidden_NH, weight_VH, bias_V)
    ]
    with torch.enable_grad():
        logits_NV = F.linear(*leaves)  # type: ignore[arg-type]
        logits_NV = logits_NV if soft_cap is None else soft_cap * torch.tanh(logits_NV / soft_cap)
        loss_N = F.cross_entropy(logits_NV.float(), target_N, reduction="none")
        total = loss_N.sum()
    given = [leaf for leaf in leaves if leaf is not None]
    gradients = iter(torch.autograd.grad(total, given) if needs_gradient else [None] * len(given))
    hidden, weight, bias = (None if leaf is None else next(gradients) for leaf in leaves)
    return loss_N.detach(), hidden, weight, bias


@contextmanager
def liger_on_a_cpu() -> Iterator[None]:
    exchanged = {
        "actor_init.fused.liger.find_liger_lack": lambda where: None,
        "actor_init.fused.rotary.read_liger_version": lambda: "in torch",
        "actor_init.fused.swiglu.liger_product": product,
        "actor_init.fused.rms_norm.liger_norm": norm,
        "actor_init.fused.rotary.liger_rotary": rotary,
        "actor_init.head.liger_head.compute_liger_losses": losses,
        "replay.resolution.head_choice.find_liger_lack": lambda where: None,
    }
    with ExitStack() as stack:
        for name, other in exchanged.items():
            stack.enter_context(patch(name, other))
        yield
