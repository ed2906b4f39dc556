"""Compute zigzag ring attention with a kernel for dense blocks, such as cuDNN's.

Each rank holds two chunks of one document, r and 2R - 1 - r of 2R. Keys and values are gathered from all ranks; a
chunk's queries see its own keys causally and all keys before it without a mask, and the two results are merged by
their log-sum-exps. Each rank has the same work: 2R - 1 blocks without a mask and two on the diagonal.

In the backward each block's kernel is given the merged output and log-sum-exp, from which it has the probabilities of
the whole row; so the blocks' gradients add up (Liu et al., Ring Attention with Blockwise Transformers, 2023,
arXiv:2310.01889; Dao, FlashAttention-2, 2023, arXiv:2307.08691, section 3.1).

Shape letters: R ranks, C tokens of a chunk, L = 2C of this rank, T = R * L of the row, H query heads, K key-value
heads, D head_dim, 2 the chunks of a rank or the pair of keys and values.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from actor_init.attention.ring import RingSlice


class BlockKernel(Protocol):
    """Attention of a block of queries [B, H, S, D] to a block of keys and values [B, K, T, D]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output [B, H, S, D] and the scores' log-sum-exp [B, H, S, 1] in fp32."""
        ...

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
        """Return the gradients of query, key and value; `out` and `lse` are of all blocks that the queries see."""
        ...


def zigzag_attention(
    query: Tensor, key: Tensor, value: Tensor, ring: RingSlice, scale: float | None, kernel: BlockKernel
) -> Tensor:
    """Return [1, L, H, D] of query [1, H, L, D], key and value [1, K, L, D], which are this rank's two chunks."""
    assert ring.is_zigzag
    out: Tensor = _Zigzag.apply(query, key, value, ring.group, scale, kernel)
    return out


class _Zigzag(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: dist.ProcessGroup,
        scale: float | None,
        kernel: BlockKernel,
    ) -> Tensor:
        row_T2KD, gathering = _gather(key, value, group)
        query_2HCD, key_2KCD, value_2KCD = (_by_chunk(one) for one in (query, key, value))
        out_2HCD, lse_2HC1 = kernel.forward(query_2HCD, key_2KCD, value_2KCD, is_causal=True, scale=scale)
        gathering.wait()
        keys, values = _in_order(row_T2KD, group.size())
        outs, lses = list(out_2HCD.split(1)), list(lse_2HC1.split(1))
        for chunk, num_before in _before(query, group):
            seen = slice(0, num_before)
            before = kernel.forward(
                query_2HCD[chunk : chunk + 1], keys[:, :, seen], values[:, :, seen], is_causal=False, scale=scale
            )
            outs[chunk], lses[chunk] = _merged(outs[chunk], lses[chunk], *before)
        out_2HCD, lse_2HC1 = _laid_out(torch.cat(outs)), torch.cat(lses)
        ctx.save_for_backward(query, key, value, out_2HCD, lse_2HC1)
        ctx.group, ctx.scale, ctx.kernel = group, scale, kernel
        return _by_token(out_2HCD)

    @staticmethod
    def backward(ctx: Any, gradient_1LHD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_2HCD, lse_2HC1 = ctx.saved_tensors
        group, kernel, scale = ctx.group, ctx.kernel, ctx.scale
        row_T2KD, gathering = _gather(key, value, group)
        gradient_2HCD = _by_chunk(gradient_1LHD.transpose(1, 2))
        query_2HCD, key_2KCD, value_2KCD = (_by_chunk(one) for one in (query, key, value))
        of_query_2HCD, *of_own = kernel.backward(
            gradient_2HCD, query_2HCD, key_2KCD, value_2KCD, out_2HCD, lse_2HC1, is_causal=True, scale=scale
        )
        summed = torch.promote_types(query.dtype, torch.float32)
        of_query_2HCD = of_query_2HCD.to(summed)
        gathering.wait()
        keys, values = _in_order(row_T2KD, group.size())
        of_row_T2KD = torch.zeros(row_T2KD.shape, dtype=summed, device=query.device)
        of_keys, of_values = _heads_first(of_row_T2KD)
        for chunk, num_before in _before(query, group):
            here, seen = slice(chunk, chunk + 1), slice(0, num_before)
            of_queries, of_key, of_value = kernel.backward(
                gradient_2HCD[here],
                query_2HCD[here],
                keys[:, :, seen],
                values[:, :, seen],
                out_2HCD[here],
                lse_2HC1[here],
                is_causal=False,
                scale=scale,
            )
            of_query_2HCD[here] += of_queries
            of_keys[:, :, seen] += of_key
            of_values[:, :, seen] += of_value
        for chunk, place in enumerate(_places(group)):
            own = slice(place * key_2KCD.shape[2], (place + 1) * key_2KCD.shape[2])
            of_keys[:, :, own] += of_own[0][chunk]
            of_values[:, :, own] += of_own[1][chunk]
        of_own_L2KD = of_row_T2KD.new_empty(key.shape[2], *of_row_T2KD.shape[1:])
        dist.reduce_scatter_tensor(of_own_L2KD, _by_rank(of_row_T2KD, group.size()), group=group)
        of_key, of_value = _heads_first(of_own_L2KD.to(key.dtype))
        return _by_token(of_query_2HCD.to(query.dtype)).transpose(1, 2), of_key, of_value, None, None, None


def _gather(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Begin to gather keys and values of all ranks [T, 2, K, D], by rank; return them and what to wait for."""
    own_L2KD = torch.stack((key, value), dim=1)[0].permute(2, 0, 1, 3).contiguous()
    row_T2KD = own_L2KD.new_empty(own_L2KD.shape[0] * group.size(), *own_L2KD.shape[1:])
    return row_T2KD, dist.all_gather_into_tensor(row_T2KD, own_L2KD, group=group, async_op=True)


def _places(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return which of the document's 2R chunks this rank holds."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


def _before(query: Tensor, group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Return this rank's chunks that have tokens before them: its number here, and how many."""
    num_tokens = query.shape[2] // 2
    return [(chunk, place * num_tokens) for chunk, place in enumerate(_places(group)) if place]


def _in_order(row_T2KD: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [1, K, T, D] in the document's order, of a row by rank."""
    order = _ranks_of_chunks(num_ranks)
    chunks = row_T2KD.unflatten(0, (2 * num_ranks, -1))
    return _heads_first(torch.cat([chunks[number] for number in order]))


def _by_rank(row_T2KD: Tensor, num_ranks: int) -> Tensor:
    """Return a row in the document's order by rank, as `_in_order` was given it."""
    chunks = row_T2KD.unflatten(0, (2 * num_ranks, -1))
    return torch.cat([chunks[place] for rank in range(num_ranks) for place in (rank, 2 * num_ranks - 1 - rank)])


def _ranks_of_chunks(num_ranks: int) -> list[int]:
    """Return where each of the document's chunks is in a row by rank."""
    return [*range(0, 2 * num_ranks, 2), *range(2 * num_ranks - 1, 0, -2)]


def _heads_first(row_T2KD: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = row_T2KD.permute(1, 2, 0, 3).unsqueeze(1)
    return keys, values


def _by_chunk(one_1HLD: Tensor) -> Tensor:
    """Return [2, H, C, D]: a view."""
    chunks_2HCD: Tensor = one_1HLD[0].unflatten(1, (2, -1)).transpose(0, 1)
    return chunks_2HCD


def _by_token(one_2HCD: Tensor) -> Tensor:
    """Return [1, L, H, D]."""
    return one_2HCD.transpose(1, 2).flatten(0, 1).unsqueeze(0)


def _laid_out(one_2HCD: Tensor) -> Tensor:
    """Return it with a token's heads beside each other in memory, so that `_by_token` copies nothing."""
    return one_2HCD.transpose(1, 2).contiguous().transpose(1, 2)


def _merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of queries that see the keys of both."""
    whole = torch.logaddexp(lse, other_lse)
    merged = torch.addcmul(out * (lse - whole).exp(), other, (other_lse - whole).exp())  # in fp32, as log-sum-exps are
    return merged.to(out.dtype), whole
