"""Say what runs in processes of their own may use: devices, time, and how many run at the same time."""

import math
import time
from dataclasses import dataclass

from replay.output.text import counted

PROCESSES_ON_A_CPU = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
    """Limits of the runs that one command starts.

    each     seconds for one run
    total    seconds for the command: no run is started after them; None: no limit
    at_once  processes on each GPU at the same time, or runs on a CPU; None: one run at a time
    """

    each: float
    total: float | None
    at_once: int | None

    def end(self) -> float:
        """Return the time, by `time.monotonic`, after which a command that begins now starts no run."""
        return math.inf if self.total is None else time.monotonic() + self.total


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    num_devices: int
    has_gpus: bool

    @classmethod
    def here(cls, num_devices: int | None = None) -> "Machine":
        """Return this machine with all its devices, or with `num_devices`, which may be more than it has."""
        import torch

        num_gpus = torch.cuda.device_count()
        return cls(num_devices=num_devices or num_gpus or PROCESSES_ON_A_CPU, has_gpus=num_gpus > 0)

    def fits_into(self, other: "Machine") -> bool:
        """Is the other of the same kind, with at least as many GPUs?"""
        return self.has_gpus == other.has_gpus and (not self.has_gpus or self.num_devices <= other.num_devices)

    @property
    def text(self) -> str:
        return counted(self.num_devices, "GPU") if self.has_gpus else "a CPU"
