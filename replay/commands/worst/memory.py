"""Ask how much memory a new process gets on this machine's device, and say whether a predicted peak fits it."""

import json
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from replay.profiling.prediction import MOST_OF_PEAK, Cost, Error
from replay.profiling.shapes import Shape

SECONDS = 120.0
_PROGRAM = """
import json, torch
if torch.cuda.is_available():
    torch.ones(1, device="cuda") @ torch.ones(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    print(json.dumps({"device": torch.cuda.get_device_name(), "free": free, "total": total}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory that a new process may fill. On CUDA its context and what others hold are not in `free_bytes`."""

    device: str
    free_bytes: int
    total_bytes: int
    is_shared: bool  # by the ranks on this machine: a CPU's


def memory_here(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Memory | None:
    """Return the memory of the first GPU, asked in a process of its own, or the RAM; None if that is not known."""
    import torch

    if torch.cuda.is_available():
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        try:
            said = json.loads(done.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            return None
        return Memory(device=said["device"], free_bytes=said["free"], total_bytes=said["total"], is_shared=False)
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return Memory(device="CPU", free_bytes=free, total_bytes=total, is_shared=True)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or no limit
        return None


class Fits(StrEnum):
    YES = "fits"
    PERHAPS = "too near to tell"
    NO = "does not fit"
    UNKNOWN = "not known"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    shape: Shape
    cost: Cost  # predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The memory here, and what lies between a predicted peak and it."""

    memory: Memory | None  # None: the system does not say
    overhead: float  # what the allocator reserves, as a share of what it gives out
    error: Error | None
    ran_out_at: float | None = None  # the least predicted peak of an input that ran out of memory when it was measured

    def has_shown(self, peak: float) -> bool:
        """Did an input with no higher peak run out of memory here?"""
        return self.ran_out_at is not None and peak >= self.ran_out_at

    def needed(self, peak: float, num_ranks: int) -> float:
        """Return the bytes that ranks with this peak take of the memory that each, or all, have here."""
        is_shared = self.memory is not None and self.memory.is_shared
        return peak * self.overhead * (num_ranks if is_shared else 1)

    def fits(self, peak: float, num_ranks: int, least: float | None = None) -> Fits:
        """Judge a peak, or one between `least` and `peak`, which may be off by the error."""
        if self.has_shown(peak):
            return Fits.NO
        if self.memory is None:
            return Fits.UNKNOWN
        off = MOST_OF_PEAK if self.error is None else self.error.most_of_peak
        if self.needed(peak, num_ranks) * (1 + off) <= self.memory.free_bytes:
            return Fits.YES
        if self.needed(peak if least is None else least, num_ranks) * (1 - off) > self.memory.free_bytes:
            return Fits.NO
        return Fits.PERHAPS
