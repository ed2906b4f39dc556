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

NUM_PASSES = 60


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


def main() -> int:
    print("rows x tokens   clone us   note us   note_next us")
    for rows, length in ((8, 1024), (8, 8192)):
        ids_BS = torch.randint(64, (rows, length))
        noted = {name: torch.rand(rows, length) for name in ("advantages", "old_log_probs")}
        model, spent = Scorer(), {"clone": list[float](), "note": list[float](), "note_next": list[float]()}
        with (
            tempfile.TemporaryDirectory() as folder,
            recording(model, Path(folder) / "captures", reproduce=True) as recorder,
        ):
            for _ in range(NUM_PASSES):
                spent["note_next"].append(seconds(lambda: recorder.note_next(ref_log_probs=noted["advantages"])) * 2)
                model(ids_BS)
                spent["note"].append(seconds(lambda: recorder.note(**noted)))
                spent["clone"].append(seconds(lambda: [one.clone() for one in noted.values()]))
                recorder.flush()
        clone, note, following = (statistics.median(times) * 1e6 for times in spent.values())
        print(f"{rows:>4} x {length:>6}   {clone:>8.0f}   {note:>7.0f}   {following:>12.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
