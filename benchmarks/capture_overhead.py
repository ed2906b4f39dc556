"""What recording costs a training step: steps with and without it alternate in one process, beside a control.

    python benchmarks/capture_overhead.py --steps 50
    python benchmarks/capture_overhead.py --steps 200 --hidden 2048 --device cuda

Prints the ratio of medians (recorded / bare) and of the 99th percentiles, the same for two bare kinds (the control: how
far the ratio is from 1 by chance), the time that the job's thread spends in the hook beside a bare copy of the same
tensors, bytes a pass beside torch.save's, and how long a ring of 64 passes takes to reach the disk.
"""

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from capture import Recorder, capture_files, recording
from capture.host_copy import copy_to_host

VOCABULARY = 32_000
STEPS_A_ROUND = 4
KINDS = ("bare", "control", "files", "ring")


class Model(nn.Module):
    def __init__(self, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 8, 4 * hidden, dropout=0.0, batch_first=True) for _ in range(num_layers)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden_BSH = self.embedding(input_ids)
        for layer in self.layers:
            hidden_BSH = layer(hidden_BSH)
        return {"loss": (hidden_BSH.square().mean(-1) * attention_mask).mean()}


class Job:
    def __init__(self, given: argparse.Namespace) -> None:
        self.device = torch.device(given.device)
        torch.manual_seed(0)
        self.model = Model(given.hidden, given.layers).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        ids_BS = torch.randint(VOCABULARY, (given.rows, given.length), device=self.device)
        mask_BS = torch.ones_like(ids_BS)
        mask_BS[:, given.length * 3 // 4 :] = 0
        self.batch = {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": ids_BS * mask_BS}

    def step(self, recorder: Recorder | None) -> float:
        self._wait()
        began = time.perf_counter()
        loss = self.model(**self.batch)["loss"]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if recorder is not None:
            recorder.note(grad_norm=norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (("hidden", 256), ("layers", 2), ("rows", 4), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    job = Job(given)
    with tempfile.TemporaryDirectory() as folder:
        compare_steps(job, given.steps, Path(folder))
        compare_hook(job, Path(folder) / "hook")
        compare_bytes(job, Path(folder) / "bytes")
        time_flush(job, Path(folder) / "flush")


def compare_steps(job: Job, num_steps: int, folder: Path) -> None:
    """Every round has a few steps of each kind, and a first one that is not counted."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for round_ in range(-(-num_steps // STEPS_A_ROUND)):
        for kind in KINDS[round_ % len(KINDS) :] + KINDS[: round_ % len(KINDS)]:
            recorder = None
            if kind in ("files", "ring"):
                recorder = recording(job.model, folder / kind, ring=64 if kind == "ring" else None)
            seconds[kind] += [job.step(recorder) for _ in range(1 + STEPS_A_ROUND)][1:]
            if recorder is not None:
                recorder.close()
    bare = seconds.pop("bare")
    print(
        f"bare       median {median(bare) * 1e3:.2f} ms, p99 {p99(bare) * 1e3:.2f} ms, {len(bare)} steps of each kind"
    )
    for kind, all_taken in seconds.items():
        paired = [one / other for one, other in zip(all_taken, bare, strict=True)]
        print(
            f"{kind:<10} median {median(all_taken) / median(bare):.4f}, of pairs {median(paired):.4f}, "
            f"p99 {p99(all_taken) / p99(bare):.3f} of bare"
        )


def p99(seconds: list[float]) -> float:
    return quantiles(seconds, n=100)[98]


def compare_hook(job: Job, folder: Path) -> None:
    """The pre-hook alone, called as the model would call it."""
    copy = microseconds(lambda: copy_to_host(job.batch))
    print(f"copy       {copy:.0f} us of the job's thread, a bare copy of the same tensors")
    for name, ring in (("files", None), ("ring", 64)):
        recorder = recording(job.model, folder / name, ring=ring, max_queued=10_000)

        def hook(recorder: Recorder = recorder) -> None:
            recorder._before_forward(job.model, (), job.batch)
            recorder._after_forward(job.model, (), None)

        print(f"hook       {microseconds(hook):.0f} us of the job's thread, {name}")
        recorder.close()


def microseconds(call: Callable[[], object], num_calls: int = 100) -> float:
    taken = []
    for _ in range(num_calls):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
        time.sleep(0.005)  # the step, in which the writer works
    return median(taken) * 1e6


def compare_bytes(job: Job, folder: Path) -> None:
    saved = io.BytesIO()
    torch.save({name: tensor.cpu() for name, tensor in job.batch.items()}, saved)
    for name, reproduce in (("files", False), ("reproduce", True)):
        with recording(job.model, folder / name, reproduce=reproduce):
            job.step(None)
        [path] = capture_files(folder / name)
        size = path.stat().st_size
        print(f"bytes      {size:,} a pass, {name}; torch.save {saved.tell():,}: {size / saved.tell():.2f}")


def time_flush(job: Job, folder: Path) -> None:
    with recording(job.model, folder, ring=64, max_queued=128) as recorder:
        with torch.no_grad():
            for _ in range(64):
                job.model(**job.batch)
        recorder.flush()
        began = time.perf_counter()
        recorder.note(loss=float("nan"))
        recorder.flush()
        print(f"flush      {time.perf_counter() - began:.2f} s for {len(capture_files(folder))} passes of the ring")


if __name__ == "__main__":
    main()
