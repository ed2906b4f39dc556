"""Kill recording jobs with SIGKILL at random moments, and check what they leave behind.

    python -m benchmarks capture_kill --kills 200
    200 kills: 0 torn files, 0 stale temporaries after the next start, 0 missing of 2,455 committed passes;
    passes lost a kill: at most 1, 0.20 on average

All jobs record into one folder, as restarts of a job do. Each is forked from a process that has loaded torch, so a
kill does not pay for imports. A job reports over a pipe which passes its model has returned from; a pass without a
file is lost.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from capture import CaptureError, capture_files, read_micro_batch, recording
from capture.file_format.manifest import check_folder

IDS_BS = torch.arange(4096).view(4, 1024)


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(input_ids)
        return embedded.sum()


@dataclass(kw_only=True)
class Findings:
    num_kills: int = 0
    num_committed: int = 0
    torn: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.num_kills} kills: {len(self.torn)} torn files, {len(self.stale)} stale temporaries after the next "
            f"start, {len(self.missing)} missing of {self.num_committed:,} committed passes;\n"
            f"passes lost a kill: at most {max(self.lost)}, {sum(self.lost) / len(self.lost):.2f} on average"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--segment", help="As in capture run; without it a file a pass.")
    parser.add_argument("--step-seconds", type=float, default=0.01, help="0: a step waits for the disk instead.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = kill_jobs(
            Path(folder), num_kills=given.kills, seed=given.seed, step_seconds=given.step_seconds, segment=given.segment
        )
    print(found)
    return 1 if found.torn or found.stale or found.missing or max(found.lost) > 1 else 0


def kill_jobs(folder: Path, *, num_kills: int, seed: int, step_seconds: float, segment: str | None) -> Findings:
    draw, found = random.Random(seed), Findings(num_kills=num_kills)
    before: set[Path] = set()
    for _ in range(num_kills):
        num_passes = _kill_one(folder, draw, step_seconds, segment)
        files = set(capture_files(folder))
        for path in sorted(files - before):
            try:
                read_micro_batch(path)
            except CaptureError as error:
                found.torn.append(str(error))
        found.num_committed += len(files - before)
        found.lost.append(max(0, num_passes - len(files - before)))
        before = files
        _start_again(folder, segment)
        gone = files - set(capture_files(folder))
        found.missing.extend(sorted(path.name for path in gone))
        before = set(capture_files(folder))
        found.stale.extend(path.name for path in folder.rglob("*.tmp"))
    checked = check_folder(folder)
    found.missing.extend(checked.missing)
    found.torn.extend(checked.damaged.values())
    found.stale.extend([*checked.num_torn_bytes, *checked.without_index])
    return found


def _kill_one(folder: Path, draw: random.Random, step_seconds: float, segment: str | None) -> int:
    """Kill one job and return how many passes its model had returned from."""
    reading, writing = os.pipe()
    job = os.fork()
    if not job:
        os.close(reading)
        _job(folder, writing, step_seconds, segment)
    os.close(writing)
    num_passes = 0
    for _ in range(draw.randrange(1, 25)):
        num_passes += len(os.read(reading, 1))
    deadline = time.perf_counter() + draw.random() * max(step_seconds, 0.005)
    while time.perf_counter() < deadline:
        pass
    os.kill(job, signal.SIGKILL)
    os.waitpid(job, 0)
    while said := os.read(reading, 64):
        num_passes += len(said)
    os.close(reading)
    return num_passes


def _job(folder: Path, writing: int, step_seconds: float, segment: str | None) -> None:
    try:
        model = TinyModel()
        recorder = recording(model, folder, segment=segment)
        while True:
            model(IDS_BS)
            os.write(writing, b".")
            if step_seconds:
                time.sleep(step_seconds)
            else:
                recorder.flush()
    finally:
        os._exit(3)


def _start_again(folder: Path, segment: str | None) -> None:
    job = os.fork()
    if not job:
        try:
            model = TinyModel()
            with recording(model, folder, segment=segment):
                model(IDS_BS)
        finally:
            os._exit(0)
    os.waitpid(job, 0)
