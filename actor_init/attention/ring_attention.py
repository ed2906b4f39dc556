"""Compute ring attention: each rank's queries against the keys and values that the ring's ranks exchange.

Shape letters as in `actor_init.attention.ring_split`, and H query heads, K key-value heads, D head_dim.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from actor_init.attention.cudnn import CudnnBlocks, refuse_what_cudnn_lacks
from actor_init.attention.ring_split import RingSlice, has_sliding_window
from actor_init.attention.signature import (
    AttentionFunction,
    AttentionSettings,
    compute_window_size,
    copy_name,
    make_refusal,
    read_settings,
)
from actor_init.attention.zigzag import zigzag_attention
from actor_init.declarations.attention.flash import RING_FLASH_ATTN
from actor_init.declarations.attention.plain import GATHERED
from actor_init.spec import UsageError
from capture.facts import Setting

# Arguments that a model gives its kernel beside the mask, and that are no part of the scores.
POSITIONS = {"position_ids", "cache_position"}
_refuse_what_ring_flash_attn_lacks = make_refusal(RING_FLASH_ATTN)
_refuse_what_gathering_lacks = make_refusal(GATHERED)


class IsolatingSlice:
    """Take a slice's place so that each token sees itself alone, and note what a model gives its kernel.

    It is no dataclass because FSDP2 copies dataclasses among a forward's arguments, and the notes would go to the copy.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_windowed = 0
        # What changes scores, and no ring kernel takes.
        self.unsupported: set[str] = set()
        self.has_dropout = False

    def __eq__(self, other: object) -> bool:
        """Are both of this class? Equal ones count as the same argument on every tp peer: DeepSpeed compares them."""
        return isinstance(other, IsolatingSlice)

    __hash__ = None  # type: ignore[assignment]

    def attend(
        self, query: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> tuple[Tensor, None]:
        self.num_calls += 1
        self.num_windowed += bool(read_settings(**options).sliding_window)
        self.has_dropout |= bool(read_settings(**options).dropout)
        if mask is not None:
            self.unsupported.add("a mask of its own")
        self.unsupported |= (
            {name for name, value in options.items() if isinstance(value, Tensor)}
            - POSITIONS
            - {*AttentionSettings._fields}
        )
        heads = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return heads.transpose(1, 2).contiguous(), None


def _kernel_for_slices(
    attend: Callable[[Tensor, Tensor, Tensor, RingSlice, AttentionSettings], Tensor],
) -> AttentionFunction:
    """Give `attend` transformers' attention signature, which makes it a kernel for slices.

    Both take query [1, H, L, D], key and value [1, K, L, D], and return [1, L, H, D].
    """

    def kernel(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        ring: RingSlice | IsolatingSlice,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if isinstance(ring, IsolatingSlice):
            return ring.attend(query, value, attention_mask, options)
        return attend(query, key, value, ring, read_settings(**options)), None

    # A compiled block's graph breaks at this kernel, as it holds collectives, and lengths as Python integers.
    disabled: AttentionFunction = torch.compiler.disable(copy_name(kernel, attend))
    return disabled


@_kernel_for_slices
def ring_flash_attn(query: Tensor, key: Tensor, value: Tensor, ring: RingSlice, settings: AttentionSettings) -> Tensor:
    """Run ring-flash-attn on this rank's slice. Raises UsageError for what it lacks."""
    _refuse_what_ring_flash_attn_lacks(settings, 0, 0)
    functions = import_ring_flash_attn()
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if ring.is_zigzag:
        out: Tensor = functions.zigzag_ring_flash_attn_func(
            query, key, value, dropout_p=settings.dropout, softmax_scale=settings.scaling, causal=True, group=ring.group
        )
        return out
    out = functions.llama3_flash_attn_varlen_func(
        # Not query[0]: the gradient of indexing is a copy into zeros.
        query.squeeze(0),
        key.squeeze(0),
        value.squeeze(0),
        ring.cu_seq_lens_q,
        ring.cu_seq_lens_k,
        ring.max_length_q,
        ring.max_length_k,
        heads_k_stride=ring.head_stride or key.shape[2],
        local_k_slice=slice(ring.first_key, ring.end_key),
        dropout_p=settings.dropout,
        softmax_scale=settings.scaling,
        causal=True,
        window_size=compute_window_size(settings),
        group=ring.group,
    )
    return out.unsqueeze(0)


@_kernel_for_slices
def ring_cudnn(query: Tensor, key: Tensor, value: Tensor, ring: RingSlice, settings: AttentionSettings) -> Tensor:
    """Run cuDNN on this rank's slice of a row of one document. Raises UsageError for what the kernel lacks."""
    refuse_what_cudnn_lacks(settings, ring.end_key, query.shape[3])
    return zigzag_attention(query, key, value, ring, settings.scaling, CudnnBlocks())


def import_ring_flash_attn() -> Any:
    """Import ring-flash-attn.

    ring-flash-attn 0.1.8 imports a name that transformers 5.5 dropped:
    https://github.com/zhuzilin/ring-flash-attention/pull/88
    """
    import transformers.modeling_flash_attention_utils as flash_attention_utils

    if not hasattr(flash_attention_utils, "is_flash_attn_greater_or_equal_2_10"):
        flash_attention_utils.is_flash_attn_greater_or_equal_2_10 = True
    import ring_flash_attn

    return ring_flash_attn


def _gather_from_ring(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [heads, L, D] of each rank into [heads, T, D], in the ranks' order."""
    whole: Tensor = _GatherFromRing.apply(local.transpose(0, 1), group)
    return whole.transpose(0, 1)


class _GatherFromRing(torch.autograd.Function):
    """Gather [L, ...] of each rank into [T, ...] on all; backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = local.new_empty(local.shape[0] * group.size(), *local.shape[1:])
        dist.all_gather_into_tensor(whole, local.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        local = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local, None


@_kernel_for_slices
def ring_sdpa(query: Tensor, key: Tensor, value: Tensor, ring: RingSlice, settings: AttentionSettings) -> Tensor:
    """Run ring attention in plain torch, for any device: gather a few heads' keys and values, attend with SDPA.

    Scores with softcap or sinks are computed in full, as SDPA cannot. Raises UsageError for dropout.
    """
    _refuse_what_gathering_lacks(settings, 0, 0)
    visible_LT = compute_zigzag_mask(ring) if ring.is_zigzag else compute_llama3_mask(ring, settings.sliding_window)
    group_size = query.shape[1] // key.shape[1]
    outs = []
    head_stride = ring.head_stride or key.shape[1]
    for head in range(0, key.shape[1], head_stride):
        heads = slice(head, head + head_stride)
        keys, values = (_gather_from_ring(tensor[0, heads], ring.group) for tensor in (key, value))
        if not ring.is_zigzag:
            keys, values = keys[:, ring.first_key : ring.end_key], values[:, ring.first_key : ring.end_key]
        query_heads = slice(head * group_size, (head + head_stride) * group_size)
        local_query = query[0, query_heads]
        if settings.softcap or settings.s_aux is not None:
            sinks = None if settings.s_aux is None else settings.s_aux[query_heads]
            outs.append(_attend_in_full(local_query, keys, values, visible_LT, settings._replace(s_aux=sinks)))
        else:
            outs.append(
                F.scaled_dot_product_attention(
                    local_query, keys, values, attn_mask=visible_LT, scale=settings.scaling, enable_gqa=group_size > 1
                )
            )
    return torch.cat(outs).transpose(0, 1).unsqueeze(0).contiguous()


def _attend_in_full(
    query: Tensor, keys: Tensor, values: Tensor, visible_LT: Tensor, settings: AttentionSettings
) -> Tensor:
    """Attend as transformers' eager functions do: tanh caps the scores; a head's sink takes part in its softmax."""
    group_size = query.shape[0] // keys.shape[0]
    keys, values = (tensor.repeat_interleave(group_size, dim=0) for tensor in (keys, values))
    scores = query @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if settings.scaling is None else settings.scaling)
    if settings.softcap:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    scores = scores.masked_fill(~visible_LT, torch.finfo(scores.dtype).min)
    if settings.s_aux is not None:
        sinks = settings.s_aux[:, None, None].expand(-1, scores.shape[1], 1).to(scores.dtype)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : keys.shape[1]] @ values


def compute_zigzag_mask(ring: RingSlice) -> Tensor:
    return ring.local_index_L[:, None] >= ring.index_T[None, :]


def compute_llama3_mask(ring: RingSlice, sliding_window: int | None) -> Tensor:
    """Compute which of the keys first_key .. end_key each of this rank's tokens sees: its document's, up to itself."""
    document_q, document_k = (
        torch.repeat_interleave(torch.arange(len(borders) - 1, device=borders.device), borders.diff())
        for borders in (ring.cu_seq_lens_q, ring.cu_seq_lens_k)
    )
    query, key = ring.local_index_L[:, None], torch.arange(ring.first_key, ring.end_key, device=ring.index_T.device)
    visible = (document_q[:, None] == document_k) & (key <= query)
    return visible & (key > query - sliding_window) if sliding_window else visible


# `check_ring` proves that a model can be cut into slices: its tokens meet in the attention kernel and nowhere else.
#
# Ring attention exchanges keys and values. What else carries from one token to another (a convolution, a recurrent
# state, a mask of the model's own) would stop at the border of a slice, and the loss would be wrong but plausible. So,
# once the actor is open, a few tokens go through it with a kernel that lets each see itself alone: then no token may
# change another's logits.

NUM_TOKENS = 16
# Relative to how far the changed token's logits move. A mixture's roundoff is less, whose experts get other batches.
BOUNDS = {torch.float32: 1e-4}
COARSE_BOUND = 2e-2
UNFORESEEN_ERRORS = (TypeError, KeyError, ValueError, IndexError, AttributeError, NotImplementedError, RuntimeError)


def check_ring(model: Callable[..., Any], config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UsageError unless tokens of `model`, opened with a ring kernel, meet in that kernel alone.

    All ranks must call this. It takes two forwards of 16 tokens, without gradients.
    """
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or [])
    if "chunked_attention" in layer_types:
        _refuse(config, "its chunked attention has no ring kernel")
    probe = IsolatingSlice()
    ids_L = torch.arange(NUM_TOKENS, device=device) % text.vocab_size
    changed_L = ids_L.clone()
    changed_L[0] = text.vocab_size - 1
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            before_LV, after_LV = (_compute_logits(model, ids, probe) for ids in (ids_L, changed_L))
    except (UsageError, torch.OutOfMemoryError, dist.DistError):
        raise
    except UNFORESEEN_ERRORS as error:
        reason = (str(error).splitlines() or [""])[0][:120]
        if "argument: 'ring'" in reason:
            _refuse(config, "its layers do not tell their attention of the slice")
        _refuse(config, f"its layers cannot run on a slice ({type(error).__name__}: {reason})")
    change_L = (before_LV - after_LV).abs().amax(dim=-1)
    if bool(change_L[1:].max() > BOUNDS.get(dtype, COARSE_BOUND) * change_L[0]):
        _refuse(config, "its tokens meet outside of the attention that a ring kernel replaces, as in a recurrent state")
    if not probe.num_calls:
        _refuse(config, "its layers have no attention that can be replaced")
    if probe.unsupported:
        _refuse(config, f"its attention needs {' and '.join(sorted(probe.unsupported))}, which no ring kernel takes")
    is_windowed = (
        any("sliding" in layer_type for layer_type in layer_types) if layer_types else has_sliding_window(text)
    )
    if is_windowed and not probe.num_windowed:
        _refuse(config, "its sliding window is in a mask of its own, which no ring kernel takes")


def _compute_logits(model: Callable[..., Any], ids_L: Tensor, probe: IsolatingSlice) -> Tensor:
    positions_L = torch.arange(NUM_TOKENS, device=ids_L.device)
    arguments: dict[str, Any] = {"input_ids": ids_L[None], "position_ids": positions_L[None], "attention_mask": None}
    logits = model(**arguments, use_cache=False, ring=probe).logits
    logits = logits.to_local() if isinstance(logits, DTensor) else logits
    whole: Tensor = logits[0].float()
    return whole


def _refuse(config: PretrainedConfig, why: str) -> None:
    ring = Setting("ring")
    raise UsageError(ring, f"cannot slice a {config.model_type}: {why}", f"Try: {ring.with_value(1)}")
