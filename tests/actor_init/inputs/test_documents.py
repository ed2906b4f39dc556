"""Documents that a trainer packed into one row are replayed as documents: each has the log-probs that it has alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from actor_init.action_log_probs import action_log_probs
from actor_init.inputs.documents import find_documents
from actor_init.inputs.packing import prepare_inputs
from capture.file_format.micro_batch import CaptureError, MicroBatch, Origin
from tests.helpers.reference import Reference, reference_of_a_small_llama

LENGTHS = [5, 1, 7, 3]
POSITIONS = [p for length in LENGTHS for p in range(length)]
BORDERS = [0, 5, 6, 13, 16]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_of_a_small_llama(tmp_path_factory.mktemp("model"))


def batch_of(
    rows: int = 1, num_tokens: int = 16, mask: list[list[int]] | None = None, **extra_tensors: Any
) -> MicroBatch:
    ids_BS = torch.randint(97, (rows, num_tokens), generator=torch.Generator().manual_seed(1))
    return MicroBatch(
        sequences_BS=ids_BS,
        attention_mask_BS=torch.ones_like(ids_BS, dtype=torch.bool) if mask is None else torch.tensor(mask).bool(),
        extra_tensors={name: torch.tensor(value) for name, value in extra_tensors.items()},
        trains=True,
        origin=Origin(source="here"),
    )


def alone(reference: Reference, ids: Tensor) -> list[float]:
    """Return the log-prob of every token of a document, 0 for its first."""
    batch = MicroBatch(
        sequences_BS=ids[None],
        attention_mask_BS=torch.ones(1, len(ids), dtype=torch.bool),
        action_mask_BA=torch.ones(1, len(ids) - 1, dtype=torch.bool) if len(ids) > 1 else None,
        trains=True,
        origin=Origin(source="here"),
    )
    return [0.0, *(reference.log_probs(batch)[0].tolist() if len(ids) > 1 else [])]


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        (1, {"position_ids": [POSITIONS]}),
        (1, {"cu_seq_lens_q": BORDERS}),
        (1, {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS, "position_ids": [POSITIONS]}),
        (1, {"cu_seqlens": BORDERS[:-1]}),  # what is left over is a document as well
        (1, {"cu_seq_lens_q": [BORDERS], "position_ids": [list(range(16))]}),  # only differences of positions count
        (1, {"position_ids": [[p + 9 for p in POSITIONS]]}),
        (2, {"position_ids": [POSITIONS, POSITIONS]}),
        (2, {"position_ids": [POSITIONS]}),  # one for all rows
        (2, {"position_ids": [POSITIONS, [p + 3 for p in POSITIONS]]}),  # the second row goes on from the first
    ],
)
@torch.no_grad()
def test_each_document_has_the_log_probs_it_has_alone(rows: int, given: Any, reference: Reference) -> None:
    batch = batch_of(rows, **given)
    inputs = prepare_inputs(batch, packing=True)
    assert inputs.cu_seq_lens is not None
    assert torch.diff(inputs.cu_seq_lens).tolist() == LENGTHS * rows
    found_BA = action_log_probs(reference.model.set_attn_implementation("sdpa") or reference.model, inputs)
    expected = [
        [log_prob for document in row.split(LENGTHS) for log_prob in alone(reference, document)]
        for row in batch.sequences_BS
    ]
    torch.testing.assert_close(found_BA, torch.tensor(expected)[:, 1:], rtol=1e-5, atol=1e-5)  # fp32, another order
    assert torch.equal(inputs.action_mask_BA, found_BA != 0)


@pytest.mark.parametrize(
    ("position_ids", "mask"),
    [
        ([[1, 1, 0, 1, 2, 3]], [[0, 0, 1, 1, 1, 1]]),  # padding on the left counts as nothing
        ([[0, 1, 2, 3, 4, 5]], [[1, 1, 0, 0, 1, 1]]),  # a gap is no border
        ([[7, 8, 9, 10, 11, 12]], None),
        ([0, 1, 2, 3, 4, 5], None),
        ([[0, 1, 2, 3, 0, 0]], [[1, 1, 1, 1, 0, 0]]),
    ],
)
def test_one_text_is_one_document_and_keeps_its_positions(position_ids: Any, mask: Any) -> None:
    batch = batch_of(1, 6, mask=mask, position_ids=position_ids)
    documents = find_documents(batch)
    assert int(documents.is_first_BS.sum()) == 1
    assert not documents.has_shared_rows
    real_BS = batch.attention_mask_BS
    assert torch.equal(documents.position_BS[real_BS], torch.tensor(position_ids).view(1, 6)[real_BS])
    assert torch.equal(prepare_inputs(batch, packing=False).position_ids[real_BS], documents.position_BS[real_BS])


def test_positions_that_jump_within_a_text_are_replayed_in_padded_rows_alone() -> None:
    batch = batch_of(1, 6, mask=[[1, 1, 1, 1, 1, 1]], position_ids=[[0, 1, 4, 5, 6, 7]])
    assert prepare_inputs(batch, packing=False).position_ids.tolist() == [[0, 1, 4, 5, 6, 7]]
    with pytest.raises(CaptureError, match=r"jump within a text, .* Try: packing=False"):
        prepare_inputs(batch, packing=True)


def test_a_row_of_padding_has_no_document() -> None:
    batch = batch_of(2, 4, mask=[[0, 0, 0, 0], [1, 1, 0, 1]], position_ids=[[0, 0, 0, 0], [0, 1, 2, 0]])
    documents = find_documents(batch)
    assert documents.is_first_BS.int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 1]]
    assert documents.measure_lengths(batch.attention_mask_BS).tolist() == [2, 1]


def test_padded_rows_of_several_documents_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"several packed documents, .* Try: packing=True"):
        prepare_inputs(batch_of(position_ids=[POSITIONS]), packing=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"position_ids": [[POSITIONS]] * 3}, r"of shape \[3, 1, 16\]; replayed are integers"),
        ({"position_ids": [[0.5] * 16]}, "position_ids are torch.float32"),
        ({"position_ids": [[-1] * 16]}, "position id -1 is negative"),
        ({"cu_seq_lens_q": [0, 99]}, "must rise from 0 to at most 16"),
        ({"cu_seq_lens_q": [0, 9, 5, 16]}, "must rise"),
        ({"cu_seq_lens_q": [3, 16]}, "must rise"),
        ({"cu_seq_lens_q": []}, "must rise"),
        ({"cu_seq_lens_q": [0, 16], "cu_seq_lens_k": [0, 8, 16]}, "of queries and of keys differ"),
    ],
)
def test_positions_and_borders_that_fit_nothing_are_refused(given: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        prepare_inputs(batch_of(**given), packing=True)


def test_borders_in_several_rows_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"in one row, .* in 2 rows"):
        prepare_inputs(batch_of(2, cu_seq_lens_q=BORDERS), packing=True)
