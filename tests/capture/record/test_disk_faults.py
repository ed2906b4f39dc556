"""A disk that fails at any call: the job computes what it would have, hears one warning, and what was written reads."""

import builtins
import errno
import io
import math
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capture.black_box.flight_recorder
import capture.file_format.atomic_write
from capture import Recorder, capture_files, read_micro_batch, recording

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES)
CALLS = ("open", "fsync", "replace", "unlink", "scandir", "listdir", "mkdir", "stat", "lstat")
SEGMENT_CALLS = ("write", "fdatasync", "ftruncate", "fstat")
IDS_BS = torch.tensor([[0, 5, 9, 7], [3, 3, 0, 0]])


class TinyConfig:
    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "tiny"}


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = TinyConfig()
        self.embedding = nn.Embedding(16, 4)

    def forward(self, input_ids: Tensor, scale: float = 1.0) -> Tensor:
        loss: Tensor = self.embedding(input_ids).logsumexp(-1).mean() * scale
        return loss


def train(folder: Path | None, **settings: Any) -> tuple[list[float], Recorder | None]:
    """Five steps of which the fourth has an infinite loss."""
    model = TinyModel()
    recorder = None if folder is None else recording(model, folder, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        loss = model((IDS_BS + step) % 16, scale=math.inf if step == 3 else 1.0)
        if recorder is not None:
            recorder.note(grad_norm=1.0)
        if step != 3:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if recorder is not None:
        recorder.close()
    return losses, recorder


@dataclass
class BadDisk:
    """Counts the calls that concern `folder`, and lets those fail whose numbers are `bad`."""

    folder: Path
    bad: range
    error: int = errno.EIO
    calls: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (*CALLS, *SEGMENT_CALLS):
            monkeypatch.setattr(os, name, self.watched(name, getattr(os, name)))
        monkeypatch.setattr(io, "open", self.watched("io.open", io.open))
        monkeypatch.setattr(builtins, "open", self.opened)

    def watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            self.look(name, args[0] if args else None)
            return call(*args, **kwargs)

        return watch

    def look(self, name: str, target: Any) -> None:
        is_ours = (
            threading.current_thread().name == "capture-writer"
            if isinstance(target, int)
            else isinstance(target, str | Path) and str(target).startswith(str(self.folder))
        )
        if is_ours:
            self.calls.append(name)
            if len(self.calls) - 1 in self.bad:
                self.failed.append(name)
                raise OSError(self.error, os.strerror(self.error))

    def opened(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        self.look("builtins.open", target)
        file = REAL_OPEN(target, *args, **kwargs)
        return Watched(file, self) if isinstance(target, int) else file


REAL_OPEN = io.open


class Watched:
    """An open file whose writing is watched, too."""

    def __init__(self, file: Any, disk: BadDisk) -> None:
        self.file, self.disk = file, disk

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.close()

    def fileno(self) -> int:
        return int(self.file.fileno())

    def writelines(self, parts: Any) -> None:
        self.disk.look("write", self.fileno())
        self.file.writelines(parts)

    def flush(self) -> None:
        self.disk.look("flush", self.fileno())
        self.file.flush()


KINDS: dict[str, dict[str, Any]] = {
    "last two": {"max_files": 2, "keep": "last"},
    "flight recorder": {"flight_recorder": 2},
    "segments": {"segment": 1500},
    "last segments": {"segment": 1500, "max_bytes": 3500, "keep": "last"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stays_bad", [True, False])
def test_a_disk_that_fails_at_any_call_changes_nothing_for_the_job(
    kind: str, stays_bad: bool, tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that a disk that fails is the folder's alone
    shared_memory.rmdir()
    undisturbed, _ = train(None)
    with monkeypatch.context() as patch:
        whole = BadDisk(tmp_path / "whole", range(0))
        whole.install(patch)
        train(tmp_path / "whole", **KINDS[kind])
    num_calls = len(whole.calls)
    assert {"open", "write", "flush", "fsync", "replace", "scandir", "mkdir"} <= set(whole.calls)
    assert ("unlink" in whole.calls) == kind.startswith("last")
    assert ("fdatasync" in whole.calls) == ("segment" in KINDS[kind])
    for first_bad in range(num_calls):
        folder = tmp_path / str(first_bad)
        bad = range(first_bad, 10**9 if stays_bad else first_bad + 1)
        disk = BadDisk(folder, bad, ERRORS[first_bad % len(ERRORS)])
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            disk.install(patch)
            losses, recorder = train(folder, **KINDS[kind])
        what = f"call {first_bad}, {whole.calls[first_bad]}"
        assert losses == undisturbed, what
        assert recorder is not None
        # A link that cannot be resolved is taken as it is, so this failure changes nothing.
        looked_up = {"lstat"}
        assert bool(set(disk.failed) - looked_up) == (recorder.failure is not None), what
        assert len(caught) == (recorder.failure is not None), what
        ends = recorder.num_written + recorder.num_dropped + recorder.num_not_kept + recorder.num_skipped
        assert recorder.num_seen == ends, what
        assert recorder.num_seen == (5 if (folder / "actor.json").exists() else 0), what
        if folder.is_dir():
            files = [read_micro_batch(path) for path in capture_files(folder)]
            assert len(files) >= recorder.num_written, what
        if not stays_bad:
            train(folder, flight_recorder=1)
            assert not [path for path in folder.iterdir() if path.suffix == ".tmp"], what


@pytest.mark.parametrize("fault", ["removed", "read-only", "a file"])
def test_a_folder_that_goes_away_changes_nothing_for_the_job(fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    undisturbed, _ = train(None)
    model = TinyModel()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with recording(model, folder) as recorder:
            model(IDS_BS)
            recorder.flush()
            if fault == "read-only":
                folder.chmod(0o500)
            else:
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()
                if fault == "a file":
                    folder.touch()
            for _ in range(3):
                model(IDS_BS)
    if folder.is_dir():
        folder.chmod(0o700)
    assert undisturbed == train(None)[0]
    is_root = os.geteuid() == 0
    assert len(caught) == (0 if fault == "read-only" and is_root else 1)
    assert recorder.num_seen == recorder.num_written + recorder.num_dropped


def test_temporaries_of_the_living_and_of_other_ranks_stay(tmp_path: Path) -> None:
    host, token = capture.file_format.atomic_write.HOST_DIGEST, capture.file_format.atomic_write._TOKEN
    dead = next(number for number in range(300_000, 400_000) if not Path(f"/proc/{number}").exists())
    me = os.getpid()
    stale = {
        f".actor_inputs_rank0_x.pkl.{host}-{dead}-00000000-1.tmp",
        f".actor_inputs_rank0_x.pkl.{host}-{me}-00000000-1.tmp",
        f".actor_inputs_rank0_x.pkl.00000000-{me}-00000000-1.tmp",
        f".actor.json.{host}-{dead}-00000000-1.tmp",
    }
    kept = {
        f".actor_inputs_rank0_x.pkl.{host}-{me}-{token}-99.tmp",
        f".actor_inputs_rank0_x.pkl.{host}-{os.getppid()}-00000000-1.tmp",
        f".actor_inputs_rank1_x.pkl.{host}-{dead}-00000000-1.tmp",
        f".actor.json.00000000-{dead}-00000000-1.tmp",
        ".notes.tmp",
    }
    for name in stale | kept:
        (tmp_path / name).touch()
    model = TinyModel()
    with recording(model, tmp_path):
        model(IDS_BS)
    assert {path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"} == kept
