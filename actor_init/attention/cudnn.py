"""Attention in cuDNN, for dense rows and for packed ones.

Dense rows go through torch's SDPA, told to use cuDNN alone. Packed rows go through the operators behind it, which take
the documents' borders. No public function of torch reaches them with gradients (`torch.nn.attention.varlen` has the
same call, switched off; https://github.com/pytorch/pytorch/pull/141178 has the reason why nested tensors refuse), so
they are an operator of this project here, with a backward and shapes of its own for torch.compile.

Shape letters: B rows, S tokens a row, H query heads, K key-value heads, T tokens of a packed row, D head_dim,
N documents.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from actor_init.spec import UsageError

MAX_HEAD_DIM = 128  # of cuDNN's backward on every device that it has kernels for


def cudnn_dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run cuDNN on rows of one document each, padded on the right or not at all, with transformers' signature.

    query is [B, H, S, D], key and value are [B, K, S, D]. Returns [B, S, H, D]. Tokens see those before them; what a
    padding token sees is of no matter, as no other token sees it. Raises UsageError for what the kernel lacks.
    """
    _refuse(query.shape[2], query.shape[3], dropout=dropout, window=sliding_window, softcap=softcap, sinks=s_aux)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    return out.transpose(1, 2).contiguous(), None


def cudnn_padded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run cuDNN on rows of one document each, with padding on either side, with transformers' attention signature.

    query is [B, H, S, D], key and value are [B, K, S, D]; the mask is [B, S], True for real tokens, which follow each
    other, or None where all are real. Returns [B, S, H, D]. With a mask the rows are one packed row, in which what
    stands before and behind a document are documents too. Raises UsageError for what the kernel lacks.
    """
    refused: dict[str, Any] = {"dropout": dropout, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
    if attention_mask is None:
        return cudnn_dense(module, query, key, value, None, scaling=scaling, **refused)
    rows, heads, num_tokens, head_dim = query.shape
    query, key, value = (one.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for one in (query, key, value))
    packed, _none = cudnn_packed(
        module,
        query,
        key,
        value,
        None,
        cu_seq_lens_q=_borders(attention_mask),
        max_length_q=num_tokens,
        scaling=scaling,
        **refused,
    )
    return packed.view(rows, num_tokens, heads, head_dim), None


def _borders(is_real_BS: Tensor) -> Tensor:
    """Return where the padding before, the document and the padding behind begin in each row, all rows in one."""
    rows, num_tokens = is_real_BS.shape
    real_BS = is_real_BS.int()
    starts_B = torch.arange(rows, device=real_BS.device) * num_tokens
    first_B = real_BS.argmax(dim=1)
    inner_B3 = torch.stack((starts_B, starts_B + first_B, starts_B + first_B + real_BS.sum(dim=1)), dim=1)
    return F.pad(inner_B3.flatten(), (0, 1), value=rows * num_tokens).int()


def refuse_holes(is_real_BS: Tensor, source: str) -> None:
    """Raise UsageError for a row whose real tokens do not follow each other, which `cudnn_padded` would not see."""
    begins_BS = F.pad(is_real_BS.int(), (1, 0)).diff(dim=1) == 1
    if bool((begins_BS.sum(dim=1) > 1).any()):
        raise UsageError(
            f"{source}: a row has padding between its tokens, for which cuDNN's attention has no mask. "
            "Try: --attention sdpa, or --packing"
        )


def cudnn_packed(
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
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run cuDNN on one packed row, with transformers' attention signature.

    query is [1, H, T, D], key and value are [1, K, T, D]. Returns [1, T, H, D]. Raises UsageError for what the kernel
    lacks: dropout, softcap, attention sinks, and a sliding window shorter than the longest document.
    """
    _refuse(max_length_q, query.shape[3], dropout=dropout, window=sliding_window, softcap=softcap, sinks=s_aux)
    out, _stats = _packed(
        query.squeeze(0).transpose(0, 1).contiguous(),
        key.squeeze(0).transpose(0, 1).contiguous(),
        value.squeeze(0).transpose(0, 1).contiguous(),
        cu_seq_lens_q,
        max_length_q,
        query.shape[3] ** -0.5 if scaling is None else scaling,
    )
    return out.unsqueeze(0), None


def _refuse(
    longest: int, head_dim: int, *, dropout: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:
    lacking = [name for name, given in (("dropout", dropout), ("softcap", softcap)) if given]
    lacking += ["attention sinks"] if sinks is not None else []
    if window is not None and window < longest:
        lacking.append(f"sliding window (here {window} of {longest} tokens)")
    if head_dim > MAX_HEAD_DIM:
        lacking.append(f"heads of more than {MAX_HEAD_DIM} (here {head_dim})")
    if lacking:
        raise UsageError(
            f"cuDNN's attention has no {' and no '.join(lacking)}, which this model needs. "
            "Try: --attention flash, or --attention sdpa"
        )


@torch.library.custom_op("micro_replay::cudnn_packed", mutates_args=())
def _packed(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, borders: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [T, H, D], and what the backward needs of the softmax, flattened: its shape is torch's own.

    borders  int32 [N + 1]; documents without tokens are allowed
    """
    out_THD, stats, *_ = torch.ops.aten._cudnn_attention_forward(
        query_THD,
        key_TKD,
        value_TKD,
        None,
        borders,
        borders,
        longest,
        longest,
        True,
        0.0,
        True,
        False,
        scale=scale,
    )
    _Stats.num_dims = stats.dim()
    return out_THD, stats.reshape(-1)


class _Stats:
    """Remembers the shape that this torch gives the softmax's sums: [T, H, 1] in some releases, [H, T] in others."""

    num_dims = 3


@_packed.register_fake
def _packed_shapes(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, borders: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    num_sums = query_THD.shape[0] * query_THD.shape[1]
    return torch.empty_like(query_THD), query_THD.new_empty(num_sums, dtype=torch.float32)


@torch.library.custom_op("micro_replay::cudnn_packed_backward", mutates_args=())
def _packed_backward(
    gradient_THD: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    out_THD: Tensor,
    stats: Tensor,
    borders: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_heads, _ = query_THD.shape
    shape = (num_heads, num_tokens) if _Stats.num_dims == 2 else (num_tokens, num_heads, 1)
    unused = torch.zeros((), dtype=torch.int64, device=query_THD.device)  # the random state of dropout
    query_gradient, key_gradient, value_gradient = torch.ops.aten._cudnn_attention_backward(
        gradient_THD.contiguous(),
        query_THD,
        key_TKD,
        value_TKD,
        out_THD,
        stats.view(shape),
        unused,
        unused,
        None,
        borders,
        borders,
        longest,
        longest,
        0.0,
        True,
        scale=scale,
    )
    return query_gradient, key_gradient, value_gradient


@_packed_backward.register_fake
def _packed_backward_shapes(
    gradient_THD: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    out_THD: Tensor,
    stats: Tensor,
    borders: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query_THD), torch.empty_like(key_TKD), torch.empty_like(value_TKD)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query_THD, key_TKD, value_TKD, borders, longest, scale = inputs
    ctx.save_for_backward(query_THD, key_TKD, value_TKD, *output, borders)
    ctx.longest, ctx.scale = longest, scale


def _gradients(ctx: Any, gradient_THD: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query_THD, key_TKD, value_TKD, out_THD, stats, borders = ctx.saved_tensors
    gradients = _packed_backward(
        gradient_THD, query_THD, key_TKD, value_TKD, out_THD, stats, borders, ctx.longest, ctx.scale
    )
    return (*gradients, None, None, None)


_packed.register_autograd(_gradients, setup_context=_keep)
