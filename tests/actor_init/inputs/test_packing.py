"""Packed and padded rows give the log-probs that each row has alone."""

import pytest
import torch
from torch import Tensor

from actor_init.action_log_probs import action_log_probs
from actor_init.inputs.packing import apply_layout, pad_to, prepare_inputs
from actor_init.model_form import DocumentBorders, Layout
from capture.file_format.micro_batch import CaptureError, MicroBatch, Origin
from tests.helpers.reference import Reference, reference_of_a_small_llama

NUM_TOKENS, NUM_ACTIONS = 12, 8

#     where the real tokens are and which of them are actions, as one letter a token: . padding, p prompt, a action
ROWS = {
    "padded on the left": ["....ppppaaaa"],
    "padded on the right": ["ppppaaaa...."],
    "padded on both sides": ["..ppppaaaa.."],
    "not padded": ["ppppaaaaaaaa"],
    "without an action token": ["..pppppp...."],
    "of length 1": ["......p....."],
    "one action and nothing before it": ["......a....."],
    "all real tokens actions": ["....aaaaaaaa"],
    "with gaps in the mask": [".pp.ppaa.aa."],
    "gaps in the actions": ["ppppapaapppa"],
    "without a real token, beside one with": ["............", "ppppaaaa...."],
    "of many kinds": ["....ppppaaaa", "......p.....", "ppppppppppaa", "..pppp......", "ppppaaaaaaaa"],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_of_a_small_llama(tmp_path_factory.mktemp("model"))


def batch_of(rows: list[str]) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    return MicroBatch(
        sequences_BS=torch.randint(97, (len(rows), NUM_TOKENS), generator=generator),
        attention_mask_BS=mask_of(rows, "pa"),
        action_mask_BA=mask_of(rows, "a")[:, NUM_TOKENS - NUM_ACTIONS :],
        trains=True,
        origin=Origin(source="here"),
    )


def mask_of(rows: list[str], letters: str) -> Tensor:
    return torch.tensor([[letter in letters for letter in row] for row in rows])


LAYOUTS = {
    "packed": Layout(packs=True),
    "packed, masked": Layout(packs=True, borders=DocumentBorders.MASK),
    "padded": Layout(packs=False),
    "a document a row": Layout(packs=False, as_captured=False),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_rows_have_the_log_probs_they_have_alone(name: str, layout: Layout, reference: Reference) -> None:
    batch = batch_of(ROWS[name])
    inputs = apply_layout(prepare_inputs(batch, packing=layout.joins_rows), layout)
    found_BA = action_log_probs(reference.model.set_attn_implementation("sdpa") or reference.model, inputs)
    expected_BA = reference.log_probs(batch)
    torch.testing.assert_close(found_BA, expected_BA, rtol=1e-5, atol=1e-5)  # fp32 sums in another order
    assert torch.equal(inputs.action_mask_BA, expected_BA != 0)


def test_packed_rows_hold_the_real_tokens_alone() -> None:
    batch = batch_of(ROWS["of many kinds"])
    inputs = prepare_inputs(batch, packing=True)
    assert inputs.input_ids.tolist() == [batch.sequences_BS[batch.attention_mask_BS].tolist()]
    assert inputs.cu_seq_lens is not None
    assert inputs.cu_seq_lens.tolist() == [0, 8, 9, 21, 25, 37]
    assert inputs.position_ids[0, 8:11].tolist() == [0, 0, 1]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_real_token_is_fed_once_and_says_where_it_was_captured(layout: Layout) -> None:
    batch = batch_of(ROWS["of many kinds"])
    inputs = apply_layout(prepare_inputs(batch, packing=layout.joins_rows), layout)
    for fed in (inputs, pad_to(inputs, inputs.input_ids.shape[1] + 3)):
        is_real = fed.captured_index >= 0
        assert fed.captured_index.shape == fed.input_ids.shape
        assert fed.captured_index[is_real].tolist() == batch.attention_mask_BS.flatten().nonzero().flatten().tolist()
        assert torch.equal(fed.input_ids[is_real], batch.sequences_BS.flatten()[fed.captured_index[is_real]])


def test_labels_are_the_targets_where_there_is_no_action_mask() -> None:
    batch = MicroBatch(
        sequences_BS=torch.arange(10, 18).view(2, 4),
        attention_mask_BS=torch.ones(2, 4, dtype=torch.bool),
        labels_BS=torch.tensor([[-100, -100, 12, 90], [14, -100, -100, 17]]),
        trains=True,
        origin=Origin(source="here"),
    )
    inputs = prepare_inputs(batch, packing=True)
    assert inputs.target_ids_N.tolist() == [12, 90, 17]
    assert inputs.predictor_N.tolist() == [1, 2, 6]


def test_a_mask_without_a_real_token_is_refused() -> None:
    with pytest.raises(CaptureError, match="no real token"):
        prepare_inputs(batch_of(["............"]), packing=True)
