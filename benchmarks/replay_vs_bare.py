"""Measure the overhead of the replay: its passes and those of a bare loop alternate in one process.

    python -m benchmarks replay_vs_bare --inputs inputs/my-run --model llama-3.1-8b --max-inputs 12 --rounds 3

Both run the same sharded model, inputs and kernels. The bare loop packs, calls the model, takes the log-probs and runs
backward with only a timer around it; it shares no code with the replay's forward. A third series, the bare
loop again, is the control: how much two equal loops differ here. A round is each input once.
"""

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
from benchmarks.harness import Answers, Column, Contestant, Sample, alternate, make_parser, table
from benchmarks.sides import open_replayer
from capture.file_format.capture_file import read_micro_batch
from capture.file_format.micro_batch import MicroBatch
from replay.command_line.cli import parse_command_line
from replay.runlog.summary import find_peak_bytes

MAX_LENGTH = 2048  # of a packed row; the replay rounds to it too
COLUMNS = (
    Column("median ms", "s", ".2f", 1e3),
    Column("time / bare", "s", ".4f", of="bare"),
    Column("peak GiB", "peak", ".3f", 2**-30, reduce=max),
    Column("peak / bare", "peak", ".4f", of="bare"),
)


def main() -> int:
    given, replay_arguments = make_parser(__doc__, rounds=3).parse_known_args()
    # what the bare loop does
    spec = parse_command_line([*replay_arguments, "--packing", "--loss", "stand-in"]).args[0].spec
    with World.from_env(ParallelSpec()) as world:
        replayer, paths = open_replayer(spec, world, Path(tempfile.mkdtemp()))
        batches = [read_micro_batch(path) for path in paths]
        losses: dict[int, float] = {}

        def replay(number: int) -> list[Sample]:
            index = number % len(paths)
            replayed, error = replayer.replay(index, paths[index])
            if error:
                raise error
            record = replayed.record
            assert record.cost.seconds is not None
            losses[index] = record.result.loss or 0
            return [_sample(record.cost.seconds, find_peak_bytes(record), world.device)]

        def bare(number: int) -> list[Sample]:
            index = number % len(paths)
            seconds, peak, loss = _bare_pass(replayer.reopenable_actor.backend, batches[index], world.device)
            assert abs(loss - losses[index]) <= 1e-2 * abs(loss), (loss, losses[index])
            return [_sample(seconds, peak, world.device)]

        for number in range(len(paths)):
            replay(number)
        series: dict[str, Contestant] = {"replay": replay, "bare": bare, "bare again": bare}
        answers = Answers(given, "replay_vs_bare", more=replay_arguments)
        figures = alternate(series, answers, rounds=given.rounds * len(paths), warmup=len(paths))
    print(f"{answers.machine}: {len(figures['bare'])} passes a series\n\n{table('series', figures, COLUMNS)}")
    return 0


def _sample(seconds: float, peak: int, device: torch.device) -> Sample:
    return {"s": seconds} | ({"peak": peak} if device.type == "cuda" else {})


def _bare_pass(backend: Any, batch: MicroBatch, device: torch.device) -> tuple[float, int, float]:
    """Run forward and backward by hand, and return seconds, peak bytes and loss."""
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
    return seconds, peak, loss.item()


def _handles(backend: Any) -> tuple[Any, Any]:
    match backend:
        case DeepSpeedBackend(engine=engine):
            return engine, engine.backward
        case FSDP2Backend(model=model):
            return model, torch.Tensor.backward
        case other:
            raise TypeError(f"no bare loop for {type(other).__name__}")
