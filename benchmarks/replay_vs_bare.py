"""Measure the overhead of the replay: its passes and those of a bare loop alternate in one process.

    python benchmarks/replay_vs_bare.py --inputs inputs/my-run --model llama-3.1-8b --max-inputs 12 --rounds 3

Both run the same sharded model, inputs and kernels. The bare loop packs, calls the model, takes the log-probs and runs
backward with only a timer around it; it shares no code with the replay's forward. A third series, the bare
loop again, is the control: how much two equal loops differ here.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from actor_init.backends.deepspeed import DeepSpeedBackend
from actor_init.backends.fsdp2 import FSDP2Backend
from actor_init.spec import ParallelSpec
from actor_init.world import World
from benchmarks.side_by_side import opened
from capture.file_format.capture_file import read_micro_batch
from capture.file_format.micro_batch import MicroBatch
from replay.command_line.cli import parse_command_line
from replay.runlog.records import PassRecord
from replay.runlog.summary import find_peak_bytes

MAX_LENGTH = 2048  # of a packed row; the replay rounds to it too


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments, replay_arguments = parser.parse_known_args()
    spec = parse_command_line(replay_arguments).args[0].spec
    assert spec.actor.packing, "the bare loop packs its rows"
    with World.from_env(ParallelSpec()) as world:
        replayer, paths = opened(spec, world, Path(tempfile.mkdtemp()))
        actor = replayer.actor
        batches = [read_micro_batch(path) for path in paths]
        series: dict[str, list[tuple[float, int]]] = {"replay": [], "bare": [], "bare again": []}
        for round_index in range(arguments.rounds + 1):
            for index, (path, batch) in enumerate(zip(paths, batches, strict=True)):
                replayed, error = replayer.replay(index, path)
                if error:
                    raise error
                record = replayed.record
                measured = {"replay": _of(record)}
                measured["bare"] = _bare_pass(actor.backend, batch, world.device, record)
                measured["bare again"] = _bare_pass(actor.backend, batch, world.device, record)
                if round_index:  # the first round is warm-up
                    for name, values in measured.items():
                        series[name].append(values)
        _print(series, world.device)
    return 0


def _of(record: PassRecord) -> tuple[float, int]:
    assert record.cost.seconds is not None
    return record.cost.seconds, find_peak_bytes(record)


def _bare_pass(backend: Any, batch: MicroBatch, device: torch.device, record: PassRecord) -> tuple[float, int]:
    """Run forward and backward by hand, and return seconds and peak bytes."""
    rows = [ids[mask] for ids, mask in zip(batch.sequences_BS, batch.attention_mask_BS, strict=True)]
    lengths = [len(row) for row in rows]
    input_ids = torch.cat(rows)[None].to(device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    borders = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(device)
    assert batch.action_mask_BA is not None
    num_prompt = batch.sequences_BS.shape[1] - batch.action_mask_BA.shape[1]
    is_action = torch.cat(
        [F.pad(a, (num_prompt, 0))[m] for a, m in zip(batch.action_mask_BA, batch.attention_mask_BS, strict=True)]
    )
    is_action[borders[:-1].long().cpu()] = False
    where = is_action.nonzero()[:, 0].to(device)
    targets = input_ids[0, where]

    model, backward = _handles(backend)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    logits = model(
        input_ids=input_ids,
        position_ids=positions,
        use_cache=False,
        cu_seq_lens_q=borders,
        cu_seq_lens_k=borders,
        max_length_q=MAX_LENGTH,
        max_length_k=MAX_LENGTH,
    ).logits
    loss = F.cross_entropy(logits[0, where - 1].float(), targets)
    del logits
    backward(loss)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    backend.end_window(step=False)
    assert abs(loss.item() - (record.result.loss or 0)) <= 1e-2 * abs(loss.item()), (loss.item(), record.result.loss)
    return seconds, peak


def _handles(backend: Any) -> tuple[Any, Any]:
    match backend:
        case DeepSpeedBackend(engine=engine):
            return engine, engine.backward
        case FSDP2Backend(model=model):
            return model, torch.Tensor.backward
        case other:
            raise TypeError(f"no bare loop for {type(other).__name__}")


def _print(series: dict[str, list[tuple[float, int]]], device: torch.device) -> None:
    median = {name: statistics.median(seconds for seconds, _ in values) for name, values in series.items()}
    peak = {name: max(size for _, size in values) for name, values in series.items()}
    print("\n| series | median ms | time / bare | peak GiB | peak / bare |\n| --- | --- | --- | --- | --- |")
    for name in series:
        ratios = [a / b for (a, _), (b, _) in zip(series[name], series["bare"], strict=True)]
        memory = f"{peak[name] / 2**30:.3f} | {peak[name] / peak['bare']:.4f}" if device.type == "cuda" else "- | -"
        print(f"| {name} | {median[name] * 1e3:.2f} | {statistics.median(ratios):.4f} | {memory} |")
    print(f"\n{len(series['bare'])} passes a series; time / bare is the median of the ratios of neighbouring passes")


if __name__ == "__main__":
    sys.exit(main())
