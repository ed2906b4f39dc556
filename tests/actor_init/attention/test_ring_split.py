"""Ring attention's slices hold every token once, and each query sees its own document up to itself."""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from actor_init.attention.kernels import wrap_ring_with_cudnn
from actor_init.attention.ring_attention import compute_llama3_mask, compute_zigzag_mask
from actor_init.attention.ring_split import RingSlice, check_head_stride, compute_ring_indices, may_zigzag
from actor_init.inputs.packing import pad_to, prepare_inputs, slice_for_ring
from actor_init.spec import ActorSpec, Attention, ParallelSpec, UsageError
from capture.file_format.capture_file import read_micro_batch
from capture.file_format.listing import capture_files
from replay.options.spec import find_sample_folder
from tests.helpers.ranks import run_ranks


@dataclass(frozen=True)
class OneOf:
    """What a slice needs to know of a process group."""

    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


def slices_of(borders: list[int], num_ranks: int, *, zigzag: bool = False) -> list[RingSlice]:
    return [
        compute_ring_indices(
            torch.tensor(borders, dtype=torch.int32),
            OneOf(rank, num_ranks),  # type: ignore[arg-type]
            head_stride=1,
            may_zigzag=zigzag,
        )
        for rank in range(num_ranks)
    ]


def find_document(token: int, borders: list[int]) -> int:
    """The last document goes on to the end of the rounded row."""
    return max(i for i, border in enumerate(borders[:-1]) if border <= token)


ROWS = [[0, 7], [0, 8], [0, 3, 4, 12], [0, 1, 2, 3, 4, 5], [0, 5, 13, 14, 30], [0, 29, 30], [0, 1, 17]]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("borders", ROWS, ids=str)
def test_llama3_slices(borders: list[int], num_ranks: int) -> None:
    slices = slices_of(borders, num_ranks)
    assert sorted(torch.cat([s.local_index_L for s in slices]).tolist()) == list(range(len(slices[0].index_T)))
    assert 0 <= len(slices[0].index_T) - borders[-1] < num_ranks
    for ring in slices:
        assert not ring.is_zigzag
        seen = keys_that_flash_sees(ring)
        visible_LT = compute_llama3_mask(ring, None)
        for place, token in enumerate(ring.local_index_L.tolist()):
            document = find_document(token, borders)
            expected = [key for key in range(token + 1) if find_document(key, borders) == document]
            assert seen[place] == expected
            assert (visible_LT[place].nonzero().flatten() + ring.first_key).tolist() == expected


def keys_that_flash_sees(ring: RingSlice) -> list[list[int]]:
    """flash-attn's varlen rule: a document's last query sees its last key, each query before it one key less."""
    seen = []
    for (q_start, q_stop), (k_start, k_stop) in zip(
        pairwise(ring.cu_seq_lens_q.tolist()), pairwise(ring.cu_seq_lens_k.tolist()), strict=True
    ):
        assert q_stop - q_start <= ring.max_length_q
        assert k_stop - k_start <= ring.max_length_k
        for query in range(q_stop - q_start):
            end = k_stop - (q_stop - q_start - 1 - query)
            seen.append([key + ring.first_key for key in range(k_start, end)])
    return seen


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 8, 29])
def test_zigzag_slices(length: int, num_ranks: int) -> None:
    slices = slices_of([0, length], num_ranks, zigzag=True)
    assert all(ring.is_zigzag for ring in slices)
    assert sorted(torch.cat([s.local_index_L for s in slices]).tolist()) == list(range(len(slices[0].index_T)))
    assert 0 <= len(slices[0].index_T) - length < 2 * num_ranks
    work = []
    for ring in slices:
        visible_LT = compute_zigzag_mask(ring)
        for place, token in enumerate(ring.local_index_L.tolist()):
            assert sorted(ring.index_T[visible_LT[place]].tolist()) == list(range(token + 1))
        work.append(int(visible_LT.sum()))
    assert len(set(work)) == 1  # that is what the zigzag is for


def test_several_documents_are_never_zigzag() -> None:
    assert not slices_of([0, 4, 8], 2, zigzag=True)[0].is_zigzag


def test_a_sliding_window_forbids_zigzag_and_narrows_llama3() -> None:
    gemma = AutoConfig.for_model("gemma3_text", sliding_window=3)
    assert not may_zigzag(gemma)
    assert may_zigzag(AutoConfig.for_model("llama"))
    for ring in slices_of([0, 12], 2):
        for place, token in enumerate(ring.local_index_L.tolist()):
            keys = (compute_llama3_mask(ring, 3)[place].nonzero().flatten() + ring.first_key).tolist()
            assert keys == list(range(max(0, token - 2), token + 1))


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_ranks_log_probs_are_disjoint_and_whole(num_ranks: int, zigzag: bool) -> None:
    for path in capture_files(find_sample_folder())[:6]:
        inputs = prepare_inputs(read_micro_batch(path), packing=True)
        assert inputs.cu_seq_lens is not None
        parts = [
            slice_for_ring(inputs, ring) for ring in slices_of(inputs.cu_seq_lens.tolist(), num_ranks, zigzag=zigzag)
        ]
        token_of_slot = {}
        for part in parts:
            assert part.ring is not None
            token_N: Tensor = part.ring.local_index_L[part.predictor_N]
            assert part.input_ids[0, part.predictor_N].tolist() == inputs.input_ids[0, token_N].tolist()
            assert part.position_ids[0, part.predictor_N].tolist() == inputs.position_ids[0, token_N].tolist()
            for slot, token, target in zip(
                part.slot_N.tolist(), token_N.tolist(), part.target_ids_N.tolist(), strict=True
            ):
                assert slot not in token_of_slot
                token_of_slot[slot] = (token, target)
        whole = zip(inputs.predictor_N.tolist(), inputs.target_ids_N.tolist(), strict=True)
        assert token_of_slot == dict(zip(inputs.slot_N.tolist(), whole, strict=True))


@pytest.mark.parametrize("packing", [True, False])
def test_padding_to_more_tokens_keeps_what_predicts_what(packing: bool) -> None:
    inputs = prepare_inputs(read_micro_batch(capture_files(find_sample_folder())[4]), packing=packing)
    rows, before = inputs.input_ids.shape
    longer = pad_to(inputs, before + 5)
    assert longer.input_ids.shape == (rows, before + 5)
    assert longer.input_ids[:, :before].equal(inputs.input_ids)
    assert longer.input_ids.flatten()[longer.predictor_N].equal(inputs.input_ids.flatten()[inputs.predictor_N])
    assert longer.slot_N.equal(inputs.slot_N)
    if packing:
        assert longer.cu_seq_lens is not None
        assert longer.cu_seq_lens.tolist()[-2:] == [before, before + 5]
        assert longer.position_ids[0, before:].tolist() == list(range(5))
    else:
        assert longer.attention_mask_BS is not None
        assert not longer.attention_mask_BS[:, before:].any()


def test_what_the_ring_cannot_do_is_refused() -> None:
    with pytest.raises(UsageError, match="Try: ring=2, packing=True"):
        ActorSpec(parallel=ParallelSpec(ring=2), packing=False)
    with pytest.raises(UsageError, match="attention='flash', or sdpa"):
        ActorSpec(parallel=ParallelSpec(ring=2), attention=Attention.EAGER)
    config = AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=4)
    check_head_stride(config, ParallelSpec(ring=2, ring_head_stride=4))
    with pytest.raises(UsageError, match="with one of 1, 2, 4"):
        check_head_stride(config, ParallelSpec(ring=2, ring_head_stride=3))
    # With tp a rank has half of the heads.
    check_head_stride(config, ParallelSpec(ring=2, tp=2, ring_head_stride=2))
    with pytest.raises(UsageError, match=r"the 2 key-value heads of a rank\. Try: ring_head_stride with one of 1, 2$"):
        check_head_stride(config, ParallelSpec(ring=2, tp=2, ring_head_stride=4))
    # Of a model that has no number of key-value heads, each query head has its own.
    with pytest.raises(UsageError, match="with one of 1, 2, 3, 4, 6, 12"):
        check_head_stride(AutoConfig.for_model("gpt2"), ParallelSpec(ring=2, ring_head_stride=8))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_zigzag_in_blocks_is_attention_to_the_whole_row(num_ranks: int) -> None:
    said = run_ranks(["-m", "tests.helpers.zigzag_worker"], num_ranks)
    errors = [float(error) for error in re.findall(r"(?:output|query|key|value) (\S+e[-+]\d+)", said)]
    assert len(errors) == num_ranks * 3 * 4, said
    assert max(errors) < 1e-14  # fp64, sums of some 30 numbers of size 1


@pytest.mark.parametrize(
    ("num_tokens", "is_zigzag", "value_dim", "taken"),
    [(8192, True, 8, "cudnn"), (8191, True, 8, "other"), (8192, False, 8, "other"), (8192, True, 4, "other")],
)
def test_of_slices_cudnn_gets_the_long_ones_of_one_document(
    num_tokens: int, is_zigzag: bool, value_dim: int, taken: str
) -> None:
    borders = torch.tensor([0, 2 * num_tokens] if is_zigzag else [0, 5, 2 * num_tokens], dtype=torch.int32)
    ring = compute_ring_indices(borders, OneOf(0, 2), may_zigzag=True)  # type: ignore[arg-type]
    query, value = (torch.empty(1, 1, num_tokens, dim, device="meta") for dim in (8, value_dim))
    stand_ins: list[Any] = [lambda *_, name=name, **__: name for name in ("other", "cudnn")]
    chosen: Any = wrap_ring_with_cudnn(stand_ins[0], blocks=stand_ins[1])
    assert chosen(torch.nn.Identity(), query, query, value, None, ring=ring) == taken
