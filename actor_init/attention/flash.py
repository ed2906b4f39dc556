"""Run flash-attn 2, 3 and 4 on packed rows. Each raises UsageError for what its declaration says that it lacks."""

from typing import Any

import torch
from torch import Tensor

from actor_init.attention.signature import Asked, for_packed_rows, window
from actor_init.declarations.attention.flash import FLASH_ATTN, FLASH_ATTN_3, FLASH_ATTN_4


@for_packed_rows(FLASH_ATTN)
def flash_attn_varlen(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, asked: Asked) -> Tensor:
    """Run flash-attn on one packed row.

    It is a shorter path than transformers' own, and compiles once for all layers: transformers' reads `layer_idx`, for
    which dynamo compiles a graph per layer.
    """
    from flash_attn import flash_attn_varlen_func

    out: Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        borders,
        borders,
        longest,
        longest,
        dropout_p=asked.dropout,
        softmax_scale=asked.scaling,
        causal=True,
        window_size=window(asked),
        softcap=asked.softcap or 0.0,
    )
    return out


@for_packed_rows(FLASH_ATTN_3)
def flash_attn_3_varlen(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, asked: Asked
) -> Tensor:
    """Run flash-attn 3 on one packed row."""
    from flash_attn_interface import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        query,
        key,
        value,
        borders,
        borders,
        longest,
        longest,
        softmax_scale=asked.scaling,
        causal=True,
        window_size=window(asked),
        softcap=asked.softcap or 0.0,
    )
    return _first(out)


# it compiles its kernels in Python, which dynamo cannot follow: a compiled block's graph breaks here
@torch.compiler.disable  # type: ignore[untyped-decorator]
@for_packed_rows(FLASH_ATTN_4)
def flash_attn_4_varlen(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, asked: Asked
) -> Tensor:
    """Run flash-attn 4 on one packed row."""
    from flash_attn.cute import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=borders,
        cu_seqlens_k=borders,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=asked.scaling,
        causal=True,
        window_size=(asked.sliding_window - 1, 0) if asked.sliding_window else (None, None),
        softcap=asked.softcap or 0.0,
    )
    return _first(out)


def _first(out: Any) -> Tensor:
    """Return the output alone; some releases give the softmax's sums beside it."""
    whole: Tensor = out[0] if isinstance(out, tuple) else out
    return whole
