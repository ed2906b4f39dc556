"""Programs that run the same pass over the same input, in one process: how a block of passes of each is measured.

Each block begins with what the allocator cached given back and passes that are not measured: the weights of all sides
are on the GPU, and a cache that another left behind would make each pass ask the driver for memory anew.
"""

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch.profiler import ProfilerActivity, profile

from actor_init.world import World
from benchmarks.harness import Sample
from capture.file_format.capture_file import read_call
from replay.options.spec import ReplaySpec
from replay.profiling.profile_records import Interval, classify_work, divide_seconds
from replay.resolution.resolve import choose_loss, resolve
from replay.resolution.selection import select
from replay.runlog.summary import find_peak_bytes
from replay.runner.meter import Meter
from replay.runner.replayer import ReopenableActor, Replayer
from replay.verdict.weight_check import WeightChecker
from replay.watch.progress import Tracker


@dataclass(kw_only=True)
class Side:
    """One of the programs: how a pass is run, and what it took."""

    name: str
    run: Callable[[], tuple[float, int]]  # seconds, peak in bytes
    resident: int = 0  # bytes held between passes


def hold(build: Callable[[], Side], device: torch.device) -> Side:
    """Build a side, run its first pass, and note the bytes that it holds from then on."""
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    side = build()
    side.run()
    gc.collect()
    side.resident = torch.cuda.memory_allocated() - before if device.type == "cuda" else 0
    return side


def run_block(side: Side, device: torch.device, *, num_warmup: int, num_passes: int, number: int) -> Sample:
    """Return the median seconds `s` of a block's passes and, on a GPU, the `peak` without what other sides hold."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    seconds, peaks = [], []
    retries = _count_retries(device)
    for index in range(num_warmup + num_passes):
        held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        taken, peak = side.run()
        if index >= num_warmup:
            seconds.append(taken)
            peaks.append(peak - held + side.resident)
    retries = _count_retries(device) - retries
    full = f", the GPU was full {retries} times: the allocator gave its cache back" if retries else ""
    print(f"{number} {side.name}: {statistics.median(seconds) * 1e3:.1f} ms{full}", file=sys.stderr, flush=True)
    return {"s": statistics.median(seconds)} | ({"peak": max(peaks)} if device.type == "cuda" else {})


def _count_retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def open_replayer(spec: ReplaySpec, world: World, folder: Path) -> tuple[Replayer, Sequence[Path]]:
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


def open_replay(spec: ReplaySpec, world: World, name: str = "replay") -> Side:
    replayer, (path,) = open_replayer(spec, world, Path(mkdtemp()))

    def run() -> tuple[float, int]:
        replayed, error = replayer.replay(0, path)
        if error:
            raise error
        record = replayed.record
        assert record.cost.seconds is not None
        return record.cost.seconds, find_peak_bytes(record)

    return Side(name=name, run=run)


def time_pass(run: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Return the seconds of a call, with what the device still had to do, and the bytes that it peaked at."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def describe_parts(name: str, run: Callable[[], object], device: torch.device) -> str:
    """Say in milliseconds what kinds of work one profiled call takes on a GPU, and the longest gap between kernels."""
    if device.type != "cuda":
        return f"{name}: no kernels on a CPU"
    run()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        run()
        torch.cuda.synchronize()
    kernels = [
        Interval(event.time_range.start / 1e6, event.time_range.end / 1e6, classify_work(event.name))
        for event in recorded.events() or []
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    begin, end = min(kernel.begin for kernel in kernels), max(kernel.end for kernel in kernels)
    seconds = divide_seconds(kernels, begin, end)
    parts = [f"{work.value} {1e3 * taken:.1f} ms" for work, taken in sorted(seconds.items(), key=lambda item: -item[1])]
    gap = find_longest_gap(kernels)
    return f"{name}: {', '.join(parts)}; longest gap {1e3 * gap:.2f} ms, {gap / (end - begin):.1%} of the pass"


def find_longest_gap(kernels: Iterable[Interval]) -> float:
    """Return the seconds of the longest time in which none of these runs, between the first and the last of them."""
    longest, busy_until = 0.0, math.inf
    for kernel in sorted(kernels):
        longest = max(longest, kernel.begin - busy_until)
        busy_until = kernel.end if busy_until == math.inf else max(busy_until, kernel.end)
    return longest
