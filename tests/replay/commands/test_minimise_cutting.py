"""A cut capture holds what the whole one held there, and of the job's numbers those that are still exact."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actor_init.inputs.packing import prepare_inputs
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.micro_batch import CaptureError, Origin
from capture.file_format.optimizer_step import OptimizerStep, choose_sampled_tokens
from capture.file_format.tensor_codec import RandomStates
from replay.commands.minimise.cutting import CaptureShape, Cut, cut_call
from replay.verdict.recorded_pass import read_token_positions

ROWS, COLUMNS, ACTIONS = 3, 10, 6
WHOLE = Cut(source=0, rows=(0, 1, 2), first=0, end=COLUMNS)


def call_of(**changes: object) -> CapturedCall:
    mask_BS = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    mask_BS[0, 8:], mask_BS[2, :2] = False, False
    action_BA = torch.ones(ROWS, ACTIONS, dtype=torch.bool)
    action_BA[0, 4:] = False
    values: dict[str, object] = {
        "tensors": {
            "sequences": torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS),
            "attention_mask": mask_BS,
            "action_mask": action_BA,
            "position_ids": torch.arange(COLUMNS)[None],
        },
        "notes": {
            "advantages": torch.arange(ROWS * ACTIONS).view(ROWS, ACTIONS).float(),
            "returns": torch.arange(ROWS).float(),
            "scale": torch.tensor(2.0),
        },
        "call_facts": {"use_cache": False},
        "left_out": {},
        "trains": True,
        "origin": Origin(source="a.pkl", rank=0, step=1),
        "outputs": {},
    }
    return CapturedCall(**{**values, **changes})  # type: ignore[arg-type]


def targets(call: CapturedCall) -> set[int]:
    """The token ids that a replay computes log-probs of; here each id is in one place."""
    return set(prepare_inputs(call.micro_batch(), packing=False).target_ids_N.tolist())


@pytest.mark.parametrize("rows", [(0,), (1, 2), (2,)])
@pytest.mark.parametrize(("first", "end"), [(0, 10), (0, 7), (3, 10), (5, 8), (4, 6), (0, 4)])
def test_the_replay_computes_what_it_did_for_the_tokens_that_are_left(
    rows: tuple[int, ...], first: int, end: int
) -> None:
    call = call_of()
    cut = cut_call(call, Cut(source=0, rows=rows, first=first, end=end))
    here = {row * COLUMNS + column for row in rows for column in range(first, end)}
    before = {row * COLUMNS + first for row in rows}  # a row's first token has nothing before it
    real = call.tensors["attention_mask"]
    after_padding = {row * COLUMNS + column for row in rows for column in (2,) if row == 2 and first <= 2}
    assert real[2, 2]
    assert targets(cut) == (targets(call) & here) - before - after_padding
    assert cut.tensors["position_ids"].tolist() == [list(range(first, end))]


def test_notes_go_with_their_rows_and_tokens() -> None:
    cut = cut_call(call_of(), Cut(source=0, rows=(0, 2), first=2, end=8))
    # actions cover columns 4 to 9; 4 to 7 are left
    assert cut.tensors["action_mask"].shape == (2, 4)
    assert cut.notes["advantages"].tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert cut.notes["returns"].tolist() == [0, 2]
    assert cut.notes["scale"].item() == 2.0


def test_a_capture_that_is_not_cut_stays_as_it_is() -> None:
    call = call_of(outputs={"loss": 1.5})
    assert cut_call(call, WHOLE) is call


def test_numbers_of_whole_passes_go_and_row_sums_stay_where_all_their_tokens_do() -> None:
    outputs = {"loss": 1.5, "grad_norm": 2.0, "output_row_sums": [-1.0, -2.0, -3.0], "output_crc32": 7}
    call = call_of(outputs=outputs, step=OptimizerStep(number=0, passes=(1,), shares=(1.0,), grad_norm=2.0))
    rows = cut_call(call, Cut(source=0, rows=(2, 0), first=0, end=COLUMNS))
    assert rows.step is None
    assert rows.outputs == {"output_row_sums": [-3.0, -1.0]}
    # row 0 has action tokens in columns 4 to 7, so columns 8 and 9 can go
    assert cut_call(call, Cut(source=0, rows=(0,), first=0, end=8)).outputs == {"output_row_sums": [-1.0]}
    assert cut_call(call, Cut(source=0, rows=(0,), first=0, end=7)).outputs == {}
    assert cut_call(call, Cut(source=0, rows=(1,), first=0, end=8)).outputs == {}


@pytest.mark.parametrize("cut", [Cut(source=0, rows=(2, 0), first=0, end=COLUMNS), replace(WHOLE, end=8)])
def test_a_part_does_not_claim_where_the_whole_pass_left_the_random_states(cut: Cut) -> None:
    """It draws fewer numbers from where the whole pass began, which stays."""
    random = RandomStates(torch={"cpu": b"before"})
    call = call_of(random=random, random_after={"cpu": b"after"})
    assert cut_call(call, WHOLE).random_after == {"cpu": b"after"}
    part = cut_call(call, cut)
    assert (part.random, part.random_after) == (random, {})


def test_row_sums_are_added_up_anew_from_values_by_token() -> None:
    values = torch.arange(ROWS * ACTIONS).view(ROWS, ACTIONS).double()
    call = call_of(
        outputs={
            "log_probs_row_sums": [0.0, 0.0, 0.0],
            "log_probs_values": values.flatten().tolist(),
            "log_probs_shape": [ROWS, ACTIONS],
        }
    )
    cut = cut_call(call, Cut(source=0, rows=(1,), first=0, end=7))
    assert cut.outputs["log_probs_values"] == [6.0, 7.0, 8.0]
    assert cut.outputs["log_probs_shape"] == [1, 3]
    assert cut.outputs["log_probs_row_sums"] == [21.0]


def test_sampled_log_probs_stay_with_their_tokens_or_go() -> None:
    places = choose_sampled_tokens(ROWS, COLUMNS)  # all but each row's first, for there are few
    call = call_of(outputs={"token_log_probs": [float(row * COLUMNS + column) for row, column in places]})
    cut = cut_call(call, Cut(source=0, rows=(1,), first=0, end=5))
    assert cut.outputs["token_log_probs"] == [11.0, 12.0, 13.0, 14.0]
    later = cut_call(cut, Cut(source=0, rows=(0,), first=2, end=5))
    assert (later.outputs["token_log_probs"], read_token_positions(later, 1, 3)) == ([13.0, 14.0], [(0, 1), (0, 2)])
    large = torch.ones(8, 100, dtype=torch.int64)
    sampled = choose_sampled_tokens(8, 100)
    many = call_of(
        tensors={"input_ids": large}, notes={}, outputs={"token_log_probs": [float(row) for row, _ in sampled]}
    )
    row = cut_call(many, Cut(source=0, rows=(6,), first=0, end=100))
    assert row.outputs["token_log_probs"] == [6.0] * 8
    assert read_token_positions(row, 1, 100) == [(0, column) for row, column in sampled if row == 6]
    assert cut_call(many, Cut(source=0, rows=(6,), first=0, end=4)).outputs == {}


def test_what_is_left_is_written_and_read(tmp_path: Path) -> None:
    cut = cut_call(call_of(), Cut(source=0, rows=(1,), first=2, end=8))
    again = read_call(cut.write(tmp_path))
    assert {name: tensor.tolist() for name, tensor in again.tensors.items()} == {
        name: tensor.tolist() for name, tensor in cut.tensors.items()
    }


def test_nothing_is_no_capture() -> None:
    with pytest.raises(CaptureError, match="nothing is left"):
        cut_call(call_of(), Cut(source=0, rows=(1,), first=4, end=5))


def test_shapes_tell_padding_and_what_cannot_be_cut() -> None:
    real = ((0, 8), (0, COLUMNS), (2, COLUMNS))
    assert CaptureShape.read(call_of()) == CaptureShape(num_rows=ROWS, num_columns=COLUMNS, name="a.pkl", real=real)
    packed: dict[str, Tensor] = {
        "input_ids": torch.ones(1, 6, dtype=torch.int64),
        "cu_seq_lens_q": torch.tensor([0, 2, 6]),
    }
    shape = CaptureShape.read(call_of(tensors=packed, notes={}))
    assert not shape.can_cut_rows
    assert not shape.can_cut_columns
    pairs = CaptureShape.read(
        call_of(tensors={"input_ids": torch.ones(4, 6, dtype=torch.int64)}, notes={"chosen": torch.ones(2)})
    )
    assert not pairs.can_cut_rows
    assert pairs.can_cut_columns


def test_routes_are_cut_with_the_tokens_that_chose_them() -> None:
    # Each token's first expert is its own id.
    choice_TK = torch.arange(ROWS * COLUMNS * 2).view(-1, 2) // 2
    cut = cut_call(call_of(routes={"router": choice_TK}), Cut(source=0, rows=(1, 2), first=3, end=8))
    assert torch.equal(cut.routes["router"][:, 0], cut.tensors["sequences"].flatten())
