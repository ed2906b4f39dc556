"""What is read of a pass's tokens, counted by hand."""

from dataclasses import replace

import pytest
import torch

from replay.verdict.special_tokens import SpecialTokens
from replay.verdict.token_traits import read_token_traits
from tests.helpers.made_captures import make_call

PAD, END = 0, 2
SPECIAL = SpecialTokens(pad_token_id=PAD, eos_token_ids=frozenset({END}))


@pytest.mark.parametrize(
    ("ids", "actions", "num_idle"),
    [
        # The end token is text, and the padding behind it is none.
        ([5, 6, 7, END, PAD, PAD], [0, 0, 1, 1, 0, 0], 0),
        ([5, 6, 7, END, PAD, PAD], [0, 0, 1, 1, 1, 1], 2),
        # A talk of two turns has two ends.
        ([5, END, 7, END, PAD, PAD], [0, 1, 1, 1, 1, 0], 1),
        ([5, 6, 7, 8, 9, END], [0, 0, 1, 1, 1, 1], 0),
        ([5, 6, 7, 8, 9, 9], [0, 0, 1, 1, 1, 1], 0),
    ],
)
@pytest.mark.parametrize("is_padding_masked", [False, True])
def test_an_action_is_idle_behind_the_last_end_of_its_row_or_where_it_is_masked(
    ids: list[int], actions: list[int], num_idle: int, is_padding_masked: bool
) -> None:
    ids_BS, actions_BA = torch.tensor([ids]), torch.tensor([actions[1:]]).bool()
    real_BS = ids_BS != PAD if is_padding_masked else torch.ones_like(ids_BS)
    tensors = {"input_ids": ids_BS, "attention_mask": real_BS.long(), "action_mask": actions_BA}
    call = replace(make_call(ids_BS), tensors=tensors)
    assert read_token_traits(call, call.micro_batch(), SPECIAL).num_idle_actions == num_idle
