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

from actor_init.attention.ring_split import RingSlice


class BlockKernel(Protocol):
    """Compute attention of a block of queries [B, H, S, D] to a block of keys and values [B, K, T, D]."""

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
    """Compute [1, L, H, D] of query [1, H, L, D], key and value [1, K, L, D], which are this rank's two chunks."""
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
        query_2HCD, key_2KCD, value_2KCD = (_split_into_chunks(tensor) for tensor in (query, key, value))
        out_2HCD, lse_2HC1 = kernel.forward(query_2HCD, key_2KCD, value_2KCD, is_causal=True, scale=scale)
        gathering.wait()
        keys, values = _sort_by_position(row_T2KD, group.size())
        outs, lses = list(out_2HCD.split(1)), list(lse_2HC1.split(1))
        for chunk, num_before in _list_chunks_with_past(query, group):
            past = slice(0, num_before)
            past_results = kernel.forward(
                query_2HCD[chunk : chunk + 1], keys[:, :, past], values[:, :, past], is_causal=False, scale=scale
            )
            outs[chunk], lses[chunk] = _merge(outs[chunk], lses[chunk], *past_results)
        out_2HCD, lse_2HC1 = _store_heads_together(torch.cat(outs)), torch.cat(lses)
        ctx.save_for_backward(query, key, value, out_2HCD, lse_2HC1)
        ctx.group, ctx.scale, ctx.kernel = group, scale, kernel
        return _join_chunks(out_2HCD)

    @staticmethod
    def backward(ctx: Any, gradient_1LHD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_2HCD, lse_2HC1 = ctx.saved_tensors
        group, kernel, scale = ctx.group, ctx.kernel, ctx.scale
        row_T2KD, gathering = _gather(key, value, group)
        gradient_2HCD = _split_into_chunks(gradient_1LHD.transpose(1, 2))
        query_2HCD, key_2KCD, value_2KCD = (_split_into_chunks(tensor) for tensor in (query, key, value))
        query_gradient_2HCD, *local_gradients = kernel.backward(
            gradient_2HCD, query_2HCD, key_2KCD, value_2KCD, out_2HCD, lse_2HC1, is_causal=True, scale=scale
        )
        sum_dtype = torch.promote_types(query.dtype, torch.float32)
        query_gradient_2HCD = query_gradient_2HCD.to(sum_dtype)
        gathering.wait()
        keys, values = _sort_by_position(row_T2KD, group.size())
        row_gradient_T2KD = torch.zeros(row_T2KD.shape, dtype=sum_dtype, device=query.device)
        keys_gradient, values_gradient = _split_keys_and_values(row_gradient_T2KD)
        for chunk, num_before in _list_chunks_with_past(query, group):
            this, past = slice(chunk, chunk + 1), slice(0, num_before)
            query_part, key_part, value_part = kernel.backward(
                gradient_2HCD[this],
                query_2HCD[this],
                keys[:, :, past],
                values[:, :, past],
                out_2HCD[this],
                lse_2HC1[this],
                is_causal=False,
                scale=scale,
            )
            query_gradient_2HCD[this] += query_part
            keys_gradient[:, :, past] += key_part
            values_gradient[:, :, past] += value_part
        for chunk, position in enumerate(_find_positions(group)):
            local = slice(position * key_2KCD.shape[2], (position + 1) * key_2KCD.shape[2])
            keys_gradient[:, :, local] += local_gradients[0][chunk]
            values_gradient[:, :, local] += local_gradients[1][chunk]
        local_gradient_L2KD = row_gradient_T2KD.new_empty(key.shape[2], *row_gradient_T2KD.shape[1:])
        dist.reduce_scatter_tensor(local_gradient_L2KD, _sort_by_rank(row_gradient_T2KD, group.size()), group=group)
        key_gradient, value_gradient = _split_keys_and_values(local_gradient_L2KD.to(key.dtype))
        return (
            _join_chunks(query_gradient_2HCD.to(query.dtype)).transpose(1, 2),
            key_gradient,
            value_gradient,
            None,
            None,
            None,
        )


def _gather(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Begin to gather keys and values of all ranks [T, 2, K, D], by rank; return them and what to wait for."""
    local_L2KD = torch.stack((key, value), dim=1)[0].permute(2, 0, 1, 3).contiguous()
    row_T2KD = local_L2KD.new_empty(local_L2KD.shape[0] * group.size(), *local_L2KD.shape[1:])
    return row_T2KD, dist.all_gather_into_tensor(row_T2KD, local_L2KD, group=group, async_op=True)


def _find_positions(group: dist.ProcessGroup) -> tuple[int, int]:
    """Find which of the document's 2R chunks this rank holds."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


def _list_chunks_with_past(query: Tensor, group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """List this rank's chunks that have tokens before them: which of its two, and how many tokens."""
    num_tokens = query.shape[2] // 2
    return [(chunk, position * num_tokens) for chunk, position in enumerate(_find_positions(group)) if position]


def _sort_by_position(row_T2KD: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Sort keys and values of a row by rank into the document's order, [1, K, T, D]."""
    order = _locate_chunks(num_ranks)
    chunks = row_T2KD.unflatten(0, (2 * num_ranks, -1))
    return _split_keys_and_values(torch.cat([chunks[number] for number in order]))


def _sort_by_rank(row_T2KD: Tensor, num_ranks: int) -> Tensor:
    """Sort a row in the document's order by rank, as `_sort_by_position` takes it."""
    chunks = row_T2KD.unflatten(0, (2 * num_ranks, -1))
    return torch.cat([chunks[position] for rank in range(num_ranks) for position in (rank, 2 * num_ranks - 1 - rank)])


def _locate_chunks(num_ranks: int) -> list[int]:
    """Find where each of the document's chunks is in a row by rank."""
    return [*range(0, 2 * num_ranks, 2), *range(2 * num_ranks - 1, 0, -2)]


def _split_keys_and_values(row_T2KD: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = row_T2KD.permute(1, 2, 0, 3).unsqueeze(1)
    return keys, values


def _split_into_chunks(tensor_1HLD: Tensor) -> Tensor:
    """Return [2, H, C, D]: a view."""
    chunks_2HCD: Tensor = tensor_1HLD[0].unflatten(1, (2, -1)).transpose(0, 1)
    return chunks_2HCD


def _join_chunks(tensor_2HCD: Tensor) -> Tensor:
    """Return [1, L, H, D]."""
    return tensor_2HCD.transpose(1, 2).flatten(0, 1).unsqueeze(0)


def _store_heads_together(tensor_2HCD: Tensor) -> Tensor:
    """Lay it out with a token's heads beside each other in memory, so that `_join_chunks` copies nothing."""
    return tensor_2HCD.transpose(1, 2).contiguous().transpose(1, 2)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge output and log-sum-exp of queries that see the keys of both."""
    total_lse = torch.logaddexp(lse, other_lse)
    # This is computed in fp32, since the log-sum-exps are.
    merged = torch.addcmul(out * (lse - total_lse).exp(), other, (other_lse - total_lse).exp())
    return merged.to(out.dtype), total_lse
