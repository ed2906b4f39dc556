"""Tensors that a job notes for a pass: which are kept, with which pass, and what is said of the others."""

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capture
from capture import capture_files, recording
from capture.file_format.capture_file import MAX_NOTES, CapturedCall, read_call
from capture.file_format.micro_batch import Origin, explain_misfit
from capture.folder_tools.redact import TokenRedaction, redact_folder
from capture.record.recorder import take_held_notes
from capture.record.snapshot import PassNotes
from capture.run import ModelSearch, RecordingOrder
from tests.helpers.causal_lms import lm

IDS_BS = torch.arange(12).view(3, 4)


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        total: Tensor = self.embedding(input_ids).sum()
        return total


def read_calls(folder: Path) -> list[CapturedCall]:
    return [read_call(path) for path in capture_files(folder)]


@pytest.mark.parametrize("settings", [{"reproduce": True}, {"reproduce": True, "segment": "64KB"}], ids=str)
def test_a_pass_has_what_was_noted_before_and_behind_it_and_no_other(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = Scorer()
    advantages = [torch.rand(3, 2) for _ in range(3)]
    with recording(model, tmp_path, **settings) as recorder:
        for number, own in enumerate(advantages):
            recorder.note_next(before=torch.full((3,), float(number)))
            model(IDS_BS)
            changing = own.clone()
            recorder.note(advantages=changing, divisor=7.5)
            # The job goes on to use its tensor.
            changing.zero_()
    calls = read_calls(tmp_path)
    assert len(calls) == 3
    for number, (call, pass_advantages) in enumerate(zip(calls, advantages, strict=True)):
        assert call.notes.keys() == {"before", "advantages", "divisor"}
        assert torch.equal(call.notes["advantages"], pass_advantages)
        assert call.notes["before"].tolist() == [number] * 3
        assert call.notes["divisor"].item() == 7.5
        assert call.tensors.keys() == {"input_ids"}


def test_so_many_tensors_may_be_noted_for_a_pass_and_each_of_them_again() -> None:
    call = CapturedCall(
        tensors={"input_ids": IDS_BS}, call_facts={}, left_out={"x": "y"}, trains=True, origin=Origin(source="")
    )
    encoded = call.encode()
    assert encoded.note({}) == {}
    assert "notes" not in encoded.body
    names = [f"n{number}" for number in range(MAX_NOTES)]
    assert encoded.note(dict.fromkeys(names, torch.zeros(3))) == {}
    beyond = f"beyond the {MAX_NOTES} tensors that may be noted for a pass"
    assert encoded.note({"more": torch.zeros(3), "n1": torch.ones(3), "wide": torch.zeros(3, 9)}).keys() == {
        "more",
        "wide",
    }
    assert encoded.body["left_out"]["more"] == beyond
    assert encoded.body["left_out"]["x"] == "y"
    assert set(encoded.body["notes"]) == set(names)
    refused = call.encode()
    assert refused.note({"wide": torch.zeros(3, 9)}).keys() == {"wide"}
    assert "notes" not in refused.body


def test_what_is_noted_again_for_the_next_pass_counts_and_the_rest_stays(tmp_path: Path) -> None:
    model = Scorer()
    with recording(model, tmp_path, reproduce=True) as recorder:
        model(IDS_BS)
        recorder.note_next(again=1.0, first=2.0)
        recorder.note_next(again=3.0, second=4.0)
        model(IDS_BS)
        recorder.note(again=5.0, behind=6.0)
        model(IDS_BS)
    before, noted, after = read_calls(tmp_path)
    assert {name: note.item() for name, note in noted.notes.items()} == {
        "again": 5.0,
        "first": 2.0,
        "second": 4.0,
        "behind": 6.0,
    }
    assert before.notes == after.notes == {}
    first, second = (PassNotes.begin_copy(7, {"again": value, name: 0.0}) for value, name in ((1.0, "a"), (3.0, "b")))
    merged = first.merge(second)
    assert (merged.forward, merged.tensors["again"].item(), set(merged.tensors)) == (7, 3.0, {"again", "a", "b"})


def test_a_list_of_tensors_is_noted_as_one_tensor(tmp_path: Path) -> None:
    model, rows = Scorer(), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0])]
    with recording(model, tmp_path, reproduce=True) as recorder:
        model(IDS_BS)
        recorder.note(advantages=rows, scores=[row[0] for row in rows])
    [call] = read_calls(tmp_path)
    assert call.notes["advantages"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert call.notes["scores"].tolist() == [1, 3, 5]


def test_what_is_noted_for_a_pass_that_is_not_kept_goes_to_no_other(tmp_path: Path) -> None:
    model = Scorer()
    with recording(model, tmp_path, every=2, reproduce=True) as recorder:
        for number in range(4):
            recorder.note_next(first=torch.tensor(number))
            model(IDS_BS)
            recorder.note(second=torch.tensor(number))
    assert [(int(call.notes["first"]), int(call.notes["second"])) for call in read_calls(tmp_path)] == [(0, 0), (2, 2)]


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((), True),
        ((1,), True),
        ((4,), True),
        ((2,), True),
        ((4, 9), True),
        ((4, 3), True),
        ((3,), False),
        ((4, 10), False),
        ((4, 0), False),
        ((8, 9), False),
        ((4, 9, 2), False),
    ],
)
def test_shapes_that_fit_rows_of_tokens_are_kept(shape: tuple[int, ...], fits: bool) -> None:
    assert (explain_misfit(shape, rows=4, row_length=9) is None) == fits
    # A vector fits if there is one row.
    assert explain_misfit((7,), rows=1, row_length=9) is None


def test_what_does_not_fit_is_one_warning_and_named_in_the_capture(tmp_path: Path) -> None:
    model = Scorer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with recording(model, tmp_path, reproduce=True) as recorder:
            for _ in range(2):
                model(IDS_BS)
                recorder.note(advantages=torch.zeros(2, 5), kind="grpo", fine=[1.0, 2.0, 3.0], nothing=None)
    [warning] = [warning for warning in caught if "capture" in str(warning.message)]
    assert "of pass 0 is not kept" in str(warning.message)
    assert recorder.failure is None
    for call in read_calls(tmp_path):
        assert call.notes.keys() == {"fine"}
        assert call.left_out["advantages"].startswith(
            "noted with shape [2, 5]; allowed for token ids of shape [3, 4]: "
        )
        assert call.left_out["kind"] == "noted as builtins.str"


def test_a_noted_mask_of_whole_rows_is_the_action_mask_without_their_first_tokens(tmp_path: Path) -> None:
    model, mask_BS = Scorer(), torch.tensor([[0, 0, 1, 1]] * 3)
    with recording(model, tmp_path, reproduce=True) as recorder:
        model(IDS_BS)
        recorder.note(action_mask=mask_BS)
    [call] = read_calls(tmp_path)
    action_mask_BA = call.micro_batch().action_mask_BA
    assert action_mask_BA is not None
    assert action_mask_BA.tolist() == [[False, True, True]] * 3
    assert call.micro_batch().has_noted_mask


def test_the_modules_functions_note_to_what_is_open_and_else_do_nothing(tmp_path: Path) -> None:
    capture.note(advantages=torch.ones(3))
    capture.note_next(advantages=torch.ones(3))
    model = Scorer()
    with recording(model, tmp_path, reproduce=True):
        capture.note_next(first=1.0)
        model(IDS_BS)
        capture.note(second=2.0, loss=0.5)
    capture.note(second=3.0)
    [call] = read_calls(tmp_path)
    assert {name: tensor.item() for name, tensor in call.notes.items()} == {"first": 1.0, "second": 2.0}
    assert call.outputs["noted_loss"] == 0.5


def test_what_is_noted_before_the_first_pass_of_a_search_is_that_passs(tmp_path: Path) -> None:
    """Under `capture run` no recording is open before it. Notes for a rollout before it are not the pass's."""
    model = lm()
    order = RecordingOrder(
        folder=str(tmp_path / "kept"), module_name=None, arguments={}, settings={"reproduce": True}, marks=str(tmp_path)
    )
    with ExitStack() as stack:
        search = ModelSearch(order, stack.enter_context)
        stack.callback(search.end)
        capture.note_next(stale=1.0)
        with torch.no_grad():
            model(IDS_BS)
        capture.note_next(first=1.0)
        model(IDS_BS)
        capture.note_next(second=2.0)
        model(IDS_BS)
    capture.note_next(late=1.0)
    assert [set(call.notes) for call in read_calls(tmp_path / "kept")] == [{"first"}, {"second"}]
    assert not take_held_notes()


def test_a_loss_noted_before_its_backward_tells_its_share_once(tmp_path: Path) -> None:
    """Also where the model returned that loss, which is watched already."""
    model = Scorer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True) as recorder:
        for _ in range(2):
            loss = model(IDS_BS)
            recorder.note(loss=loss)
            (loss / 4).backward()
        optimizer.step()
    step = read_calls(tmp_path)[-1].step
    assert step is not None
    assert step.shares == (0.25, 0.25)


def test_redacting_keeps_masks_and_blanks_other_notes(tmp_path: Path) -> None:
    model = Scorer()
    with recording(model, tmp_path / "own", reproduce=True) as recorder:
        model(IDS_BS)
        recorder.note(action_mask=torch.ones(3, 2), advantages=torch.rand(3, 2))
    done = redact_folder(tmp_path / "own", tmp_path / "redacted", TokenRedaction.ZERO)
    assert done.blanked == {"advantages"}
    [call] = read_calls(tmp_path / "redacted")
    assert call.notes["action_mask"].tolist() == [[1, 1]] * 3
    assert call.notes["advantages"].tolist() == [[0, 0]] * 3
