"""Run attention in cuDNN, for dense rows, for padded ones and for packed ones.

All go through torch's SDPA, which is told to use cuDNN alone: a packed row in one call a document, and padded rows
moved so that each document begins at 0. cuDNN also has a form for several documents at once. It is not used, since with
torch 2.11 its gradients are wrong (NaN for documents of 700, 5, 36, 1 and 358 tokens), and each call plans it anew.

Shape letters: B rows, S tokens a row, H query heads, K key-value heads, T tokens of a packed row, D head_dim,
N documents.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from actor_init.attention.signature import make_refusal, read_settings
from actor_init.declarations.attention.cudnn import LIMITS
from actor_init.spec import PACKED, Attention, UsageError
from capture.facts import Setting
from capture.file_format.micro_batch import find_padding_between_tokens

BACKEND = SDPBackend.CUDNN_ATTENTION
refuse_what_cudnn_lacks = make_refusal(LIMITS)


def cudnn_dense(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Run cuDNN on rows of one document each, padded on the right or not at all, with transformers' signature.

    query is [B, H, S, D], key and value are [B, K, S, D]. Returns [B, S, H, D]. Tokens see those before them; what a
    padding token sees is of no matter, as no other token sees it. Raises UsageError for what the kernel lacks.
    """
    settings = read_settings(**options)
    refuse_what_cudnn_lacks(settings, query.shape[2], query.shape[3])
    return _attend_causally(query, key, value, settings.scaling).transpose(1, 2).contiguous(), None


def cudnn_padded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Run cuDNN on rows of one document each, with padding on either side, with transformers' attention signature.

    query is [B, H, S, D], key and value are [B, K, S, D]; the mask is [B, S], True for real tokens, which follow each
    other, or None where all are real. Returns [B, S, H, D]. Raises UsageError for what the kernel lacks.
    """
    if attention_mask is None:
        return cudnn_dense(module, query, key, value, None, **options)
    first_B1 = attention_mask.int().argmax(dim=1, keepdim=True)
    index_S = torch.arange(query.shape[2], device=query.device)
    query, key, value = (_rotate_tokens(tensor, 2, index_S + first_B1) for tensor in (query, key, value))
    out_BSHD, _none = cudnn_dense(module, query, key, value, None, **options)
    return _rotate_tokens(out_BSHD, 1, index_S - first_B1), None


def _rotate_tokens(tensor: Tensor, dim: int, index_BS: Tensor) -> Tensor:
    """Return `tensor` with its tokens, in `dim`, taken from `index_BS` of their row; indices wrap around."""
    num_tokens = tensor.shape[dim]
    shape = [1] * tensor.ndim
    shape[0], shape[dim] = len(tensor), num_tokens
    return tensor.gather(dim, (index_BS % num_tokens).view(shape).expand_as(tensor))


def refuse_padding_between_tokens(is_real_BS: Tensor, source: str) -> None:
    """Raise UsageError for a row whose real tokens do not follow each other, which `cudnn_padded` would not see."""
    if bool(find_padding_between_tokens(is_real_BS).any()):
        why = ": a row has padding between its tokens, for which cuDNN's attention has no mask"
        raise UsageError(source, why, f"Try: {Setting('attention', Attention.SDPA)}, or {PACKED}")


def cudnn_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run cuDNN on one packed row, a call a document, with transformers' attention signature.

    query is [1, H, T, D], key and value are [1, K, T, D]. Returns [1, T, H, D]. A compiled block's graph breaks here
    for a row of several documents. Raises UsageError for what the kernel lacks.
    """
    settings = read_settings(**options)
    refuse_what_cudnn_lacks(settings, max_length_q, query.shape[3])
    has_one_document = cu_seq_lens_q.shape[0] == 2
    out = (
        _attend_causally(query, key, value, settings.scaling)
        if has_one_document
        else _attend_each_document(query, key, value, cu_seq_lens_q, settings.scaling)
    )
    return out.transpose(1, 2).contiguous(), None


# The number of calls is that of the documents, which would be a constant of a compiled graph.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_each_document(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scaling: float | None) -> Tensor:
    lengths = _DocumentLengths.read(borders)
    parts = [tensor.split(lengths, dim=2) for tensor in (query, key, value)]
    return torch.cat(
        [_attend_causally(query, key, value, scaling) for query, key, value in zip(*parts, strict=True)], dim=2
    )


class _DocumentLengths:
    """Remember documents' lengths: all layers of a pass read them, and a read waits for the GPU."""

    _lengths_by_borders = WeakTensorKeyDictionary()

    @classmethod
    def read(cls, borders: Tensor) -> list[int]:
        if borders not in cls._lengths_by_borders:
            cls._lengths_by_borders[borders] = borders.diff().tolist()
        lengths: list[int] = cls._lengths_by_borders[borders]
        return lengths


def _attend_causally(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Return [B, H, S, D], in which each token sees those before it."""
    # cuDNN refuses a single token. Such a token sees itself alone, so its output is its value.
    if query.shape[2] < 2:
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    # The argument is a constant: under dynamo a comparison of sizes is a symbol, which SDPA does not take.
    group_options: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    with sdpa_kernel(BACKEND):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, **group_options)


class CudnnBlocks:
    """Run cuDNN as a `zigzag.BlockKernel`.

    It calls the operators below torch's SDPA, as torch's own context parallelism does: SDPA returns no log-sum-exp
    (https://github.com/pytorch/pytorch/issues/110681).
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )
        return out, lse.view(*out.shape[:3], 1)

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.zeros((), dtype=torch.int64, device=query.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            gradient,
            query,
            key,
            value,
            out,
            lse,
            no_dropout,
            no_dropout,
            None,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            is_causal,
            scale=scale,
        )
        return gradients
