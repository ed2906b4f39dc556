"""A step that a scaler left out is left out in the replay too, which goes on with the steps behind it."""

import math
from pathlib import Path

import pytest
import torch

from capture import recording
from tests.replay.verdict.test_judge import FP32, replay_captures
from tests.trainers.common import make_batches, make_model


@pytest.mark.parametrize("overflows", [[0], [2]], ids=str)
def test_steps_behind_one_that_a_scaler_left_out_are_followed(
    tmp_path: Path, one_world: None, overflows: list[int]
) -> None:
    model = make_model(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with recording(model, tmp_path / "captures", reproduce=True):
        for number, batch in enumerate(make_batches(4)):
            loss = model(**batch).loss
            scaler.scale(loss * (math.inf if number in overflows else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    _, verdict, _ = replay_captures(tmp_path, tmp_path / "logs", *FP32)
    assert verdict["outcome"] == "REPRODUCED"
    assert [window["outcome"] for window in verdict["windows"]][:3] == ["REPRODUCED"] * 3
    assert [window["optimizer_step"] for window in verdict["windows"]][:3] == [0, 1, 2]
    assert verdict["coverage"]["num_steps_judged"] >= 3
