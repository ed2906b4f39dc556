"""Compare replays of the same inputs under several options, in one process, in blocks that alternate.

    python -m benchmarks side_by_side --inputs FOLDER "--backend fsdp2" "--backend deepspeed"

Each argument is one side. The first side once more is the control. A block is a pass over the inputs; the first block
of each side is not counted. It prints real tokens a second, of forward and backward, and the ratio to the first side,
and where the time of the first input goes, from one profiled pass of each side.
"""

import gc
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from actor_init.world import World
from benchmarks.harness import Answers, Column, Contestant, Sample, alternate, make_parser, table
from benchmarks.sides import describe_parts, open_replayer
from replay.command_line.cli import parse_command_line
from replay.runlog.summary import find_peak_bytes, sum_phase_seconds
from replay.runner.replayer import Replayer


def main() -> int:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--common", default="", help="options of all sides")
    parser.add_argument("--max-inputs", type=int, default=10)
    parser.add_argument("sides", nargs="+", metavar="OPTIONS")
    given = parser.parse_args()
    common = ["--inputs", str(given.inputs), "--max-inputs", str(given.max_inputs), *shlex.split(given.common)]
    specs = [parse_command_line([*common, *shlex.split(side)]).args[0].spec for side in given.sides]
    first = given.sides[0]
    with World.from_env(specs[0].actor.parallel) as world, TemporaryDirectory() as folder:
        replayers = {
            side: open_replayer(spec, world, Path(folder)) for side, spec in zip(given.sides, specs, strict=True)
        }
        blocks: dict[str, Contestant] = {
            side: partial(_run_block, replayer, paths, world.device) for side, (replayer, paths) in replayers.items()
        }
        blocks[f"{first} (again)"] = blocks[first]
        answers = Answers(given, "side_by_side", writes=world.rank == 0)
        figures = alternate(blocks, answers, rounds=given.rounds)
        if world.rank == 0:
            print(f"{answers.machine}: {given.rounds} blocks a side\n\n{_make_table(first, figures)}\n", flush=True)
        for side, (replayer, paths) in replayers.items():
            parts = describe_parts(f"first input, {side}", partial(replayer.replay, 0, paths[0]), world.device)
            if world.rank == 0:
                print(parts, flush=True)
    return 0


def _make_table(first: str, figures: Mapping[str, Sequence[Sample]]) -> str:
    columns = (
        Column("real tokens/s", "speed", ",.0f"),
        Column("of the first", "speed", ".3f", of=first),
        Column("peak GiB, all sides' weights included", "peak", ".1f", 2**-30, reduce=max),
    )
    return table("options", figures, columns)


def _run_block(replayer: Replayer, paths: Sequence[Path], device: torch.device, _: int) -> list[Sample]:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    seconds, tokens, peak = 0.0, 0, 0
    for path in paths:
        replayed, error = replayer.replay(0, path)
        if error:
            raise error
        seconds += sum_phase_seconds(replayed.record)
        tokens += replayed.record.input.real_tokens
        peak = max(peak, find_peak_bytes(replayed.record))
    return [{"speed": tokens / seconds, "peak": peak}]
