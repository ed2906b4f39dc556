"""Reduce a mask of pairs of tokens to the documents whose causal mask it is.

A capture has a mask of the tokens, and tells documents in a row by positions or borders: by these a replay makes the
mask of the pairs. Whether the mask is of that form is found on its device, and read once it is on the host.

Shape letters: B rows, S tokens a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# What hides a pair where a mask is added to the scores: no other number that a softmax can tell from it is larger.
_HIDDEN = -1e4
_PADDING, _OTHER_FORM = -1, -2


@dataclass(frozen=True, kw_only=True, slots=True)
class PairMask:
    """What a mask of pairs says of each token.

    first_seen_BS    the first token that it sees, int32; _PADDING of padding; _OTHER_FORM in all places where the mask
                     is not the causal one of documents, with padding on the right
    takes_positions  the model takes position ids, and makes those of the columns where it is given none
    """

    first_seen_BS: Tensor
    takes_positions: bool

    def on_host(self, first_seen_BS: Tensor) -> "PairMask":
        return replace(self, first_seen_BS=first_seen_BS)

    def describe_documents(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return what a capture has in the place of the mask, beside the pass's other `tensors`.

        None where a capture cannot tell such documents: a mask of another form, or several documents in one of several
        rows whose positions do not begin again with each.
        """
        first_BS = self.first_seen_BS
        rows, num_tokens = first_BS.shape
        if bool((first_BS == _OTHER_FORM).any()) or any(name.startswith("cu_seq") for name in tensors):
            return None
        real_BS, columns_S = first_BS != _PADDING, torch.arange(num_tokens, device="cpu")
        begins_BS = first_BS == columns_S
        mask = {"attention_mask": real_BS}
        positions = tensors.get("position_ids")
        if positions is None and bool((begins_BS.sum(dim=1) <= 1).all()):
            return mask
        if positions is None and not self.takes_positions:
            return None
        positions_BS = columns_S if positions is None else positions
        if positions_BS.shape[-1:] != (num_tokens,) or positions_BS.ndim > 2:
            return None
        restarts_BS = torch.diff(positions_BS.long().expand(rows, num_tokens), dim=1) <= 0
        if bool(((restarts_BS == begins_BS[:, 1:]) | ~real_BS[:, 1:]).all()):
            return mask
        if rows > 1:
            return None
        borders = torch.cat([begins_BS[0].nonzero().flatten(), real_BS.sum().view(1)]).int()
        return mask | {"position_ids": positions_BS.view(1, num_tokens), "cu_seq_lens_q": borders}


@torch.no_grad()
def read_pair_mask(mask: Tensor, ids_BS: Tensor, *, takes_positions: bool) -> PairMask | None:
    """Read a mask of pairs of the tokens, without waiting for its device. None for one that is no such mask.

    Allowed are bool, True where a pair is seen, and floats that are added to the scores; of several heads alone those
    that share one mask.
    """
    rows, num_tokens = ids_BS.shape
    is_shared = mask.ndim == 4 and (mask.shape[1] == 1 or mask.stride(1) == 0)
    if not is_shared or mask.shape[0] not in (1, rows) or mask.shape[2:] != (num_tokens, num_tokens):
        return None
    mask_BSS = mask[:, 0].expand(rows, num_tokens, num_tokens)
    if mask.dtype == torch.bool:
        sees_BSS, is_clear = mask_BSS, torch.ones((), dtype=torch.bool, device=mask.device)
    elif mask.is_floating_point():
        sees_BSS = mask_BSS == 0
        is_clear = (sees_BSS | (mask_BSS <= _HIDDEN)).all()
    else:
        return None
    columns_S = torch.arange(num_tokens, device=mask.device, dtype=torch.int32)
    real_BS = sees_BSS.diagonal(dim1=1, dim2=2)
    # The first of several that are the largest.
    first_BS = sees_BSS.view(torch.uint8).argmax(dim=-1)
    causal_BSS = (columns_S >= first_BS[..., None]) & (columns_S <= columns_S[:, None]) & real_BS[:, None]
    # What padding sees reaches no other token.
    are_causal = ((sees_BSS == causal_BSS) | ~real_BS[..., None]).all()
    # A document's first token sees itself alone, and each later one of its tokens sees all from there on.
    begins_BS = first_BS.gather(1, first_BS) == first_BS
    is_ordered = ((first_BS.diff(dim=1) >= 0) | ~real_BS[:, 1:]).all()
    pads_right = (real_BS[:, :-1] | ~real_BS[:, 1:]).all()
    is_causal = is_clear & are_causal & (begins_BS | ~real_BS).all() & is_ordered & pads_right
    first_BS = first_BS.int().masked_fill(~real_BS, _PADDING)
    return PairMask(
        first_seen_BS=torch.where(is_causal, first_BS, torch.full_like(first_BS, _OTHER_FORM)),
        takes_positions=takes_positions,
    )
