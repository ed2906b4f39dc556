"""A replay that goes on from a saved state takes the job's next steps; what is run besides begins with that state."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import recording
from replay.command_line.cli import main as replay_main
from replay.runner import rounding_floor
from replay.runner.rounding_floor import compute_floors
from replay.tolerances.job_bounds import NoiseFloor
from replay.verdict.judge import PassEvidence
from tests.trainers.common import make_batches, make_model


def record_job(folder: Path) -> list[str]:
    """Record four steps whose learning rate falls, and return the arguments that replay them."""
    model: Any = make_model(folder, saves=False)
    model.save_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
    with recording(model, folder / "captures", reproduce=True):
        for batch in make_batches(4):
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return ["--inputs", str(folder / "captures"), "--model", str(folder / "model"), "--backend", "ddp", "--step"]


def read_verdict(folder: Path) -> dict[str, Any]:
    [run] = folder.glob("*/run.json")
    verdict: dict[str, Any] = json.loads(run.read_text())["verdict"]
    return verdict


def test_the_jobs_steps_are_followed_before_a_state_is_saved_and_from_there_on(tmp_path: Path, one_world: None) -> None:
    command = record_job(tmp_path)
    state = str(tmp_path / "state")
    replay_main([*command, "--max-inputs", "2", "--save-state", state, "--log-folder", str(tmp_path / "first")])
    replay_main([*command, "--skip-inputs", "2", "--load-state", state, "--log-folder", str(tmp_path / "second")])
    for name in ("first", "second"):
        verdict = read_verdict(tmp_path / name)
        assert (verdict["outcome"], verdict["coverage"]["num_steps_judged"]) == ("REPRODUCED", 2), verdict["reason"]


def test_the_noise_floor_is_measured_on_the_loaded_state(
    tmp_path: Path, one_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a state is loaded, its weights are NaN."""
    losses: list[float | None] = []

    def keep_losses(passes: Sequence[PassEvidence], others: Sequence[PassEvidence]) -> dict[str, NoiseFloor]:
        losses.extend(record.result.loss for record, _, _ in others)
        return compute_floors(passes, others)

    monkeypatch.setattr(rounding_floor, "compute_floors", keep_losses)
    command = record_job(tmp_path)
    state = str(tmp_path / "state")
    replay_main([*command, "--max-inputs", "2", "--save-state", state, "--log-folder", str(tmp_path / "first")])
    # A typed decay is another one than the job's, so that the second pass differs and a floor is measured.
    going_on = [*command, "--weight-decay", "5", "--skip-inputs", "2", "--load-state", state]
    replay_main([*going_on, "--log-folder", str(tmp_path / "second")])
    assert losses
    assert all(loss is not None and math.isfinite(loss) for loss in losses)
