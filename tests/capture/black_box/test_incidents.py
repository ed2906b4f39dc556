"""Jobs that end badly: what they leave is whole, and they end as they would have without a recorder."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import capture
from capture import capture_files, read_micro_batch, recording
from capture.black_box.incidents import read_incidents
from capture.file_format.capture_file import read_call
from capture.file_format.manifest import check_folder
from tests.helpers.small_jobs import TinyModel, steps_in
from tests.warm import warm_bin

ROOT = Path(capture.__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("doomed")
    done = subprocess.run(
        [warm_bin() / "python", ROOT / "tests" / "helpers" / "doomed_jobs.py", folder],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "ending", "where", "steps"),
    [
        ("SIGTERM", "signal 15", "SIGTERM", [2, 3, 4, 5]),
        ("SIGQUIT", "signal 3", "SIGQUIT", [2, 3, 4, 5]),
        ("SIGTERM in C", "signal 15", "SIGTERM", [2, 3, 4, 5]),
        ("SIGTERM handled", "exit 9", "SIGTERM", [2, 3, 4, 5]),
        ("SIGINT", "exit 7", "SIGINT", [2, 3, 4, 5]),
        ("SIGUSR1", "exit 0", "SIGUSR1", [2, 3, 4, 5]),
        ("child", "exit 0", None, []),
        ("uncaught", "exit 1", "main thread", [2, 3, 4, 5]),
        ("os._exit", "exit 5", "without a word", [0, 1, 2, 3, 4, 5]),
        ("SIGABRT", "signal 6", "without a word", [2, 3, 4, 5]),
        ("SIGKILL", "signal 9", "without a word", [2, 3, 4, 5]),
        ("SIGKILL soon in a forward", "signal 9", "without a word", [2, 3, 4, 5]),
        ("SIGKILL in a forward", "signal 9", "without a word", [3, 4, 5, 6]),
        ("SIGKILL after a step", "signal 9", "without a word", [3, 4, 5, 6]),
        ("left open", "exit 0", None, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_job_ends_as_it_would_have_and_leaves_its_last_passes(
    job: str, ending: str, where: str | None, steps: list[int], ended: tuple[Path, dict[str, str]]
) -> None:
    folder, endings = ended
    assert endings[job] == ending
    incidents = [found for record in read_incidents(folder / job) for found in record.incidents]
    assert [found.where for found in incidents] == ([] if where is None else [where])
    assert steps_in(folder / job) == steps
    checked = check_folder(folder / job)
    assert checked.is_whole
    assert job == "os._exit" or checked.uncommitted == []
    assert [path for path in (folder / job).iterdir() if path.suffix == ".tmp"] == []


@pytest.mark.parametrize(
    ("job", "has_outputs", "has_steps"),
    [
        ("SIGKILL soon in a forward", [True, True, True, False], [True, True, True, False]),
        ("SIGKILL in a forward", [True] * 3 + [False], [True] * 3 + [False]),
        ("SIGKILL after a step", [True] * 4, [True] * 4),
    ],
)
def test_a_kill_costs_what_the_thread_was_not_roused_for(
    job: str, has_outputs: list[bool], has_steps: list[bool], ended: tuple[Path, dict[str, str]]
) -> None:
    calls = sorted(map(read_call, capture_files(ended[0] / job)), key=lambda call: call.origin.step or 0)
    assert ["loss" in call.outputs for call in calls] == has_outputs
    assert [call.weights is not None for call in calls] == has_outputs
    assert [call.step is not None for call in calls] == has_steps


def test_handlers_are_put_back(tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers], sys.excepthook
    model = TinyModel()
    with recording(model, tmp_path / "a") as first:
        with recording(model, tmp_path / "b") as second:
            assert first.handles_signals
            assert second.handles_signals
            model(torch.ones(2, 4, dtype=torch.long))
        assert signal.getsignal(signal.SIGTERM) != before[0][0]
    assert ([signal.getsignal(number) for number in numbers], sys.excepthook) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_handler_that_the_job_puts_on_top_stays(tmp_path: Path) -> None:
    def own(number: int, frame: Any) -> None:
        pass

    before = signal.getsignal(signal.SIGUSR1)
    model = TinyModel()
    try:
        with recording(model, tmp_path):
            signal.signal(signal.SIGUSR1, own)
            model(torch.ones(2, 4, dtype=torch.long))
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_kills_leave_no_torn_file_and_no_stale_temporary(tmp_path: Path) -> None:
    """A step waits for the disk here, so that the number of passes lost does not depend on the machine's."""
    command = [str(warm_bin() / "python"), "-m", "benchmarks", "capture_kill", "--kills", "12", "--step-seconds", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 kills: 0 torn files, 0 stale temporaries" in done.stdout


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loaders_work_beside_a_recording(context: str, tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path) as recorder:
        loader = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context=context)
        for rows in loader:
            model(rows)
        del loader
    assert (recorder.num_written, recorder.failure) == (3, None)
    batches = [read_micro_batch(path) for path in capture_files(tmp_path)]
    assert [batch.sequences_BS[:, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    assert read_incidents(tmp_path) == []
