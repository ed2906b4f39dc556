"""A window of fewer passes than the others, as at the end of an epoch, is followed by every backend.

About 15 seconds: two recordings in this process, and replays of them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from capture import recording
from replay.command_line.cli import main
from tests.trainers.common import make_batches, make_model

pytestmark = pytest.mark.usefixtures("one_world", "proofs_once")

SIZES = [2, 1, 2]
NUM_PASSES = sum(SIZES)


def record_job(folder: Path, divisors: list[int]) -> list[str]:
    """Record a step for each of SIZES, whose losses are divided by `divisors`; return the replay's arguments."""
    model: Any = make_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with recording(model, folder / "captures", reproduce=True):
        batches = iter(make_batches(NUM_PASSES))
        for size, divisor in zip(SIZES, divisors, strict=True):
            for _ in range(size):
                (model(**next(batches)).loss / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()
    places = {"--inputs": folder / "captures", "--model": folder / "model", "--log-folder": folder / "logs"}
    return [word for option, place in places.items() for word in (option, str(place))]


@pytest.fixture(scope="module")
def sound_job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return record_job(tmp_path_factory.mktemp("job"), SIZES)


@pytest.mark.parametrize(
    "flags", [(), ("--zero-stage", "0"), ("--zero-stage", "3"), ("--backend", "fsdp2"), ("--backend", "ddp")]
)
def test_every_window_of_a_sound_job_is_judged(
    flags: tuple[str, ...], sound_job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*sound_job, *flags]) == 0
    screen = capsys.readouterr().out
    assert "verdict    REPRODUCED\n" in screen
    assert f"{NUM_PASSES} of {NUM_PASSES} passes and {len(SIZES)} of {len(SIZES)} steps judged" in screen


def test_a_short_window_that_is_divided_as_a_full_one_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*record_job(tmp_path, [2, 2, 2]), "--backend", "ddp"]) == 0
    screen = capsys.readouterr().out
    assert "DIFFERS" in screen
    assert "each loss is divided by the 2 passes of a full step, and the job's step 2 has 1" in screen
