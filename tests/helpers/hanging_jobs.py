"""Jobs of two ranks under DDP that hang or die in pass 2, forked from a process that has loaded torch.

hanging_jobs.py FOLDER: each records into FOLDER/<name>. The parent is the launcher: once a rank hangs it ends both with
SIGTERM, and with SIGKILL those that do not hear it.
"""

import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn

from capture import recording
from capture.black_box.flight_recorder import SHARED_MEMORY, format_directory_prefix
from capture.black_box.incidents import read_incidents
from capture.black_box.position_page import LastPosition, read_position
from tests.helpers.planned_jobs import TwoHeads

FATAL_PASS, NUM_PASSES, BAD_RANK = 2, 4, 1
MOST_SECONDS = 120.0


def hang() -> None:
    time.sleep(10 * MOST_SECONDS)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    ctypes.string_at(0)


def fail() -> None:
    raise ValueError("the loss broke")


def leave() -> None:
    sys.exit(0)


# name to: where it happens, what happens, and whether the launcher has to end it
JOBS: dict[str, tuple[str, Callable[[], None], bool]] = {
    "asleep in its loss": ("loss", hang, True),
    "asleep in its data": ("data", hang, True),
    "asleep in a hook of the backward": ("backward", hang, True),
    "stopped": ("loss", stop, True),
    "killed": ("loss", kill, False),
    "crashed": ("loss", crash, False),
    "failed": ("data", fail, False),
    "left": ("loss", leave, False),
    "of fewer batches": ("end", leave, False),
    "without a backward": ("no backward", leave, True),
    "slow, then both killed": ("loss", hang, True),
}


def make_sign(folder: Path) -> Path:
    """Return the file that the bad rank writes just before it hangs."""
    return folder.with_suffix(".hangs")


def happens(folder: Path, name: str, where: str, number: int, rank: int) -> None:
    place, what, _ = JOBS[name]
    if (place, number, rank) == (where, FATAL_PASS, BAD_RANK):
        make_sign(folder).touch()
        what()


def compute_loss(folder: Path, name: str, output: Any, number: int, rank: int) -> torch.Tensor:
    happens(folder, name, "loss", number, rank)
    loss: torch.Tensor = output["loss"]
    return loss


def train(name: str, folder: Path, rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    limit = timedelta(seconds=10 * MOST_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2, timeout=limit)
    model = TwoHeads()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    number = 0
    model.first.weight.register_hook(lambda gradient: happens(folder, name, "backward", number, rank))
    slow_step = "0.3s" if name.startswith("slow") else None
    with recording(wrapped, folder, flight_recorder=2, slow_step=slow_step):
        for number in range(NUM_PASSES):
            if JOBS[name][0] == "end" and (number, rank) == (FATAL_PASS, BAD_RANK):
                break
            happens(folder, name, "data", number, rank)
            output = wrapped(torch.randint(32, (2, 6 + number + rank)))
            if JOBS[name][0] == "no backward" and (number, rank) == (FATAL_PASS, BAD_RANK):
                dist.barrier()
            else:
                compute_loss(folder, name, output, number, rank).backward()
            optimizer.step()
            optimizer.zero_grad()


def positions(folder: Path) -> list[LastPosition]:
    found = [read_position(path) for path in SHARED_MEMORY.glob(f"{format_directory_prefix(folder)}*")]
    return [record for record in found if record is not None]


def sleeps(process: int) -> bool:
    """Tell whether every thread of a process waits or is stopped."""
    try:
        stats = [(thread / "stat").read_text() for thread in Path(f"/proc/{process}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended between the two reads
        return False
    return all(stat.rpartition(")")[2].split()[0] in "ST" for stat in stats)


def is_stuck(name: str, folder: Path, processes: list[int]) -> bool:
    """Tell whether both ranks have come to where they stay."""
    # A rank in its backward runs a hook of the job first: it is where it stays once no thread of either rank runs.
    if not all(sleeps(process) for process in processes):
        return False
    if JOBS[name][0] != "no backward" and not make_sign(folder).exists():
        return False
    if name.startswith("slow"):
        records = read_incidents(folder) if folder.is_dir() else []
        return {record.rank for record in records for found in record.incidents if found.forward == FATAL_PASS} == {
            0,
            1,
        }
    known = {position.rank: (position.forward, position.phase) for position in positions(folder)}
    stands = {
        "data": (FATAL_PASS - 1, "after the optimizer's step"),
        "backward": (FATAL_PASS, "in backward"),
    }.get(JOBS[name][0], (FATAL_PASS, "after forward"))
    return known == {0: (FATAL_PASS, "in backward"), BAD_RANK: stands}


def end(processes: list[int], *, is_stopped: bool) -> None:
    """End both as torchrun does: with SIGTERM, and with SIGKILL the one that cannot hear it."""
    for process in processes:
        os.kill(process, signal.SIGTERM)
    os.waitpid(processes[0], 0)
    if is_stopped:
        os.kill(processes[1], signal.SIGKILL)
    os.waitpid(processes[1], 0)


def run(name: str, folder: Path) -> None:
    processes = []
    for rank in (0, 1):
        process = os.fork()
        if not process:
            train(name, folder, rank)
            return
        processes.append(process)
    if not JOBS[name][2]:
        for process in processes:
            os.waitpid(process, 0)
        return
    deadline = time.monotonic() + MOST_SECONDS
    # A thread sleeps for a moment on a lock or on a timer too, not at ten sights in a row.
    sights = 0
    while sights < 10 and time.monotonic() < deadline:
        sights = sights + 1 if is_stuck(name, folder, processes) else 0
        time.sleep(0.02)
    if name.startswith("slow"):
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    else:
        end(processes, is_stopped=name == "stopped")


def main() -> None:
    importlib.import_module("torch._dynamo")  # once, not in each rank
    parent = os.getpid()
    for name in sys.argv[2:] or JOBS:
        run(name, Path(sys.argv[1]) / name.replace(" ", "-"))
        if os.getpid() != parent:
            return


if __name__ == "__main__":
    main()
