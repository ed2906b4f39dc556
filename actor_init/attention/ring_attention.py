"""Compute ring attention: each rank's queries against the keys and values that the ring's ranks exchange.

Shape letters as in `actor_init.attention.ring`, and H query heads, K key-value heads, D head_dim.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from actor_init.attention.ring import RingSlice
from actor_init.spec import UsageError


def has_ring_flash() -> bool:
    return find_spec("ring_flash_attn") is not None and find_spec("flash_attn") is not None


# collectives, and lengths as ints: a compiled block's graph breaks here
@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_flash_attn(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ring: RingSlice,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run ring-flash-attn on this rank's slice, with transformers' attention signature.

    query is [1, H, L, D], key and value [1, K, L, D]. Returns [1, L, H, D]. Raises UsageError for what it lacks.
    """
    _refuse(softcap=softcap, sinks=s_aux)
    functions = ring_flash_attn_package()
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if ring.is_zigzag:
        out: Tensor = functions.zigzag_ring_flash_attn_func(
            query, key, value, dropout_p=dropout, softmax_scale=scaling, causal=True, group=ring.group
        )
        return out, None
    out = functions.llama3_flash_attn_varlen_func(
        query.squeeze(0),  # indexing would make its gradient a copy into zeros
        key.squeeze(0),
        value.squeeze(0),
        ring.cu_seq_lens_q,
        ring.cu_seq_lens_k,
        ring.max_length_q,
        ring.max_length_k,
        heads_k_stride=ring.head_stride or key.shape[2],
        local_k_slice=slice(ring.first_key, ring.end_key),
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=((sliding_window or 0) - 1, 0),
        group=ring.group,
    )
    return out.unsqueeze(0), None


def ring_flash_attn_package() -> Any:
    """Import the package.

    ring-flash-attn 0.1.8 imports a name that transformers 5.5 dropped:
    https://github.com/zhuzilin/ring-flash-attention/pull/88
    """
    import transformers.modeling_flash_attention_utils as gone

    if not hasattr(gone, "is_flash_attn_greater_or_equal_2_10"):
        gone.is_flash_attn_greater_or_equal_2_10 = True
    import ring_flash_attn

    return ring_flash_attn


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [heads, L, D] of each rank into [heads, T, D], in the ranks' order."""
    whole: Tensor = _GatherFromRing.apply(own.transpose(0, 1), group)
    return whole.transpose(0, 1)


class _GatherFromRing(torch.autograd.Function):
    """Gather [L, ...] of each rank into [T, ...] on all; backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = own.new_empty(own.shape[0] * group.size(), *own.shape[1:])
        dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.group)
        return own, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ring: RingSlice,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run the same exchange in plain torch, for any device: gather a few heads' keys and values, attend with SDPA.

    Shapes and errors are as in `ring_flash_attn`; dropout is not supported either.
    """
    _refuse(softcap=softcap, sinks=s_aux, dropout=dropout)
    visible_LT = _visible_zigzag(ring) if ring.is_zigzag else _visible_llama3(ring, sliding_window)
    group_size = query.shape[1] // key.shape[1]
    outs = []
    head_stride = ring.head_stride or key.shape[1]
    for head in range(0, key.shape[1], head_stride):
        heads = slice(head, head + head_stride)
        keys, values = (_gathered(tensor[0, heads], ring.group) for tensor in (key, value))
        if not ring.is_zigzag:
            keys, values = keys[:, ring.first_key : ring.end_key], values[:, ring.first_key : ring.end_key]
        own = query[0, head * group_size : (head + head_stride) * group_size]
        outs.append(
            F.scaled_dot_product_attention(
                own, keys, values, attn_mask=visible_LT, scale=scaling, enable_gqa=group_size > 1
            )
        )
    return torch.cat(outs).transpose(0, 1).unsqueeze(0).contiguous(), None


def _visible_zigzag(ring: RingSlice) -> Tensor:
    return ring.own_index_L[:, None] >= ring.index_T[None, :]


def _visible_llama3(ring: RingSlice, sliding_window: int | None) -> Tensor:
    """Return which of the keys first_key .. end_key each of this rank's tokens sees: its document's, up to itself."""
    document_q, document_k = (
        torch.repeat_interleave(torch.arange(len(borders) - 1, device=borders.device), borders.diff())
        for borders in (ring.cu_seq_lens_q, ring.cu_seq_lens_k)
    )
    query, key = ring.own_index_L[:, None], torch.arange(ring.first_key, ring.end_key, device=ring.index_T.device)
    visible = (document_q[:, None] == document_k) & (key <= query)
    return visible & (key > query - sliding_window) if sliding_window else visible


def _refuse(**lacking: Any) -> None:
    if given := [name for name, value in lacking.items() if value is not None and value != 0.0]:
        raise UsageError(f"ring attention has no {' and no '.join(given)}, which this model needs. Try: --ring 1")
