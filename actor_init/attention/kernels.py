"""Give transformers the kernels that are declared, and those that call cuDNN for rows of one long document.

The kernels of flash-attn and of torch's varlen attention stand here; they are declared in
`actor_init.declarations.attention`, which names them by a string. Each raises UsageError for what its declaration says
that it lacks.
"""

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from actor_init.attention.cudnn import cudnn_dense
from actor_init.attention.ring_attention import ring_cudnn
from actor_init.attention.ring_split import RingSlice
from actor_init.attention.signature import (
    AttentionFunction,
    AttentionSettings,
    compute_window_size,
    kernel_for_packed_rows,
)
from actor_init.declarations.attention import KERNELS
from actor_init.declarations.attention.cudnn import MAX_HEAD_DIM
from actor_init.declarations.attention.flash import FLASH_ATTN
from actor_init.declarations.attention.kernel_order import LONG, RING_LONG, RING_WITH_CUDNN, WITH_CUDNN
from actor_init.declarations.attention.varlen import LIMITS


@kernel_for_packed_rows(FLASH_ATTN)
def flash_attn_varlen(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, settings: AttentionSettings
) -> Tensor:
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
        dropout_p=settings.dropout,
        softmax_scale=settings.scaling,
        causal=True,
        window_size=compute_window_size(settings),
        softcap=settings.softcap or 0.0,
    )
    return out


@kernel_for_packed_rows(LIMITS)
def torch_varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, settings: AttentionSettings
) -> Tensor:
    """Run torch.nn.attention.varlen on one packed row. Raises UsageError for what its declaration says it lacks."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 sees from the shapes that queries are group_options; later releases need an argument for it.
    group_options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        borders,
        borders,
        longest,
        longest,
        scale=settings.scaling,
        window_size=compute_window_size(settings),
        **group_options,
    )
    assert isinstance(out, Tensor)
    return out


def register() -> None:
    """Give transformers the kernels that it does not have. Calling it again changes nothing."""
    for kernel in KERNELS.values():
        for form in kernel.list_forms():
            if form.function:
                AttentionInterface.register(form.name, _import_function(form.function))
            if form.mask_function:
                AttentionMaskInterface.register(form.name, _import_function(form.mask_function))
    for form in WITH_CUDNN.values():
        AttentionInterface.register(form.name, wrap_with_cudnn(_import_function(form.function)))
    for form in RING_WITH_CUDNN.values():
        AttentionInterface.register(form.name, wrap_ring_with_cudnn(_import_function(form.function)))


def _import_function(path: str) -> AttentionFunction:
    """Import the function that a declaration names as "module:function"."""
    module, name = path.split(":")
    function: AttentionFunction = getattr(import_module(module), name)
    return function


# The cache is there because dynamo guards on the function's identity: a new object would compile every block again.
@cache
def wrap_with_cudnn(
    kernel: AttentionFunction, *, dense: AttentionFunction = cudnn_dense, min_length: int = LONG
) -> AttentionFunction:
    """Make a kernel for one packed row: `dense`, cuDNN's, where it is one document of `min_length` tokens or more.

    Any other row is for `kernel`.
    """

    def dispatch(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        uses_cudnn = options["cu_seq_lens_q"].shape[0] == 2 and _is_for_cudnn(query, value, min_length)
        return (dense if uses_cudnn else kernel)(module, query, key, value, attention_mask, **options)

    return dispatch


@cache
def wrap_ring_with_cudnn(kernel: AttentionFunction, *, blocks: AttentionFunction = ring_cudnn) -> AttentionFunction:
    """Make a kernel for slices: `blocks`, cuDNN's, where the row is one document of RING_LONG tokens a rank.

    Any other row is for `kernel`.
    """

    def dispatch(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        ring = options["ring"]
        uses_cudnn = isinstance(ring, RingSlice) and ring.is_zigzag and _is_for_cudnn(query, value, RING_LONG)
        return (blocks if uses_cudnn else kernel)(module, query, key, value, attention_mask, **options)

    # Both kernels that it chooses from are disabled for the compiler, too.
    disabled: AttentionFunction = torch.compiler.disable(dispatch)
    return disabled


def _is_for_cudnn(query: Tensor, value: Tensor, min_length: int) -> bool:
    # The sizes of heads are compared in the call since a config does not say those of latent attention, whose queries
    # are wider than its values.
    return query.shape[2] >= min_length and query.shape[3] == value.shape[3] <= MAX_HEAD_DIM
