"""Compare replays of the same inputs under several options, in one process, in blocks that alternate.

    python -m benchmarks side_by_side --inputs FOLDER "--backend fsdp2" "--backend deepspeed"

Each argument is one side. The first side once more is the control. A block is a pass over the inputs; the first block
of each side is not counted. It prints real tokens a second, of forward and backward, and the ratio to the first side.
"""

import gc
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from actor_init.world import World
from benchmarks.harness import Answers, Column, Contestant, Sample, alternate, make_parser, table
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
        blocks = {side: _block_of(spec, world, Path(folder)) for side, spec in zip(given.sides, specs, strict=True)}
        blocks[f"{first} (again)"] = blocks[first]
        answers = Answers(given, "side_by_side", writes=world.rank == 0)
        figures = alternate(blocks, answers, rounds=given.rounds)
    columns = (
        Column("real tokens/s", "speed", ",.0f"),
        Column("of the first", "speed", ".3f", of=first),
        Column("peak GiB, all sides' weights included", "peak", ".1f", 2**-30, reduce=max),
    )
    if world.rank == 0:
        print(f"{answers.machine}: {given.rounds} blocks a side\n\n{table('options', figures, columns)}")
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


def _block_of(spec: ReplaySpec, world: World, folder: Path) -> Contestant:
    replayer, paths = opened(spec, world, folder)

    def block(_: int) -> list[Sample]:
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
        return [{"speed": tokens / seconds, "peak": peak}]

    return block
