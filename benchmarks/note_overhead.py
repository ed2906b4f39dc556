"""Measure what `recorder.note` of tensors costs a job's thread, beside a clone of the same tensors.

    python benchmarks/note_overhead.py

    rows x tokens   clone us   note us   note_next us
        8 x  1024        ...

Medians of calls that alternate; the writer's thread works beside them, as in a job.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from capture import recording

NUM_PASSES = 20


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        total: Tensor = self.embedding(input_ids).sum()
        return total


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(rows: int, length: int) -> dict[str, float]:
    """Return the median seconds of each way to hand over two tensors."""
    ids_BS = torch.randint(64, (rows, length))
    noted = {name: torch.rand(rows, length) for name in ("advantages", "old_log_probs")}
    model = Scorer()
    with tempfile.TemporaryDirectory() as folder:
        recorder = recording(model, Path(folder) / "captures", reproduce=True)
        ways: dict[str, Callable[[], object]] = {
            "clone": lambda: [one.clone() for one in noted.values()],
            "note": lambda: recorder.note(**noted),
            "note_next": lambda: recorder.note_next(**noted),
        }
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(NUM_PASSES):
            model(ids_BS)
            recorder.flush()
            for name, work in ways.items():
                spent[name].append(seconds(work))
        recorder.close()
    return {name: statistics.median(times) for name, times in spent.items()}


def main() -> int:
    print("rows x tokens   clone us   note us   note_next us")
    for rows, length in ((8, 256), (8, 2048)):
        clone, note, following = (1e6 * one for one in medians(rows, length).values())
        print(f"{rows:>4} x {length:>6}   {clone:>8.0f}   {note:>7.0f}   {following:>12.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
