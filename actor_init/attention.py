"""Which attention kernel serves which device, under the names that transformers calls them by."""

from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from actor_init.spec import ActorSpec, Attention, UsageError

VARLEN = "torch_varlen"


def kernel_name(spec: ActorSpec, device: torch.device) -> str:
    """The transformers name of the kernel that `spec.attention` means on `device`, registered where it is ours.

    Raises UsageError if it cannot run there.
    """
    on_cuda = device.type == "cuda"
    has_flash = on_cuda and find_spec("flash_attn") is not None
    match spec.attention:
        case Attention.AUTO:
            if has_flash:
                return "flash_attention_2"
            return _register_varlen() if on_cuda and spec.packing else "sdpa"
        case Attention.FLASH:
            if not has_flash:
                missing = "is not installed" if on_cuda else "has no CPU kernel"
                raise UsageError(
                    f"flash-attn {missing}. Try: --attention sdpa, or: pip install '.[cuda]' on a CUDA machine"
                )
            return "flash_attention_2"
        case Attention.VARLEN:
            if not on_cuda:
                raise UsageError("torch's varlen attention has no CPU kernel. Try: --attention sdpa")
            return _register_varlen()
        case Attention.SDPA | Attention.EAGER:
            return spec.attention.value


def _register_varlen() -> str:
    AttentionInterface.register(VARLEN, varlen_attention)
    return VARLEN


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """torch.nn.attention.varlen behind transformers' attention signature.

    query, key and value are [1, heads, T, head_dim], one packed row of T tokens. Returns [1, T, heads, head_dim].
    Raises UsageError for what the kernel lacks: dropout and softcap.
    """
    from torch.nn.attention.varlen import varlen_attn

    if dropout or softcap:
        raise UsageError("torch's varlen attention has no dropout and no softcap. Try: --attention sdpa or eager")
    # torch 2.11 groups queries as they come; later releases want to be told and have an argument for it
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=((sliding_window or 0) - 1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None
