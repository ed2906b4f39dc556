"""Check that an attention kernel works here: forward and backward of a tiny packed row, compared with plain fp32.

Shape letters: H query heads, K key-value heads, T tokens, D head_dim.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, device
from transformers import AttentionInterface

from actor_init.attention.kernels import FLASH_PACKED, TORCH_PACKED, kernel_name
from actor_init.spec import ActorSpec

KERNELS = {"sdpa": "sdpa", "flash": FLASH_PACKED, "varlen": TORCH_PACKED}  # option value to transformers' name
# Relative to the reference's norm. bf16 has 8 bits; rounding probabilities and results gives about 0.004 here; a
# mask that is off by one token, or a missed document boundary, gives more than 0.2.
BOUND = 0.02
LENGTHS = (5, 17, 42)
H, K, D = 4, 2, 64


def default_kernel(where: device) -> str:
    """Return the word for the kernel that `--attention auto` selects on device `where`."""
    name = kernel_name(ActorSpec(), where)
    return next(word for word, ours in KERNELS.items() if ours == name)


def error_of(kernel: str, where: device) -> float:
    """Return the largest relative error of the output and the gradients of query, key and value; correct up to BOUND.

    Computed in bf16, on a packed row of three documents, with grouped queries. Raises what the kernel raises.
    """
    kernel_name(ActorSpec(), where)  # registers this project's kernels
    random = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    shapes = [(1, H, num_tokens, D), (1, K, num_tokens, D), (1, K, num_tokens, D), (1, num_tokens, H, D)]
    *inputs, upstream = (torch.randn(shape, generator=random).to(where, torch.bfloat16) for shape in shapes)
    document_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(where)
    visible_TT = (document_T[:, None] == document_T) & torch.ones_like(document_T).expand(num_tokens, -1).tril().bool()
    borders = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(where)
    packed: dict[str, Any] = {"cu_seq_lens_q": borders, "max_length_q": max(LENGTHS)}
    call = AttentionInterface()[KERNELS[kernel]]
    module = SimpleNamespace(num_key_value_groups=H // K, is_causal=True, training=True)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask, more = (visible_TT[None, None], {}) if kernel == "sdpa" else (None, packed)
        out: Tensor = call(module, query, key, value, mask, scaling=D**-0.5, **more)[0]
        return out

    computed = _with_gradients(ours, inputs, upstream)
    wanted = _with_gradients(
        lambda query, key, value: _plain_attention(query, key, value, visible_TT),
        [tensor.float() for tensor in inputs],
        upstream.float(),
    )
    errors = [(f.float() - w).norm() / w.norm() for f, w in zip(computed, wanted, strict=True)]
    return float(torch.stack(errors).max())  # unlike Python's max, torch's keeps a nan


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, visible_TT: Tensor) -> Tensor:
    key, value = (tensor.repeat_interleave(H // K, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * D**-0.5).masked_fill(~visible_TT, float("-inf"))
    out: Tensor = (scores.softmax(-1) @ value).transpose(1, 2)
    return out


def _with_gradients(attention: Any, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
