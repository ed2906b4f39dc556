"""Slice packed rows for ring attention: each rank of the "ring" axis holds one slice.

There are two ways to slice:

    llama3  Slices are contiguous, and the keys and values of a few heads at a time are gathered from all ranks. It
            serves any packed row.
    zigzag  The row is cut into 2R chunks, of which rank r holds r and 2R-1-r. This balances the work of causal
            attention. It serves rows of one document.

Shape letters: T tokens of the whole row, L = T / R of them on each of the R ranks.
"""

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from actor_init.spec import ParallelSpec, UsageError
from capture.facts import Setting

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RingSlice:
    """One rank's slice of a packed row, and the keys that its queries need.

    head_stride    how many key-value heads llama3 gathers at once; None: all
    index_T        the row's tokens in the order of the ranks that hold them
    local_index_L  this rank's part of index_T
    cu_seq_lens_q  int32, document boundaries among this rank's tokens
    cu_seq_lens_k  int32, boundaries of the same documents among the keys from first_key on
    first_key      in the whole row, where the document of this rank's first token starts
    end_key        in the whole row, where this rank's tokens end

    Two slices are equal if they hold the same tokens. A pickled slice has no group: DeepSpeed's AutoTP sends the
    arguments of the first forward to its peers, to compare them with theirs.
    """

    group: dist.ProcessGroup
    head_stride: int | None
    is_zigzag: bool
    index_T: Tensor
    local_index_L: Tensor
    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int
    first_key: int
    end_key: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RingSlice) and all(
            torch.equal(mine.cpu(), theirs.cpu())
            for mine, theirs in ((self.local_index_L, other.local_index_L), (self.cu_seq_lens_k, other.cu_seq_lens_k))
        )

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def to(self, device: torch.device) -> "RingSlice":
        tensors: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)


def compute_ring_indices(
    cu_seq_lens: Tensor, group: dist.ProcessGroup, *, head_stride: int | None = None, may_zigzag: bool
) -> RingSlice:
    """Compute which tokens of a packed row are this rank's; `slice_for_ring` takes them out of the inputs.

    cu_seq_lens  the row's boundaries, int32 [documents + 1], on the host

    The row's length is rounded up until all ranks hold equally many tokens: the padding extends the last document,
    where no earlier token can see it.
    """
    size, rank = group.size(), group.rank()
    is_zigzag = may_zigzag and len(cu_seq_lens) == 2
    num_chunks = 2 * size if is_zigzag else size
    num_tokens = -(-int(cu_seq_lens[-1]) // num_chunks) * num_chunks
    chunks = torch.arange(num_tokens).chunk(num_chunks)
    if is_zigzag:
        chunks = tuple(chunks[chunk] for other in range(size) for chunk in (other, num_chunks - 1 - other))
    index_T = torch.cat(chunks)
    borders = [*cu_seq_lens[:-1].tolist(), num_tokens]
    start, stop = rank * num_tokens // size, (rank + 1) * num_tokens // size
    documents = [(first, end) for first, end in pairwise(borders) if first < stop and end > start]
    first_key = documents[0][0]
    borders_q = [0, *(min(end, stop) - start for _, end in documents)]
    borders_k = [0, *(min(end, stop) - first_key for _, end in documents)]
    return RingSlice(
        group=group,
        head_stride=head_stride,
        is_zigzag=is_zigzag,
        index_T=index_T,
        local_index_L=index_T.chunk(size)[rank],
        cu_seq_lens_q=torch.tensor(borders_q, dtype=torch.int32),
        cu_seq_lens_k=torch.tensor(borders_k, dtype=torch.int32),
        max_length_q=max(end - first for first, end in pairwise(borders_q)),
        max_length_k=max(end - first for first, end in pairwise(borders_k)),
        first_key=first_key,
        end_key=stop,
    )


def has_sliding_window(text: "PretrainedConfig") -> bool:
    """Does a text model that does not list its layers' types have a sliding window?"""
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True) is not False


def may_zigzag(config: "PretrainedConfig") -> bool:
    """Does the model have no sliding window? Zigzag's chunks do not support one."""
    return getattr(config.get_text_config(), "sliding_window", None) is None


def check_head_stride(config: "PretrainedConfig", parallel: ParallelSpec) -> None:
    """Raise UsageError unless llama3's form can gather that many key-value heads at a time."""
    if parallel.ring_head_stride is None:
        return
    text = config.get_text_config()
    heads = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // parallel.tp
    if heads % parallel.ring_head_stride:
        possible = ", ".join(str(size) for size in range(1, heads + 1) if not heads % size)
        stride, why = Setting("ring_head_stride"), f"does not divide the {heads} key-value heads of a rank"
        raise UsageError(stride.with_value(parallel.ring_head_stride), why, f"Try: {stride} with one of {possible}")


def sum_over_ring(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ring's ranks, each of which computes the same loss from the result.

    A parameter's gradient is the sum over the ring, but the backends average over it as over the data ranks; so
    backward multiplies the gradient by R.
    """
    summed: Tensor = _SumOverRing.apply(tensor, group)
    return summed


class _SumOverRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        from actor_init.parallel.split_linear import all_reduce_copy

        ctx.size = group.size()
        return all_reduce_copy(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.size, None
