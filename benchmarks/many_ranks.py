"""Measure recordings of many ranks and passes: looking at a million, what one costs in memory, 64 that write at once.

    python -m benchmarks many_ranks inspect --ranks 512 --passes 1000000
    python -m benchmarks many_ranks memory --segment 64MB
    python -m benchmarks many_ranks writers --processes 64 --segment 64MB

`inspect` makes segments of real passes among holes, with whole indexes, so a million of them take little of the disk.
`memory` records with tracemalloc on. `writers` alternates one process and many, each step with a pause as a device
would make, and with a control that records nothing.
"""

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.capture_kill import TinyModel
from benchmarks.harness import Answers, Column, Sample, alternate, make_parser, table
from capture import recording
from capture.file_format.actor_config import write_actor_config
from capture.file_format.capture_file import encode_call, read_call
from capture.file_format.listing import list_captures
from capture.file_format.manifest import check_folder
from capture.file_format.micro_batch import Origin
from capture.file_format.segment import index_path_of
from capture.file_format.segment_record import RECORD_BYTES

PASS_BYTES = 16_384  # from one pass to the next, in made segments
BEGINNING = 1_760_000_000_000_000
IDS_BS = torch.arange(4 * 256).view(4, 256)


def main() -> int:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    inspect = commands.add_parser("inspect")
    inspect.add_argument("--ranks", type=int, default=512)
    inspect.add_argument("--passes", type=int, default=1_000_000)
    memory = commands.add_parser("memory")
    memory.add_argument("--passes", type=int, nargs=2, default=[1000, 5000])
    writers = commands.add_parser("writers")
    writers.add_argument("--processes", type=int, default=64)
    writers.add_argument("--steps", type=int, default=40)
    writers.add_argument("--rounds", type=int, default=3, help="that count")
    writers.add_argument("--step-seconds", type=float, default=0.25)
    for one in (memory, writers):
        one.add_argument("--segment", help="As in capture run; without it a file a pass.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        match given.command:
            case "inspect":
                look_at_many(Path(folder), num_ranks=given.ranks, num_passes=given.passes)
            case "memory":
                measure_memory(Path(folder), given.passes, given.segment)
            case _:
                write_at_once(Path(folder), given)
    return 0


def look_at_many(folder: Path, *, num_ranks: int, num_passes: int) -> None:
    write_actor_config(folder, {"model_type": "llama"}, "made")
    each = num_passes // num_ranks
    for rank in range(num_ranks):
        make_segment(folder, rank, num_ranks, each)
    files = [path for path in folder.rglob("*") if path.is_file()]
    on_disk = sum(path.stat().st_blocks * 512 for path in files)
    made = f"{each * num_ranks:,} passes of {num_ranks} ranks"
    print(f"made {made}: {len(files)} files, {on_disk / 1e6:.0f} MB on the disk")
    for what in (str(folder), "inputs/sample"):  # the second one is a control, of 40 files
        before, began = used(), time.perf_counter()
        subprocess.run([sys.executable, "replay", "inspect", what], check=True, stdout=subprocess.DEVNULL)
        took, processor = time.perf_counter() - began, used() - before
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(
            f"replay inspect {what}: {took:.2f} s, {processor:.2f} s of processors, {peak / 1e6:.0f} MB at most so far"
        )
    began = time.perf_counter()
    captures = list_captures(folder)
    print(
        f"listed for a selection: {len(captures):,} in {time.perf_counter() - began:.2f} s, "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB at most"
    )
    path = captures[0].path
    before, began = num_read(), time.perf_counter()
    read_call(path)
    took, num_bytes = time.perf_counter() - began, num_read() - before
    print(f"one pass of {path.parent.name}: {1e3 * took:.2f} ms, {num_bytes:,} bytes read")


def make_segment(folder: Path, rank: int, num_ranks: int, num_passes: int) -> None:
    """Make one segment of a rank: the first pass real, the others holes of the same length."""
    origin = Origin(source="", rank=rank, world_size=num_ranks, step=0, versions={"torch": "2.13.0"}, model_name="made")
    mask_BS = torch.ones_like(IDS_BS)
    mask_BS[:, 200:] = 0
    encoded = encode_call({"input_ids": IDS_BS, "attention_mask": mask_BS}, {}, trains=True, origin=origin)
    head, record, data = encoded.segment_head(), encoded.segment_record(), b"".join(encoded.pickle_parts())
    home = folder / f"rank{rank}"
    home.mkdir()
    path = home / f"segment_rank{rank}_made_000001.seg"
    begin = len(head.pack())
    records = bytearray()
    for number in range(num_passes):
        is_real = number == 0
        records += replace(
            record,
            offset=begin + number * PASS_BYTES,
            num_bytes=len(data) if is_real else PASS_BYTES - RECORD_BYTES,
            crc32=zlib.crc32(data),
            number=number,
            time=BEGINNING + number * 1000,
            trains=number % 4 != 3,
        ).pack()
    with open(path, "wb") as file:
        file.write(head.pack() + records[:RECORD_BYTES] + data)
        file.truncate(begin + num_passes * PASS_BYTES)
    index_path_of(path).write_bytes(head.pack() + records)


def used() -> float:
    """Return the processor time of child processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def num_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def measure_memory(folder: Path, counts: list[int], segment: str | None) -> None:
    model, sizes = TinyModel(), []
    for count in [counts[0] // 10, *counts]:  # the first warms up
        tracemalloc.start()
        with recording(model, folder / str(count), max_queued=64, segment=segment) as recorder:
            for number in range(count):
                model(IDS_BS)
                if number % 16 == 0:
                    recorder.flush()
            recorder.flush()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert recorder.num_written == count
    grown = (sizes[2] - sizes[1]) / (counts[1] - counts[0])
    after = f"memory held after {counts[0]:,} and {counts[1]:,} passes"
    print(f"{after}: {sizes[1]:,} and {sizes[2]:,} bytes, {grown:.0f} a pass")


def write_at_once(folder: Path, given: argparse.Namespace) -> None:
    """Print the processor time of a step's thread, and fail if a pass was lost."""

    def measured(num_processes: int, records: bool, number: int) -> list[Sample]:
        target = Path(tempfile.mkdtemp(dir=folder)) if records else None
        costs = steps_of(num_processes, target, given)
        if target is not None:
            checked = check_folder(target)
            assert checked.is_whole
            assert checked.num_good == num_processes * given.steps, (checked.num_good, "passes")
        return [{"s": statistics.median(costs)}]

    kinds = {
        f"{kind}, {num_processes} processes": partial(measured, num_processes, kind == "recorded")
        for num_processes in (1, given.processes)
        for kind in ("bare", "recorded")
    }
    answers = Answers(given, "many_ranks writers")
    figures = alternate(kinds, answers, rounds=given.rounds)
    print(f"{answers.machine}: processor time of a step's thread; no pass lost")
    print(table("steps", figures, [Column("us", "s", ".0f", 1e6)]))
    for num in (1, given.processes):
        bare, recorded = (
            statistics.median(one["s"] for one in figures[f"{kind}, {num} processes"]) for kind in ("bare", "recorded")
        )
        print(f"recording adds {1e6 * (recorded - bare):.0f} us to a step of {num} processes")


def steps_of(num_processes: int, folder: Path | None, given: argparse.Namespace) -> list[float]:
    """Run so many processes that begin their steps together, and return the seconds of all their steps."""
    reading, writing = os.pipe()
    ready, go = os.pipe(), os.pipe()
    children = []
    for rank in range(num_processes):
        child = os.fork()
        if not child:
            for end in (reading, ready[0], go[1]):
                os.close(end)
            try:
                job(rank, num_processes, folder, given, (ready[1], go[0]), writing)
            finally:
                os._exit(0)
        children.append(child)
    for end in (writing, ready[1], go[0]):
        os.close(end)
    for _ in range(num_processes):
        os.read(ready[0], 1)
    os.close(go[1])
    with open(reading) as lines:
        said = [json.loads(line) for line in lines]
    for child in children:
        os.waitpid(child, 0)
    os.close(ready[0])
    assert len(said) == num_processes
    assert all(one["dropped"] == 0 for one in said), [one["dropped"] for one in said]
    return [cost for one in said for cost in one["costs"]]


def job(
    rank: int, num_processes: int, folder: Path | None, given: argparse.Namespace, barrier: tuple[int, int], out: int
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_processes)}
    model, costs = TinyModel(), []
    recorder = None if folder is None else recording(model, folder, segment=given.segment)
    os.write(barrier[0], b".")
    os.read(barrier[1], 1)
    time.sleep(given.step_seconds * rank / num_processes)
    for _ in range(given.steps):
        began = time.thread_time()
        model(IDS_BS)
        costs.append(time.thread_time() - began)
        time.sleep(given.step_seconds)
    num_dropped = 0
    if recorder is not None:
        recorder.close()
        num_dropped = recorder.num_dropped + (recorder.failure is not None)
    os.write(out, (json.dumps({"costs": costs, "dropped": num_dropped}) + "\n").encode())
