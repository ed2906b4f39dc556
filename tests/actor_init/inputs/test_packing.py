"""Packed and padded rows give the log-probs that each row has alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from actor_init.action_log_probs import action_log_probs
from actor_init.inputs.packing import apply_layout, pad_to, prepare_inputs
from actor_init.model_form import DocumentBorders, Layout
from capture.file_format.micro_batch import CaptureError, MicroBatch, Origin
from replay.options.option_parsing import format_error_with_flags
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
    "gaps in the actions": ["ppppapaapppa"],
    "with gaps in the mask": [".pp.ppaa.aa."],
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


# A trainer's own actor may join rows without the padding between their tokens, which rows as captured keep.
CASES = [(name, layout) for name in ROWS for layout in LAYOUTS if (name, layout) != ("with gaps in the mask", "padded")]


@pytest.mark.parametrize(("name", "layout_name"), CASES)
@torch.no_grad()
def test_rows_have_the_log_probs_they_have_alone(name: str, layout_name: str, reference: Reference) -> None:
    batch, layout = batch_of(ROWS[name]), LAYOUTS[layout_name]
    inputs = apply_layout(prepare_inputs(batch, packing=layout.joins_rows), layout)
    found_BA = action_log_probs(reference.model.set_attn_implementation("sdpa") or reference.model, inputs)
    expected_BA = reference.log_probs(batch)
    torch.testing.assert_close(found_BA, expected_BA, rtol=1e-5, atol=1e-5)  # fp32 sums in another order
    assert torch.equal(inputs.action_mask_BA, expected_BA != 0)


# A gap is padding between a row's tokens, as where the mask is made of ids that differ from the pad token's.
GAPS = [".pp.ppaa.aa.", "pp..paaa.a.a"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # rotations, and a table of absolute positions
@pytest.mark.parametrize("given", ["nothing", "labels", "shift_labels", "position_ids", "action_mask"])
@torch.no_grad()
def test_padding_between_tokens_is_fed_and_predicts_as_in_the_job(kind: str, given: str) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads), dtype=torch.float32).eval()
    batch, mask_BS = batch_of(GAPS), mask_of(GAPS, "pa")
    ids_BS, last = batch.sequences_BS, NUM_TOKENS - NUM_ACTIONS
    positions: dict[str, Tensor] = {}
    counted_BS = (mask_BS.cumsum(dim=1) - 1).masked_fill(~mask_BS, 1)
    # All but each row's first real token and the padding around the row: that padding has labels in no case here.
    is_inner_BS = (mask_BS.cumsum(1) > 0) & (mask_BS.flip(1).cumsum(1).flip(1) > 0)
    is_target_BS = is_inner_BS & ~(mask_BS & (mask_BS.cumsum(dim=1) == 1))
    if given == "action_mask":
        positions = {"position_ids": counted_BS}
        is_target_BS = torch.nn.functional.pad(mask_of(GAPS, "a")[:, last:], (last, 0))
    else:
        batch = replace(batch, action_mask_BA=None)
    labels_BS = ids_BS.masked_fill(~is_target_BS, -100)
    if given == "labels":
        batch = replace(batch, labels_BS=labels_BS)
    if given == "shift_labels":
        next_BS = torch.nn.functional.pad(labels_BS[:, 1:], (0, 1), value=-100)
        batch = replace(batch, extra_tensors={"shift_labels": next_BS})
    if given == "position_ids":
        positions = {"position_ids": counted_BS}
        batch = replace(batch, extra_tensors=positions)
    inputs = prepare_inputs(batch, packing=False)
    assert int(inputs.action_mask_BA.sum()) == int(is_target_BS.sum())
    found = action_log_probs(model, inputs).sum()
    loss = model(input_ids=ids_BS, attention_mask=mask_BS.long(), labels=labels_BS, **positions).loss
    torch.testing.assert_close(found, -loss * int(is_target_BS.sum()), rtol=1e-5, atol=1e-5)


def test_packed_rows_with_padding_between_their_tokens_are_refused() -> None:
    with pytest.raises(CaptureError, match="padding between the tokens of a row") as refusal:
        prepare_inputs(replace(batch_of(GAPS), action_mask_BA=None), packing=True)
    assert format_error_with_flags(refusal.value).endswith("Try: --no-packing")


def test_a_packed_row_has_no_log_prob_of_an_action_that_the_mask_leaves_out() -> None:
    batch = batch_of(["ppppa.aaaaaa"])
    masked = replace(batch, action_mask_BA=mask_of(["ppppaaaaaaaa"], "a")[:, NUM_TOKENS - NUM_ACTIONS :])
    inputs, without = (prepare_inputs(each, packing=True) for each in (masked, batch))
    assert torch.equal(inputs.action_mask_BA, without.action_mask_BA)
    assert torch.equal(inputs.predictor_N, without.predictor_N)


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


def test_a_document_of_padding_may_be_the_longest() -> None:
    """A kernel that is told of shorter documents leaves out what is behind their length."""
    inputs = prepare_inputs(batch_of(ROWS["of many kinds"]), packing=True)
    longer = pad_to(inputs, inputs.input_ids.shape[1] + 1000)
    assert longer.cu_seq_lens is not None
    assert longer.cu_seq_lens.diff().tolist() == [8, 1, 12, 4, 12, 1000]
    assert longer.max_length >= 1000


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
