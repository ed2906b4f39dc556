"""Ask how much memory a new process gets on this machine's device."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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
