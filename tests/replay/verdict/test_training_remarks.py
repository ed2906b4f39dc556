"""Jobs whose passes are all right and whose steps train nothing, or not all: a line beside the verdict says so.

About 5 seconds: recordings in this process, and a replay of each.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from capture import capture_files, recording
from capture.file_format.capture_file import read_call
from replay.command_line.cli import main
from tests.trainers.common import make_batches, make_model

pytestmark = pytest.mark.usefixtures("one_world", "proofs_once")

Prepare = Callable[[Any], torch.optim.Optimizer]
NUM_STEPS = 3


def of_all(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def made_before_sharding(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = of_all(model)
    fully_shard(model)
    return optimizer


def at_rate_0(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def of_matrices(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.ndim > 1], lr=0.1)


def undone(model: nn.Module) -> torch.optim.Optimizer:
    """The steps are taken back, as by a copy from masters that nobody updates."""
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = of_all(model)
    optimizer.register_step_post_hook(lambda *_: model.load_state_dict(first) and None)
    return optimizer


def train(folder: Path, prepare: Prepare) -> Path:
    model: Any = make_model(folder)
    optimizer = prepare(model)
    with recording(model, folder / "captures", reproduce=True):
        for batch in make_batches(NUM_STEPS):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


def read_remarks(job: Path, capsys: pytest.CaptureFixture[str], *typed: str) -> list[str]:
    # A replay that steps as the job should have done finds these jobs' weights to be others.
    command = ["--inputs", str(job / "captures"), "--model", str(job / "model"), "--loss", "sft", "--backend", "ddp"]
    command += ["--no-step"]
    assert main([*command, "--log-folder", str(job / "logs"), *typed]) == 0
    said = capsys.readouterr().out
    assert "verdict    REPRODUCED" in said
    begin = "note       trained: "
    return [line.removeprefix(begin) for line in said.splitlines() if line.startswith(begin)]


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (
            made_before_sharding,
            "no optimizer step was recorded in 3 training passes, and none of 16 sampled parameters moved. Does the "
            "optimizer have the model's parameters? One that was made before fully_shard or "
            "load_state_dict(assign=True) has others",
        ),
        (at_rate_0, "the learning rate was 0 in all 3 recorded steps"),
        (undone, "none of 21 sampled parameters moved in 3 recorded steps"),
        (of_matrices, "the job's optimizer stepped 16 of 21 trainable parameters in all 3 recorded steps"),
        (of_all, None),
    ],
)
def test_what_a_job_did_not_train_is_said(
    prepare: Prepare, says: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_remarks(train(tmp_path, prepare), capsys) == ([] if says is None else [says])


def test_a_part_of_a_recording_does_not_say_that_there_was_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_remarks(train(tmp_path, made_before_sharding), capsys, "--max-inputs", "2") == []


def test_of_flat_parameters_a_step_counts_those_that_are_in_them(tmp_path: Path, one_world: None) -> None:
    model: Any = FullyShardedDataParallel(make_model(tmp_path), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert len(optimizer.param_groups[0]["params"]) == 1
    with recording(model, tmp_path / "captures", reproduce=True):
        model(**make_batches(1)[0]).loss.backward()
        optimizer.step()
    [step] = [read_call(path).step for path in capture_files(tmp_path / "captures")]
    assert step is not None
    assert [group["num_parameters"] for group in step.settings] == [21]
