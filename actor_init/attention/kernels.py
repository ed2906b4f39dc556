"""Give transformers the kernels that are declared, and those that call cuDNN for rows of one long document."""

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from actor_init.attention.cudnn import cudnn_dense
from actor_init.attention.ring import RingSlice
from actor_init.attention.ring_attention import ring_cudnn
from actor_init.attention.signature import Asked, AttentionFunction, for_packed_rows, window
from actor_init.declarations.attention import KERNELS
from actor_init.declarations.attention.auto import LONG, RING_LONG, RING_WITH_CUDNN, WITH_CUDNN
from actor_init.declarations.attention.cudnn import MAX_HEAD_DIM
from actor_init.declarations.attention.flash import FLASH_ATTN
from actor_init.declarations.attention.varlen import LIMITS

# Run flash-attn 2 on packed rows. Raises UsageError for what its declaration says that it lacks.


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


# Run torch's own attention of documents of any length.


@for_packed_rows(LIMITS)
def torch_varlen_attn(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, asked: Asked) -> Tensor:
    """Run torch.nn.attention.varlen on one packed row. Raises UsageError for what its declaration says it lacks."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 groups queries by their shapes; later releases need an argument for it
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        borders,
        borders,
        longest,
        longest,
        scale=asked.scaling,
        window_size=window(asked),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out


def register() -> None:
    """Give transformers the kernels that it does not have. Calling it again changes nothing."""
    for kernel in KERNELS.values():
        for form in kernel.list_forms():
            if form.function:
                AttentionInterface.register(form.name, _function(form.function))
            if form.mask_function:
                AttentionMaskInterface.register(form.name, _function(form.mask_function))
    for form in WITH_CUDNN.values():
        AttentionInterface.register(form.name, _or_cudnn(_function(form.function)))
    for form in RING_WITH_CUDNN.values():
        AttentionInterface.register(form.name, _ring_or_cudnn(_function(form.function)))


def _function(path: str) -> AttentionFunction:
    """Return the function that a declaration names as "module:function"."""
    module, name = path.split(":")
    function: AttentionFunction = getattr(import_module(module), name)
    return function


@cache  # one object for each kernel, as dynamo guards on it
def _or_cudnn(kernel: AttentionFunction) -> AttentionFunction:
    """Return a kernel for one packed row: cuDNN's where it is one document of LONG tokens or more, else `kernel`."""

    def chosen(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        takes = more["cu_seq_lens_q"].shape[0] == 2 and _is_for_cudnn(query, value, LONG)
        return (cudnn_dense if takes else kernel)(module, query, key, value, attention_mask, **more)

    return chosen


@cache
def _ring_or_cudnn(kernel: AttentionFunction) -> AttentionFunction:
    """Return a kernel for slices: cuDNN's where the row is one document of RING_LONG tokens a rank, else `kernel`."""

    def chosen(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        ring = more["ring"]
        takes = isinstance(ring, RingSlice) and ring.is_zigzag and _is_for_cudnn(query, value, RING_LONG)
        return (ring_cudnn if takes else kernel)(module, query, key, value, attention_mask, **more)

    disabled: AttentionFunction = torch.compiler.disable(chosen)  # as the two are
    return disabled


def _is_for_cudnn(query: Tensor, value: Tensor, long: int) -> bool:
    # a config does not say the heads of latent attention, whose queries are wider than values
    return query.shape[2] >= long and query.shape[3] == value.shape[3] <= MAX_HEAD_DIM
