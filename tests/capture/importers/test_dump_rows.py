"""The rows of a dump as calls: each has its own rows of every column, and says what was left out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from capture.facts import Setting
from capture.file_format.micro_batch import CaptureError
from capture.importers import dump_rows
from capture.importers.dump_rows import DumpRows, check_size, cut_first_token, pad_left, select_plain_facts


def make_rows(num_rows: int = 5, /, **more: Tensor) -> DumpRows:
    tensors = {
        "sequences": torch.arange(num_rows * 4).view(num_rows, 4),
        "attention_mask": torch.ones(num_rows, 4, dtype=torch.bool),
        "rewards": torch.arange(float(num_rows)),
        **more,
    }
    return DumpRows(source="x.pt", tensors=tensors, facts={"training_step": 7}, left_out={"uid": "list"}, rank=3)


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        (None, [(0, 5)]),
        (2, [(0, 2), (2, 2), (4, 1)]),
        (5, [(0, 5)]),
        (9, [(0, 5)]),
        (1, [(row, 1) for row in range(5)]),
    ],
)
def test_each_micro_batch_has_its_rows_of_every_column_and_says_which(
    num_rows: int | None, expected: list[tuple[int, int]]
) -> None:
    rows = make_rows()
    calls = list(rows.make_calls(num_rows))
    assert [(call.call_facts["first_row"], len(call.tensors["sequences"])) for call in calls] == expected
    for call, (first, count) in zip(calls, expected, strict=True):
        for name, column in rows.tensors.items():
            assert call.tensors[name].equal(column[first : first + count])
        assert call.call_facts == {"training_step": 7, "first_row": first}
        assert (call.left_out, call.trains, call.origin.rank, call.origin.source) == (
            {"uid": "list"},
            True,
            3,
            "x.pt",
        )
        # A dump's own step and time are told by whoever converts it.
        assert (call.origin.step, call.origin.time, call.origin.world_size) == (None, None, None)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (torch.ones(4), "torch.float32 of shape [4]"),
        (torch.tensor(1.0), "torch.float32 of shape []"),
        (torch.ones(5, 0), None),
        (torch.ones(5, 2, 3), None),
    ],
)
def test_a_column_that_has_no_value_for_each_row_is_left_out_and_named(column: Tensor, kind: str | None) -> None:
    for call in make_rows(other=column).make_calls(2):
        assert call.left_out == {"uid": "list"} | ({} if kind is None else {"other": kind})
        assert ("other" in call.tensors) == (kind is None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": torch.arange(5)}, r"x\.pt: token ids of shape \[5\]; expected \[rows, tokens\]"),
        ({"sequences": torch.ones(5, 0, dtype=torch.int64)}, r"token ids of shape \[5, 0\]"),
        ({"sequences": torch.ones(0, 4, dtype=torch.int64)}, r"token ids of shape \[0, 4\]"),
        ({"attention_mask": torch.ones(4, 4)}, "attention_mask does not have 5 rows, as token ids"),
        (
            {"action_mask": torch.ones(6, 2), "attention_mask": torch.ones(4, 4)},
            "action_mask, attention_mask does not have 5 rows",
        ),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        list(make_rows(**change).make_calls(None))


def test_the_limit_is_one_of_a_micro_batch_and_not_of_the_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has 4 x 8 bytes of ids, 4 of a mask and 4 of a reward."""
    monkeypatch.setattr(dump_rows, "MAX_TENSOR_BYTES", 80)
    assert len(list(make_rows(16).make_calls(2))) == 8
    with pytest.raises(CaptureError) as refusal:
        list(make_rows(16).make_calls(3))
    assert refusal.value.text.endswith(f"Try: {Setting('rows', 1)}")
    with pytest.raises(CaptureError) as refusal:
        list(make_rows(16).make_calls(None))
    assert refusal.value.text.endswith(f"Try: {Setting('rows', 2)}")
    check_size(1, [4, 6], "x.pt")
    with pytest.raises(CaptureError, match=r"1 rows of 2 tensors, padded, hold more than the 80 bytes"):
        check_size(1, [4, 7], "x.pt")


def test_numbers_and_short_texts_hold_for_all_rows_and_the_others_are_named() -> None:
    values: dict[Any, Any] = {
        "none": None,
        "flag": True,
        "count": 2**62 - 1,
        "rate": 0.5,
        "text": "x" * 200,
        "too large": 2**62,
        "too long": "x" * 201,
        "list": [1],
        "tensor": torch.ones(2),
        3: "no name",
    }
    facts, left_out = select_plain_facts(values)
    assert facts == {name: values[name] for name in ("none", "flag", "count", "rate", "text")}
    assert left_out == {
        "too large": "int",
        "too long": "str",
        "list": "list",
        "tensor": "torch.float32 of shape [2]",
    }


def test_rows_are_padded_on_the_left_and_a_mask_loses_its_first_token() -> None:
    assert pad_left([torch.tensor([1]), torch.tensor([2, 3, 4])], 3).tolist() == [[0, 0, 1], [2, 3, 4]]
    assert cut_first_token(torch.tensor([[0, 1, 0], [0, 0, 1]]), "mask", "x.pt").tolist() == [[1, 0], [0, 1]]
    for mask in (torch.tensor([[0, 1], [1, 1]]), torch.tensor([0, 1])):
        with pytest.raises(CaptureError, match=r"x\.pt: mask must be of shape \[rows, tokens\]"):
            cut_first_token(mask, "mask", "x.pt")
