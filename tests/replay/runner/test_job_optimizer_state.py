"""A replay that is given the state of the job's optimizer steps as the job did, which had stepped before.

About 10 seconds: one recording in this process, and replays of it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from capture import recording
from replay.command_line.cli import main
from tests.trainers.common import make_batches, make_model

pytestmark = pytest.mark.usefixtures("one_world", "proofs_once")

NUM_BEFORE = 3
RATE = 1e-3
STEPS = ["--step", "--optimizer", "adamw", "--learning-rate", str(RATE), "--loss", "sft"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for three steps, leave a checkpoint as Trainer does, and record three more."""
    folder = tmp_path_factory.mktemp("job")
    model: Any = make_model(folder, saves=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def take_step(batch: dict[str, torch.Tensor]) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = make_batches(2 * NUM_BEFORE)
    for number, batch in enumerate(batches[:NUM_BEFORE]):
        if number == NUM_BEFORE - 1:
            torch.save(optimizer.state_dict(), folder / "earlier.pt")
        take_step(batch)
    model.save_pretrained(folder / "checkpoint-3")
    torch.save(optimizer.state_dict(), folder / "checkpoint-3" / "optimizer.pt")
    with recording(model, folder / "captures", reproduce=True):
        for batch in batches[NUM_BEFORE:]:
            take_step(batch)
    return folder


def replay(job: Path, capsys: pytest.CaptureFixture[str], *typed: str, backend: str = "ddp", exits: int = 0) -> str:
    folders = ["--inputs", str(job / "captures"), "--model", str(job / "checkpoint-3")]
    command = [*folders, "--backend", backend, "--log-folder", str(job / "logs"), *STEPS, *typed]
    assert main(command) == exits
    said = capsys.readouterr()
    return said.out + said.err


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_with_the_state_every_step_is_the_jobs(backend: str, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replay(job, capsys, "--optimizer-state", str(job / "checkpoint-3"), backend=backend)
    assert "verdict    REPRODUCED" in said
    assert "3 of 3 passes and 3 of 3 steps judged" in said
    assert "state      the state after 3 steps of 21 of 21 parameters" in said
    assert "optimizer  as the job's" in said


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_the_state_of_another_run_differs_in_its_moments(
    backend: str, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = torch.load(job / "checkpoint-3" / "optimizer.pt", weights_only=True)
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"].flip(0)
    torch.save(state, tmp_path / "other.pt")
    said = replay(job, capsys, "--optimizer-state", str(tmp_path / "other.pt"), backend=backend)
    assert "verdict    DIFFERS" in said
    assert "optimizer state" in said
    assert "exp_avg of model." in said


def test_without_it_the_steps_are_not_the_jobs(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replay(job, capsys)
    assert "moments of steps before in the job, none here" in said
    assert "verdict    REPRODUCED" not in said


def test_the_state_of_another_step_is_named(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replay(job, capsys, "--optimizer-state", str(job / "earlier.pt"))
    assert "the state of 3 steps in the job, of 2 here" in said
    assert "verdict    REPRODUCED" not in said


def test_under_zero_it_is_refused_by_name(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = str(job / "checkpoint-3")
    said = replay(job, capsys, "--optimizer-state", state, backend="deepspeed", exits=2)
    assert "is not there for deepspeed, whose optimizer has pieces of parameters" in said
    assert "--backend fsdp2" in said


def test_a_state_that_is_not_there_or_not_needed_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file or folder" in replay(job, capsys, "--optimizer-state", str(job / "nothing"), exits=2)
    other = ["--optimizer-state", str(job / "checkpoint-3"), "--load-state", str(job)]
    assert "exclude each other" in replay(job, capsys, *other, exits=2)
