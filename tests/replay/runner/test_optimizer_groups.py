"""A replay under ZeRO holds the optimizer's state against the job's, in every group of the job's optimizer.

About 15 seconds: one recording in this process, and replays of it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actor_init.backends import deepspeed
from capture import recording
from replay.command_line.cli import main
from tests.trainers.common import make_batches, make_model

pytestmark = pytest.mark.usefixtures("one_world", "proofs_once")

NUM_STEPS = 3
# Two of each step.
NUM_PASSES = 2 * NUM_STEPS
ALL_JUDGED = f"{NUM_PASSES} of {NUM_PASSES} passes and {NUM_STEPS} of {NUM_STEPS} steps judged"
RATE = 1e-3
MATRIX, VECTOR = "model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record steps of two groups, as Trainer makes them: matrices with weight decay, vectors without."""
    folder = tmp_path_factory.mktemp("job")
    model: Any = make_model(folder)
    groups = [
        {"params": [each for each in model.parameters() if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    with recording(model, folder / "captures", reproduce=True):
        batches = make_batches(NUM_PASSES)
        for pair in zip(batches[::2], batches[1::2], strict=True):
            for batch in pair:
                (model(**batch).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, set[str]]]:
    """What each reading of the states under DeepSpeed gives: their names, by parameter."""
    readings: list[dict[str, set[str]]] = []
    gather: Callable[..., Any] = deepspeed.gather_optimizer_states

    def note(*given: Any) -> Any:
        states = list(gather(*given))
        readings.append({name: set(values) for name, values in states})
        return iter(states)

    monkeypatch.setattr(deepspeed, "gather_optimizer_states", note)
    return readings


def list_arguments(job: Path) -> list[str]:
    places = {"--inputs": job / "captures", "--model": job / "model", "--log-folder": job / "logs"}
    return [word for option, place in places.items() for word in (option, str(place))]


def replay(job: Path, capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    assert main([*list_arguments(job), *typed]) == 0
    said = capsys.readouterr()
    return said.out + said.err


@pytest.mark.parametrize("flags", [(), ("--zero-stage", "2"), ("--zero-stage", "3"), ("--backend", "fsdp2")])
def test_a_job_of_two_groups_is_reproduced_in_every_pass_and_step(
    flags: tuple[str, ...],
    job: Path,
    gathered: list[dict[str, set[str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = replay(job, capsys, *flags)
    assert "verdict    REPRODUCED\n" in said
    assert ALL_JUDGED in said
    log = Path(said.rpartition("\nlog        ")[2].partition("\n")[0])
    worst = json.loads((log / "run.json").read_text())["verdict"]["worst"]
    assert "optimizer state" in {finding["name"] for finding in worst if finding["status"] == "agrees"}
    if "fsdp2" not in flags:
        moments = {"exp_avg", "exp_avg_sq"}
        found = {name: keys for reading in gathered for name, keys in reading.items()}
        assert found[MATRIX] == found[VECTOR] == moments


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_state_that_the_replays_optimizer_does_not_keep_is_left_out(
    stage: str, job: Path, gathered: list[dict[str, set[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    said = replay(job, capsys, "--zero-stage", stage, "--step", "--optimizer", "sgd", "--learning-rate", str(RATE))
    assert "failed" not in said
    assert gathered
    assert not any(gathered)
