"""Map kernels to transformers' names, and give it those of this project: flash-attn, cuDNN, torch's varlen."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from actor_init.attention.cudnn import MAX_HEAD_DIM, cudnn_dense, cudnn_packed, cudnn_padded
from actor_init.attention.ring import RingSlice
from actor_init.attention.ring_attention import ring_cudnn, ring_flash_attn, ring_sdpa
from actor_init.attention.signature import Asked, Kernel, for_packed_rows
from actor_init.spec import Attention, UsageError

# Without the words flash and sdpa, for which transformers would look up its own kernel, or ask the class.
FLASH_PACKED = "packed_fa2"
FLASH3_PACKED = "packed_fa3"
FLASH4_PACKED = "packed_fa4"
CUDNN_PACKED = "packed_cudnn"
CUDNN_PADDED = "padded_cudnn"
TORCH_PACKED = "torch_varlen_attn"
FLASH_OR_CUDNN = "packed_fa2_or_cudnn"
FLASH3_OR_CUDNN = "packed_fa3_or_cudnn"
TORCH_OR_CUDNN = "torch_varlen_attn_or_cudnn"
RING_FA2 = "ring_fa2"
RING_SDPA = "ring_gathered"
RING_CUDNN = "ring_cudnn"
RING_FA2_OR_CUDNN = "ring_fa2_or_cudnn"
RING_SDPA_OR_CUDNN = "ring_gathered_or_cudnn"
OWN = "of its own"  # of a model that a user's function builds
PLAIN = (Attention.SDPA.value, Attention.EAGER.value)  # also in fp32, and on every device


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """What transformers calls a kernel for packed rows and for padded ones; None: it has none for them."""

    packed: str
    padded: str | None


# flash-attn's padded forms are transformers' own, which unpad and pad in every layer
NAMES = {
    Attention.CUDNN: Names(packed=CUDNN_PACKED, padded=CUDNN_PADDED),
    Attention.FLASH3: Names(packed=FLASH3_PACKED, padded="flash_attention_3"),
    Attention.FLASH4: Names(packed=FLASH4_PACKED, padded="flash_attention_4"),
    Attention.FLASH: Names(packed=FLASH_PACKED, padded="flash_attention_2"),
    Attention.VARLEN: Names(packed=TORCH_PACKED, padded=None),
    Attention.SDPA: Names(packed="sdpa", padded="sdpa"),
    Attention.EAGER: Names(packed="eager", padded="eager"),
}
# What --attention auto may take for packed rows: a kernel for documents, and cuDNN for a row of one long document.
WITH_CUDNN = {
    Attention.FLASH3: FLASH3_OR_CUDNN,
    Attention.FLASH: FLASH_OR_CUDNN,
    Attention.VARLEN: TORCH_OR_CUDNN,
}
RING_WITH_CUDNN = {RING_FA2: RING_FA2_OR_CUDNN, RING_SDPA: RING_SDPA_OR_CUDNN}
OR_CUDNN = {
    **{both: (NAMES[attention].packed, CUDNN_PACKED) for attention, both in WITH_CUDNN.items()},
    **{both: (name, RING_CUDNN) for name, both in RING_WITH_CUDNN.items()},
}
# cuDNN takes 90 ms for a new length, once. From here on it saves a millisecond a layer and more on an H200: 2.9 of 6.7
# for 8,192 tokens.
LONG = 4096
RING_LONG = 8192  # on each rank: below, merging blocks costs what they save
HALF_PRECISION = {RING_FA2, *OR_CUDNN} | {  # bf16 and fp16 alone
    name for names in NAMES.values() for name in (names.packed, names.padded) if name and name not in PLAIN
}


def described(name: str) -> str:
    """Return a kernel's name for a reader; where each row gets one of two kernels, both names."""
    if name not in OR_CUDNN:
        return name
    others, cudnn = OR_CUDNN[name]
    tokens = f"{RING_LONG:,} tokens a rank" if cudnn == RING_CUDNN else f"{LONG:,} tokens"
    return f"{others}, {cudnn} for rows of one document of {tokens} or more"


def cudnn_calls(name: str, rows: int, num_tokens: int, lengths: Sequence[int]) -> set[tuple[int, int]]:
    """Return rows and tokens of cuDNN's attention calls in a pass under the kernel `name`; cuDNN plans each kind once.

    rows, num_tokens  of what the model is fed on this rank
    lengths           of the documents of a packed row
    """
    if name == CUDNN_PADDED:
        return {(rows, num_tokens)}
    if name == CUDNN_PACKED:
        return {(1, length) for length in lengths if length > 1}
    long = RING_LONG if name in RING_WITH_CUDNN.values() else LONG
    if name in OR_CUDNN and len(lengths) == 1 and num_tokens >= long:
        return {(1, num_tokens)}
    return set()


def register() -> None:
    """Give transformers the kernels of this project. Calling it again changes nothing."""
    for name, kernel in (
        (FLASH_PACKED, flash_attn_varlen),
        (FLASH3_PACKED, flash_attn_3_varlen),
        (FLASH4_PACKED, flash_attn_4_varlen),
        (CUDNN_PACKED, cudnn_packed),
        (CUDNN_PADDED, cudnn_padded),
        (TORCH_PACKED, torch_varlen_attn),
        (FLASH_OR_CUDNN, _or_cudnn(flash_attn_varlen)),
        (FLASH3_OR_CUDNN, _or_cudnn(flash_attn_3_varlen)),
        (TORCH_OR_CUDNN, _or_cudnn(torch_varlen_attn)),
        (RING_FA2, ring_flash_attn),
        (RING_SDPA, ring_sdpa),
        (RING_FA2_OR_CUDNN, _ring_or_cudnn(ring_flash_attn)),
        (RING_SDPA_OR_CUDNN, _ring_or_cudnn(ring_sdpa)),
    ):
        AttentionInterface.register(name, kernel)
    AttentionMaskInterface.register(CUDNN_PADDED, flash_attention_mask)  # [B, S], or None where nothing is padding


def is_installed(attention: Attention) -> bool:
    """Is the package there that brings a kernel? True for torch's own."""
    match attention:
        case Attention.FLASH:
            # flash-attn 4 alone leaves a folder of this name without a module
            found = find_spec("flash_attn")
            return found is not None and found.origin is not None
        case Attention.FLASH3:
            return find_spec("flash_attn_interface") is not None
        case Attention.FLASH4:
            return _has_distribution("flash-attn-4")
        case Attention.CUDNN:
            return bool(torch.backends.cudnn.is_available())
        case _:
            return True


def _has_distribution(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


@cache  # one object for each kernel, as dynamo guards on it
def _or_cudnn(kernel: Kernel) -> Kernel:
    """Return a kernel for one packed row: cuDNN's where it is one document of LONG tokens or more, else `kernel`."""

    def chosen(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        takes = more["cu_seq_lens_q"].shape[0] == 2 and _is_for_cudnn(query, value, LONG)
        return (cudnn_dense if takes else kernel)(module, query, key, value, attention_mask, **more)

    return chosen


@cache
def _ring_or_cudnn(kernel: Kernel) -> Kernel:
    """Return a kernel for slices: cuDNN's where the row is one document of RING_LONG tokens a rank, else `kernel`."""

    def chosen(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        ring = more["ring"]
        takes = isinstance(ring, RingSlice) and ring.is_zigzag and _is_for_cudnn(query, value, RING_LONG)
        return (ring_cudnn if takes else kernel)(module, query, key, value, attention_mask, **more)

    disabled: Kernel = torch.compiler.disable(chosen)  # as the two are
    return disabled


def _is_for_cudnn(query: Tensor, value: Tensor, long: int) -> bool:
    # a config does not say the heads of latent attention, whose queries are wider than values
    return query.shape[2] >= long and query.shape[3] == value.shape[3] <= MAX_HEAD_DIM


@for_packed_rows
def flash_attn_varlen(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, asked: Asked) -> Tensor:
    """Run flash-attn on one packed row.

    It is a shorter path than transformers' own, and compiles once for all layers: transformers' reads `layer_idx`, for
    which dynamo compiles a graph per layer. Raises UsageError for attention sinks (`s_aux`), which the kernel lacks.
    """
    from flash_attn import flash_attn_varlen_func

    if asked.s_aux is not None:
        raise UsageError("flash-attn has no attention sinks, which this model needs. Try: --attention eager")
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
        window_size=_window(asked),
        softcap=asked.softcap or 0.0,
    )
    return out


@for_packed_rows
def flash_attn_3_varlen(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, asked: Asked
) -> Tensor:
    """Run flash-attn 3 on one packed row. Raises UsageError for what the kernel lacks: dropout and attention sinks."""
    from flash_attn_interface import flash_attn_varlen_func

    if asked.dropout or asked.s_aux is not None:
        raise UsageError("flash-attn 3 has no dropout and no attention sinks. Try: --attention eager")
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
        window_size=_window(asked),
        softcap=asked.softcap or 0.0,
    )
    return _first(out)


# it compiles its kernels in Python, which dynamo cannot follow: a compiled block's graph breaks here
@torch.compiler.disable  # type: ignore[untyped-decorator]
@for_packed_rows
def flash_attn_4_varlen(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, asked: Asked
) -> Tensor:
    """Run flash-attn 4 on one packed row.

    Raises UsageError for what the kernel lacks, or is not used for here: dropout and attention sinks.
    """
    from flash_attn.cute import flash_attn_varlen_func

    if asked.dropout or asked.s_aux is not None:
        raise UsageError("flash-attn 4 runs without dropout and attention sinks here. Try: --attention eager")
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


@for_packed_rows
def torch_varlen_attn(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, asked: Asked) -> Tensor:
    """Run torch.nn.attention.varlen on one packed row.

    Raises UsageError for what the kernel lacks: dropout, softcap and attention sinks.
    """
    from torch.nn.attention.varlen import varlen_attn

    if asked.dropout or asked.softcap or asked.s_aux is not None:
        raise UsageError("torch's varlen attention has no dropout, softcap or sinks. Try: --attention eager")
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
        window_size=_window(asked),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out


def _window(asked: Asked) -> tuple[int, int]:
    """Return how many tokens each sees before and after itself; -1: all of them."""
    return (asked.sliding_window or 0) - 1, 0
