"""Check the devices that torch sees, memory for ranks, disk for logs, and limits."""

import os
import resource
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from replay.commands.doctor.probe_process import Answer
from replay.output.check import Check, Status

GIB = 2**30
ROOM = GIB  # bytes; a log folder or /dev/shm with less is reported
OPEN_FILES = 4096


def devices(answer: Answer, driver: str) -> list[Check]:
    """Report the devices that torch computes on. `driver` is nvidia-smi's driver version, empty if there is none."""
    if answer.error:
        status = Status.NO_ANSWER if answer.is_silent else Status.BROKEN
        return [Check(name="devices", status=status, found=answer.error, advice="see packages", needed=True)]
    facts = answer.facts
    checks: list[Check] = []
    if not facts["gpus"]:
        checks.append(_cpu())
        if driver:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
            advice = (
                "CUDA_VISIBLE_DEVICES is empty" if hidden else f"this torch is {facts['torch']}; a CUDA build of it"
            )
            why = f"driver {driver}, and torch sees no GPU"
            checks.append(Check(name="cuda", status=Status.BROKEN, found=why, advice=f"replays use the CPU: {advice}"))
        return checks
    for index, (gpu, free) in enumerate(zip(facts["gpus"], facts["free_bytes"], strict=True)):
        text = f"{gpu['name']}, {gpu['bytes'] / GIB:.0f} GiB, {free / GIB:.0f} free, capability {gpu['capability']}"
        is_full = free < gpu["bytes"] / 10
        advice = "another process has its memory. Try: nvidia-smi" if is_full else ""
        status = Status.NOTE if is_full else Status.OK
        checks.append(Check(name=f"gpu {index}", status=status, found=text, advice=advice, needed=True))
    checks.append(
        Check(name="driver", status=Status.OK, found=f"{driver or 'unknown'}, torch for {facts['built_for']}")
    )
    if len(facts["gpus"]) > 1:
        checks.append(_peers(facts["no_peers"]))
    return checks


def _peers(lacking: Sequence[Sequence[int]]) -> Check:
    if not lacking:
        return Check(name="peer access", status=Status.OK, found="between all GPUs")
    pairs = ", ".join(f"{one}-{other}" for one, other in lacking if one < other)
    cost = "--tp and --ring go through the host, slower. See: nvidia-smi topo -m"
    return Check(name="peer access", status=Status.NOTE, found=f"none between {pairs}", advice=cost)


def _cpu() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of the container, if there is one
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        size = min(size, int(text))
    return Check(name="cpu", status=Status.OK, found=f"{cores} cores, {size / GIB:.1f} GiB, no GPU", needed=True)


def shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    if not folder.is_dir():
        return Check(name=str(folder), status=Status.NOTE, found="not there", advice="captures keep no ring in memory")
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / GIB:.2f} GiB free of {usage.total / GIB:.2f}"
    if usage.free >= ROOM:
        return Check(name=str(folder), status=Status.OK, found=text)
    advice = "several ranks of NCCL, data loaders and a capture's ring use it. Try: docker run --shm-size=8g"
    return Check(name=str(folder), status=Status.NOTE, found=text, advice=advice)


def log_folder(folder: Path) -> Check:
    """Check that a run's folder can be created and written in `folder`; nothing is left there."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    advice = "Try: --log-folder with a folder that you may write to"
    try:
        with tempfile.TemporaryDirectory(dir=there) as made, (Path(made) / "rank0.jsonl").open("wb") as file:
            file.write(bytes(4096))
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror}"
        return Check(name="log folder", status=Status.BROKEN, found=text, advice=advice, needed=True)
    free = shutil.disk_usage(there).free
    is_full = free < ROOM
    return Check(
        name="log folder",
        status=Status.NOTE if is_full else Status.OK,
        found=f"{folder} can be written, {free / GIB:.1f} GiB free",
        advice="a saved state needs many times the model. " + advice if is_full else "",
        needed=True,
    )


def limits(*, on_cuda: bool) -> list[Check]:
    """Report limits of ulimit that are low for a replay."""
    checks: list[Check] = []
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < OPEN_FILES:
        advice = f"many ranks or data loaders exhaust it. Try: ulimit -n {OPEN_FILES * 16}"
        checks.append(Check(name="ulimit -n", status=Status.NOTE, found=f"{files} open files", advice=advice))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if on_cuda and Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        advice = "NCCL over InfiniBand may fail. Try: ulimit -l unlimited, or docker run --ulimit memlock=-1"
        checks.append(Check(name="ulimit -l", status=Status.NOTE, found=f"{locked // 1024} KiB locked", advice=advice))
    return checks
