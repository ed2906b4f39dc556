"""Slice packed rows for ring attention: each rank of the "ring" axis holds one slice.

There are two ways to slice. llama3: contiguous slices; the keys and values of a few heads at a time are gathered from
all ranks; for any packed row. zigzag: of 2R chunks rank r holds r and 2R-1-r, which balances causal work; for a row of
one document.

Shape letters: T tokens of the whole row, L = T / R of them on each of the R ranks.
"""

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from actor_init.parallel.split_linear import summed_copy
from actor_init.spec import ParallelSpec, UsageError
from capture.facts import Setting


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RingSlice:
    """One rank's slice of a packed row, and the keys that its queries need.

    Two slices are equal if they hold the same tokens. A pickled slice has no group: DeepSpeed's AutoTP sends the
    arguments of the first forward to its peers, to compare them with theirs.
    """

    group: dist.ProcessGroup
    head_stride: int | None  # key-value heads gathered at once (llama3); None: all
    is_zigzag: bool
    index_T: Tensor  # the row's tokens in the order of the ranks that hold them
    own_index_L: Tensor  # this rank's part of index_T
    cu_seq_lens_q: Tensor  # int32, document boundaries among this rank's own tokens
    cu_seq_lens_k: Tensor  # int32, boundaries of the same documents among the keys from first_key on
    max_length_q: int
    max_length_k: int
    first_key: int  # in the whole row: start of the document of this rank's first token
    end_key: int  # end of this rank's own tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RingSlice) and all(
            torch.equal(mine.cpu(), theirs.cpu())
            for mine, theirs in ((self.own_index_L, other.own_index_L), (self.cu_seq_lens_k, other.cu_seq_lens_k))
        )

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def to(self, device: torch.device) -> "RingSlice":
        moved: dict[str, Any] = {
            f.name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


def ring_slice(
    cu_seq_lens: Tensor, group: dist.ProcessGroup, *, head_stride: int | None = None, may_zigzag: bool
) -> RingSlice:
    """Return this rank's slice of a packed row with the boundaries `cu_seq_lens` (int32 [documents + 1], on the host).

    The row's length is rounded up until all ranks hold equally many tokens: the padding extends the last document,
    where no earlier token can see it.
    """
    size, rank = group.size(), group.rank()
    is_zigzag = may_zigzag and len(cu_seq_lens) == 2
    num_chunks = 2 * size if is_zigzag else size
    num_tokens = -(-int(cu_seq_lens[-1]) // num_chunks) * num_chunks
    chunks = torch.arange(num_tokens).chunk(num_chunks)
    if is_zigzag:
        chunks = tuple(chunks[c] for r in range(size) for c in (r, num_chunks - 1 - r))
    index_T = torch.cat(chunks)
    borders = [*cu_seq_lens[:-1].tolist(), num_tokens]
    start, stop = rank * num_tokens // size, (rank + 1) * num_tokens // size
    documents = [(a, b) for a, b in pairwise(borders) if a < stop and b > start]
    first_key = documents[0][0]
    borders_q = [0, *(min(b, stop) - start for _, b in documents)]
    borders_k = [0, *(min(b, stop) - first_key for _, b in documents)]
    return RingSlice(
        group=group,
        head_stride=head_stride,
        is_zigzag=is_zigzag,
        index_T=index_T,
        own_index_L=index_T.chunk(size)[rank],
        cu_seq_lens_q=torch.tensor(borders_q, dtype=torch.int32),
        cu_seq_lens_k=torch.tensor(borders_k, dtype=torch.int32),
        max_length_q=max(b - a for a, b in pairwise(borders_q)),
        max_length_k=max(b - a for a, b in pairwise(borders_k)),
        first_key=first_key,
        end_key=stop,
    )


def may_zigzag(config: PretrainedConfig) -> bool:
    """Does the model have no sliding window? Zigzag's chunks do not support one."""
    return getattr(config.get_text_config(), "sliding_window", None) is None


def check_head_stride(config: PretrainedConfig, parallel: ParallelSpec) -> None:
    """Raise UsageError unless llama3's form can gather that many key-value heads at a time."""
    if parallel.ring_head_stride is None:
        return
    text = config.get_text_config()
    heads = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // parallel.tp
    if heads % parallel.ring_head_stride:
        possible = ", ".join(str(n) for n in range(1, heads + 1) if not heads % n)
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
        ctx.size = group.size()
        return summed_copy(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.size, None
