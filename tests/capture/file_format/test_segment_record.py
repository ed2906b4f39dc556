"""What a segment's index says of a pass is what the pass itself holds, and 0 is told from what is not known."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import Origin
from capture.file_format.optimizer_step import OptimizerStep, ParameterSamples
from capture.file_format.segment_record import Counts, SegmentRecord, digest_window, to_microseconds

TIME = "2026-03-02T09:00:00.000123+00:00"
IDS_BS = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0], [0, 0, 0, 0]])
CALL = CapturedCall(
    tensors={
        "input_ids": IDS_BS,
        "attention_mask": (IDS_BS > 0).long(),
        "action_mask": torch.tensor([[1, 0], [0, 0], [0, 0]]),
    },
    call_facts={},
    left_out={},
    trains=True,
    origin=Origin(source="", rank=1, world_size=2, step=7, time=TIME),
)
RECORD = SegmentRecord(
    offset=0,
    num_bytes=0,
    crc32=0,
    number=7,
    time=to_microseconds(TIME),
    forward=7,
    trains=True,
    counts=Counts(rows=3, row_length=4, real_tokens=4, action_tokens=1, empty_rows=1),
    has_non_finite=False,
    has_gradients=False,
    optimizer_step=None,
    window=None,
)
STEP = OptimizerStep(number=0, passes=(3, 7), shares=(0.5, 0.5))
GRADIENTS = ParameterSamples(samples=(), num_parameters=1, num_frozen=0, is_sharded=False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"trains": False}, {"trains": False}),
        ({"optimizer_step": 0}, {"optimizer_step": 0}),
        ({"optimizer_step": 4}, {"optimizer_step": 4}),
        ({"origin": replace(CALL.origin, step=0)}, {"number": 0, "forward": 0}),
        ({"origin": replace(CALL.origin, step=None)}, {"number": 0, "forward": None}),
        ({"outputs": {"loss": 1.0, "loss_function": "nan"}}, {}),
        ({"outputs": {"loss": 1.0, "grad_norm": math.inf}}, {"has_non_finite": True}),
        ({"outputs": {"noted_loss": math.nan}}, {"has_non_finite": True}),
        # A step is known by its passes, whether gradients were sampled for it or not.
        ({"step": STEP}, {"window": digest_window([3, 7])}),
        ({"step": replace(STEP, gradients=GRADIENTS)}, {"window": digest_window([3, 7]), "has_gradients": True}),
        (
            {"tensors": {"input_ids": IDS_BS}},
            {"counts": Counts(rows=3, row_length=4, real_tokens=12, action_tokens=None, empty_rows=0)},
        ),
        ({"tensors": {"inputs_embeds": torch.ones(1, 2, 3)}}, {"counts": None}),
    ],
)
def test_a_record_says_of_a_pass_what_it_holds_and_is_read_back(
    change: dict[str, Any], expected: dict[str, Any]
) -> None:
    record = replace(CALL, **change).encode().segment_record()
    assert record == replace(RECORD, **expected)
    written = replace(record, offset=2**40, num_bytes=2**31, crc32=2**32 - 1)
    assert SegmentRecord.unpack_checked(written.pack()) == written
    assert written.end == 2**40 + len(written.pack()) + 2**31


def test_actions_that_are_none_are_told_from_no_mask() -> None:
    for action_tokens in (0, None):
        counts = Counts(rows=1, row_length=2, real_tokens=2, action_tokens=action_tokens, empty_rows=0)
        record = replace(RECORD, counts=counts)
        assert SegmentRecord.unpack(record.pack()) == record


def test_windows_are_known_by_their_passes_in_their_order() -> None:
    windows: list[list[int | None]] = [[3, 7], [7, 3], [37], [3], [3, 7, 8], [], [None]]
    digests = [digest_window(window) for window in windows]
    assert len(set(digests)) == len(windows)
    assert all(0 <= digest < 2**62 for digest in digests)
    assert digest_window((3, 7)) == digests[0]
