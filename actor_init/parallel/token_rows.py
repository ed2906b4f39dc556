"""Determine which tokens and features of an activation a rank holds: all, or a part that tp ranks sum to the whole.

Shape letters: B rows and S tokens a row as fed, L of the S tokens on this rank, F features, T tokens to be
sketched, K numbers of a sketch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from actor_init.sketching import NUM_SIGNS, sketch


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """A rank's own values: a row for each token from `first_token` on, in every row as fed."""

    values_BLF: Tensor
    first_token: int
    first_feature: int
    is_part: bool

    def sketch_tokens(self, row_T: Tensor, token_T: Tensor) -> Tensor:
        """Sketch the tokens [T, K]; 0 for the tokens that other ranks hold."""
        length = self.values_BLF.shape[1]
        local_token_T = token_T - self.first_token
        is_held_T = (local_token_T >= 0) & (local_token_T < length)
        values = self.values_BLF.flatten(0, 1)[(row_T * length + local_token_T)[is_held_T]]
        sketch_TK = torch.zeros(len(row_T), NUM_SIGNS, device=values.device)
        sketch_TK[is_held_T] = sketch(values, first_feature=self.first_feature)
        return sketch_TK


def locate_token_rows(
    tensor: Tensor, rows: int, num_tokens: int, *, width: int | None, tp: int, tp_rank: int, has_all_heads: bool = False
) -> TokenRows | None:
    """Locate `tensor` [B, S, ...], [B, heads, S, D] or [B * S, F] as this rank's rows; None if it is not of all
    tokens.

    `width` is the number of features over all tp ranks, None if each rank has all. Plain tensors of heads hold a
    rank's own heads, unless `has_all_heads`. Ranks hold equal shares, in the order of the features.
    """
    if isinstance(tensor, DTensor):
        return _locate_shard(tensor, rows, num_tokens, tp=tp, tp_rank=tp_rank)
    values_BLF = _arrange_by_token(tensor, rows, num_tokens)
    if values_BLF is None:
        return None
    num_local_features = values_BLF.shape[-1]
    is_part = tp > 1 and ((tensor.ndim == 4 and not has_all_heads) if width is None else num_local_features < width)
    return TokenRows(
        values_BLF=values_BLF,
        first_token=0,
        first_feature=tp_rank * num_local_features if is_part else 0,
        is_part=is_part,
    )


def _locate_shard(tensor: DTensor, rows: int, num_tokens: int, *, tp: int, tp_rank: int) -> TokenRows | None:
    """Locate the rows of a DTensor on one mesh axis, tp's."""
    if tensor.shape[:2] != (rows, num_tokens) or tensor.ndim != 3:
        return None
    [placement] = tensor.placements
    first_token = first_feature = 0
    if isinstance(placement, Shard):
        dim = placement.dim % tensor.ndim
        assert dim in (1, 2), f"{placement} shards the rows"
        # DTensor splits as torch.chunk does: equal shares, rounded up, and smaller ones at the end.
        first = min(tp_rank * -(-tensor.shape[dim] // tp), tensor.shape[dim])
        first_token, first_feature = (first, 0) if dim == 1 else (0, first)
    return TokenRows(
        values_BLF=tensor.to_local(),
        first_token=first_token,
        first_feature=first_feature,
        is_part=isinstance(placement, (Shard, Partial)),
    )


def _arrange_by_token(tensor: Tensor, rows: int, num_tokens: int) -> Tensor | None:
    """Arrange as [B, S, F]. For heads, tokens may be dim 1 or 2: if both are equally long, nothing tells which."""
    shape = tuple(tensor.shape)
    if tensor.ndim == 4 and shape[0] == rows and shape[2] == num_tokens != shape[1]:
        return tensor.transpose(1, 2).flatten(2)
    if tensor.ndim >= 3 and shape[:2] == (rows, num_tokens) and shape[2:3] != (num_tokens,) * (tensor.ndim == 4):
        return tensor.flatten(2)
    return tensor.view(rows, num_tokens, -1) if tensor.ndim == 2 and shape[0] == rows * num_tokens else None
