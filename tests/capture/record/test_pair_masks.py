"""A mask of pairs of tokens is recorded as documents where these make the same mask again, and not at all elsewhere."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from actor_init.inputs.documents import find_documents
from capture.file_format.micro_batch import Origin, micro_batch_from_call
from capture.record.pair_masks import read_pair_mask

NUM_TOKENS = 7
PACKED, SINGLE = ([3, 2], [1, 4, 2]), ([5], [7])


def make_mask(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Make the mask of pairs [B, 1, S, S] of documents of these lengths in each row, in a loop over all pairs."""
    mask = torch.zeros(len(lengths), 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
    for row, documents in enumerate(lengths):
        numbers = [number for number, length in enumerate(documents) for _ in range(length)]
        for query, document in enumerate(numbers):
            for key in range(query + 1):
                mask[row, 0, query, key] = numbers[key] == document
    return mask


def make_positions(lengths: Sequence[Sequence[int]]) -> Tensor:
    rows = [[position for length in documents for position in range(length)] for documents in lengths]
    return torch.tensor([row + [0] * (NUM_TOKENS - len(row)) for row in rows])


def describe(mask: Tensor, position_ids: Tensor | None = None, *, takes_positions: bool = True) -> Any:
    """The tensors of a capture with this mask; None where there are none."""
    tensors = {"input_ids": torch.ones(len(mask), NUM_TOKENS, dtype=torch.int64)}
    tensors |= {} if position_ids is None else {"position_ids": position_ids}
    pair_mask = read_pair_mask(mask, tensors["input_ids"], takes_positions=takes_positions)
    documents = None if pair_mask is None else pair_mask.describe_documents(tensors)
    return None if documents is None else tensors | documents


def rebuild_mask(tensors: dict[str, Tensor]) -> Tensor:
    """The mask of pairs that a replay makes of a capture's documents, without what padding sees."""
    batch = micro_batch_from_call(tensors, {}, trains=True, origin=Origin(source="a"))
    real_BS = batch.attention_mask_BS
    number_BS = find_documents(batch).is_first_BS.cumsum(dim=1)
    same_BSS = (number_BS[:, :, None] == number_BS[:, None]) & real_BS[:, :, None] & real_BS[:, None]
    return same_BSS.tril()[:, None]


@pytest.mark.parametrize("lengths", [PACKED, SINGLE, ([7],), ([2, 3],), ([1, 1, 1],)])
@pytest.mark.parametrize("hidden", [None, -torch.inf, torch.finfo(torch.float32).min, -1e4])
def test_documents_that_positions_tell_make_the_mask_again(
    lengths: Sequence[Sequence[int]], hidden: float | None
) -> None:
    mask = make_mask(lengths)
    given = mask if hidden is None else torch.zeros(mask.shape).masked_fill(~mask, hidden)
    tensors = describe(given, make_positions(lengths))
    assert "cu_seq_lens_q" not in tensors
    assert torch.equal(rebuild_mask(tensors), mask)


def test_documents_without_positions_of_their_own_are_told_by_borders_of_one_row_alone() -> None:
    tensors = describe(make_mask([[2, 3]]))
    assert tensors["cu_seq_lens_q"].tolist() == [0, 2, 5]
    # What the model makes itself: the columns.
    assert tensors["position_ids"].tolist() == [list(range(NUM_TOKENS))]
    assert torch.equal(rebuild_mask(tensors), make_mask([[2, 3]]))
    assert describe(make_mask([[2, 3]]), takes_positions=False) is None
    assert describe(make_mask(PACKED)) is None
    assert describe(make_mask(PACKED), torch.arange(NUM_TOKENS)[None]) is None


def test_rows_of_one_document_need_no_positions_and_none_that_begin_again() -> None:
    tensors = describe(make_mask(SINGLE), takes_positions=False)
    assert set(tensors) == {"input_ids", "attention_mask"}
    assert torch.equal(rebuild_mask(tensors), make_mask(SINGLE))
    assert describe(make_mask(SINGLE), make_positions(PACKED)) is None


def test_any_other_pair_is_another_mask_or_none() -> None:
    mask = make_mask([[2, 3]])
    num_refused = 0
    for query in range(5):
        for key in range(NUM_TOKENS):
            other = mask.clone()
            other[0, 0, query, key] ^= True
            tensors = describe(other)
            num_refused += tensors is None
            if tensors is not None:
                num_real = int(tensors["attention_mask"].sum())
                assert torch.equal(rebuild_mask(tensors)[:, :, :num_real], other[:, :, :num_real]), (query, key)
    # Without the pair of the first document's tokens there are three; a last token that none sees is padding.
    assert num_refused == 5 * NUM_TOKENS - 2


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.flip(-1, -2).transpose(-1, -2),
        lambda mask: mask.long(),
        lambda mask: mask.float(),
        lambda mask: torch.zeros(mask.shape).masked_fill(~mask, -1.0),
        lambda mask: torch.cat([mask, mask], dim=1),
        lambda mask: mask[:, 0],
        lambda mask: mask[..., :-1],
        lambda mask: torch.ones_like(mask),
    ],
    ids=["pads left", "integers", "ones", "soft", "heads", "three axes", "fewer keys", "sees what follows"],
)
def test_masks_of_other_forms_are_not_recorded(change: Any) -> None:
    mask = make_mask(SINGLE)
    assert describe(mask) is not None
    assert describe(change(mask)) is None


def test_heads_and_rows_may_share_a_mask() -> None:
    mask = make_mask([[2, 3]])
    assert describe(mask.expand(1, 4, NUM_TOKENS, NUM_TOKENS)) is not None
    ids_BS = torch.ones(3, NUM_TOKENS, dtype=torch.int64)
    pair_mask = read_pair_mask(mask, ids_BS, takes_positions=True)
    assert pair_mask is not None
    tensors = {"input_ids": ids_BS, "position_ids": make_positions([[2, 3]])}
    documents = pair_mask.describe_documents(tensors)
    assert documents is not None
    assert torch.equal(rebuild_mask(tensors | documents), mask.expand(3, 1, NUM_TOKENS, NUM_TOKENS))
