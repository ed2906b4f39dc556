"""Compare replays of the same inputs under several options, in one process, in blocks that alternate.

    python benchmarks/side_by_side.py --inputs FOLDER "--backend fsdp2" "--backend deepspeed"

Each argument is one side. The first side once more is the control. A block is a pass over the inputs; the first block
of each side is not measured. It prints real tokens a second, of forward and backward, and the ratio to the first side.
"""

import argparse
import gc
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from actor_init.world import World
from capture.file_format.capture_file import read_call
from replay.command_line.cli import parse_command_line
from replay.options.spec import ReplaySpec
from replay.resolution.resolve import choose_loss, resolve
from replay.resolution.selection import select
from replay.runlog.summary import find_peak_bytes, sum_phase_seconds
from replay.runner.meter import Meter
from replay.runner.replayer import ReopenableActor, Replayer
from replay.verdict.weight_check import WeightChecker
from replay.watch.progress import Tracker

Block = Callable[[], tuple[float, int]]  # one pass over the inputs: real tokens a second, peak in bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--common", default="", help="options of all sides")
    parser.add_argument("--max-inputs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each side")
    parser.add_argument("sides", nargs="+", metavar="OPTIONS")
    arguments = parser.parse_args()
    common = ["--inputs", str(arguments.inputs), "--max-inputs", str(arguments.max_inputs)]
    common += shlex.split(arguments.common)
    specs = [parse_command_line([*common, *shlex.split(side)]).args[0].spec for side in arguments.sides]
    with World.from_env(specs[0].actor.parallel) as world, TemporaryDirectory() as folder:
        blocks = [_block_of(spec, world, Path(folder)) for spec in specs]
        names = [*arguments.sides, f"{arguments.sides[0]} (again)"]
        blocks.append(blocks[0])
        found: list[list[tuple[float, int]]] = [[] for _ in blocks]
        for index in range(arguments.rounds + 1):
            for name, block, results in zip(names, blocks, found, strict=True):
                speed, highest = block()
                print(f"{index} {name}: {speed:,.0f} real tokens/s", file=sys.stderr, flush=True)
                if index:
                    results.append((speed, highest))
    print("| options | real tokens/s | of the first | peak GiB, all sides' weights included |")
    print("| --- | --- | --- | --- |")
    for name, results in zip(names, found, strict=True):
        ratio = statistics.median(one[0] / first[0] for one, first in zip(results, found[0], strict=True))
        peak = max(highest for _, highest in results) / 2**30
        print(f"| {name} | {statistics.median(one for one, _ in results):,.0f} | {ratio:.3f} | {peak:.1f} |")
    return 0


def opened(spec: ReplaySpec, world: World, folder: Path) -> tuple[Replayer, Sequence[Path]]:
    """Open what a replay with these options runs, and return it with its inputs."""
    selection = select(spec.inputs, world.data_rank, world.num_data_ranks)
    first_call = read_call(selection.inputs[0])
    resolved = resolve(spec, selection, first_call, world, choose_loss(spec, selection, first_call), None)
    source = resolved.source
    actor = ReopenableActor(resolved.actor, source, world)
    meter = Meter.for_device(world.device)
    replayer = Replayer(resolved, world, actor, meter, Tracker(folder, world.rank), WeightChecker(source))
    print(dict(actor.backend.facts()), source.head, file=sys.stderr)
    return replayer, selection.inputs


def _block_of(spec: ReplaySpec, world: World, folder: Path) -> Block:
    replayer, paths = opened(spec, world, folder)

    def block() -> tuple[float, int]:
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        seconds, tokens, peak = 0.0, 0, 0
        for path in paths:
            replayed, error = replayer.replay(0, path)
            if error:
                raise error
            seconds += sum_phase_seconds(replayed.record)
            tokens += replayed.record.input.real_tokens
            peak = max(peak, find_peak_bytes(replayed.record))
        return tokens / seconds, peak

    return block


if __name__ == "__main__":
    sys.exit(main())
