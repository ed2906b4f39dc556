"""Compute ring attention: each rank's queries against the keys and values that the ring's ranks exchange.

Shape letters as in `actor_init.attention.ring`, and H query heads, K key-value heads, D head_dim.
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
from actor_init.attention.ring import RingSlice
from actor_init.attention.signature import Asked, AttentionFunction, asked_of, named_like, refuser, window
from actor_init.attention.zigzag import zigzag_attention
from actor_init.declarations.attention.flash import RING_FLASH_ATTN
from actor_init.declarations.attention.plain import GATHERED
from actor_init.spec import UsageError
from capture.facts import Setting

POSITIONS = {"position_ids", "cache_position"}  # given along, and no part of the scores
_refuse_what_ring_flash_attn_lacks = refuser(RING_FLASH_ATTN)
_refuse_what_gathering_lacks = refuser(GATHERED)


class EachAlone:
    """Takes a slice's place so that each token sees itself alone, and notes what a model gives its kernel.

    No dataclass: FSDP2 copies these among a forward's arguments, and the notes would go to the copy.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_windowed = 0
        self.given: set[str] = set()  # what changes scores, and the ring kernels do not take
        self.has_dropout = False

    def __eq__(self, other: object) -> bool:
        """Count as the same argument on every tp peer: DeepSpeed compares what they are given."""
        return isinstance(other, EachAlone)

    __hash__ = None  # type: ignore[assignment]

    def attend(self, query: Tensor, value: Tensor, mask: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, None]:
        self.num_calls += 1
        self.num_windowed += bool(asked_of(**more).sliding_window)
        self.has_dropout |= bool(asked_of(**more).dropout)
        if mask is not None:
            self.given.add("a mask of its own")
        self.given |= {name for name, one in more.items() if isinstance(one, Tensor)} - POSITIONS - {*Asked._fields}
        heads = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return heads.transpose(1, 2).contiguous(), None


def _for_slices(attend: Callable[[Tensor, Tensor, Tensor, RingSlice, Asked], Tensor]) -> AttentionFunction:
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
        ring: RingSlice | EachAlone,
        **more: Any,
    ) -> tuple[Tensor, None]:
        if isinstance(ring, EachAlone):
            return ring.attend(query, value, attention_mask, more)
        return attend(query, key, value, ring, asked_of(**more)), None

    # collectives, and lengths as ints: a compiled block's graph breaks here
    disabled: AttentionFunction = torch.compiler.disable(named_like(kernel, attend))
    return disabled


@_for_slices
def ring_flash_attn(query: Tensor, key: Tensor, value: Tensor, ring: RingSlice, asked: Asked) -> Tensor:
    """Run ring-flash-attn on this rank's slice. Raises UsageError for what it lacks."""
    _refuse_what_ring_flash_attn_lacks(asked, 0, 0)
    functions = ring_flash_attn_package()
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if ring.is_zigzag:
        out: Tensor = functions.zigzag_ring_flash_attn_func(
            query, key, value, dropout_p=asked.dropout, softmax_scale=asked.scaling, causal=True, group=ring.group
        )
        return out
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
        dropout_p=asked.dropout,
        softmax_scale=asked.scaling,
        causal=True,
        window_size=window(asked),
        group=ring.group,
    )
    return out.unsqueeze(0)


@_for_slices
def ring_cudnn(query: Tensor, key: Tensor, value: Tensor, ring: RingSlice, asked: Asked) -> Tensor:
    """Run cuDNN on this rank's slice of a row of one document. Raises UsageError for what the kernel lacks."""
    refuse_what_cudnn_lacks(asked, ring.end_key, query.shape[3])
    return zigzag_attention(query, key, value, ring, asked.scaling, CudnnBlocks())


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


@_for_slices
def ring_sdpa(query: Tensor, key: Tensor, value: Tensor, ring: RingSlice, asked: Asked) -> Tensor:
    """Run ring attention in plain torch, for any device: gather a few heads' keys and values, attend with SDPA.

    Scores with softcap or sinks are computed in full, as SDPA cannot. Raises UsageError for dropout.
    """
    _refuse_what_gathering_lacks(asked, 0, 0)
    visible_LT = _visible_zigzag(ring) if ring.is_zigzag else _visible_llama3(ring, asked.sliding_window)
    group_size = query.shape[1] // key.shape[1]
    outs = []
    head_stride = ring.head_stride or key.shape[1]
    for head in range(0, key.shape[1], head_stride):
        heads = slice(head, head + head_stride)
        keys, values = (_gathered(tensor[0, heads], ring.group) for tensor in (key, value))
        if not ring.is_zigzag:
            keys, values = keys[:, ring.first_key : ring.end_key], values[:, ring.first_key : ring.end_key]
        own_heads = slice(head * group_size, (head + head_stride) * group_size)
        own = query[0, own_heads]
        if asked.softcap or asked.s_aux is not None:
            own_sinks = None if asked.s_aux is None else asked.s_aux[own_heads]
            outs.append(_attended(own, keys, values, visible_LT, asked._replace(s_aux=own_sinks)))
        else:
            outs.append(
                F.scaled_dot_product_attention(
                    own, keys, values, attn_mask=visible_LT, scale=asked.scaling, enable_gqa=group_size > 1
                )
            )
    return torch.cat(outs).transpose(0, 1).unsqueeze(0).contiguous()


def _attended(query: Tensor, keys: Tensor, values: Tensor, visible_LT: Tensor, asked: Asked) -> Tensor:
    """Attend as transformers' eager functions do: tanh caps the scores; a head's sink takes part in its softmax."""
    group_size = query.shape[0] // keys.shape[0]
    keys, values = (one.repeat_interleave(group_size, dim=0) for one in (keys, values))
    scores = query @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling)
    if asked.softcap:
        scores = asked.softcap * torch.tanh(scores / asked.softcap)
    scores = scores.masked_fill(~visible_LT, torch.finfo(scores.dtype).min)
    if asked.s_aux is not None:
        sinks = asked.s_aux[:, None, None].expand(-1, scores.shape[1], 1).to(scores.dtype)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : keys.shape[1]] @ values


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


# Prove that a model can be cut into slices: its tokens meet in the attention kernel and nowhere else.
#
# Ring attention exchanges keys and values. What else carries from one token to another (a convolution, a recurrent
# state, a mask of the model's own) would stop at the border of a slice, and the loss would be wrong but plausible. So,
# once the actor is open, a few tokens go through it with a kernel that lets each see itself alone: then no token may
# change another's logits.

NUM_TOKENS = 16
# of what the changed token's own logits move: roundoff of a mixture whose experts get other batches
BOUNDS = {torch.float32: 1e-4}
COARSE_BOUND = 2e-2
UNKNOWN_WAYS_TO_FAIL = (TypeError, KeyError, ValueError, IndexError, AttributeError, NotImplementedError, RuntimeError)


def check_ring(model: Callable[..., Any], config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UsageError unless tokens of `model`, opened with a ring kernel, meet in that kernel alone.

    All ranks must call this. It takes two forwards of 16 tokens, without gradients.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    if "chunked_attention" in kinds:
        _refuse(config, "its chunked attention has no ring kernel")
    alone = EachAlone()
    ids_L = torch.arange(NUM_TOKENS, device=device) % text.vocab_size
    changed_L = ids_L.clone()
    changed_L[0] = text.vocab_size - 1
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            before_LV, after_LV = (_logits(model, ids, alone) for ids in (ids_L, changed_L))
    except (UsageError, torch.OutOfMemoryError, dist.DistError):
        raise
    except UNKNOWN_WAYS_TO_FAIL as error:
        reason = (str(error).splitlines() or [""])[0][:120]
        if "argument: 'ring'" in reason:
            _refuse(config, "its layers do not tell their attention of the slice")
        _refuse(config, f"its layers cannot run on a slice ({type(error).__name__}: {reason})")
    moved_L = (before_LV - after_LV).abs().amax(dim=-1)
    if bool(moved_L[1:].max() > BOUNDS.get(dtype, COARSE_BOUND) * moved_L[0]):
        _refuse(config, "its tokens meet outside of the attention that a ring kernel replaces, as in a recurrent state")
    if not alone.num_calls:
        _refuse(config, "its layers have no attention that can be replaced")
    if alone.given:
        _refuse(config, f"its attention needs {' and '.join(sorted(alone.given))}, which no ring kernel takes")
    is_windowed = any("sliding" in kind for kind in kinds) if kinds else _has_window(text)
    if is_windowed and not alone.num_windowed:
        _refuse(config, "its sliding window is in a mask of its own, which no ring kernel takes")


def _has_window(text: PretrainedConfig) -> bool:
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True) is not False


def _logits(model: Callable[..., Any], ids_L: Tensor, alone: EachAlone) -> Tensor:
    positions_L = torch.arange(NUM_TOKENS, device=ids_L.device)
    given: dict[str, Any] = {"input_ids": ids_L[None], "position_ids": positions_L[None], "attention_mask": None}
    logits = model(**given, use_cache=False, ring=alone).logits
    logits = logits.to_local() if isinstance(logits, DTensor) else logits
    whole: Tensor = logits[0].float()
    return whole


def _refuse(config: PretrainedConfig, why: str) -> None:
    ring = Setting("ring")
    raise UsageError(ring, f"cannot slice a {config.model_type}: {why}", f"Try: {ring.with_value(1)}")
