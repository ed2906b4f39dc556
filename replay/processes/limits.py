"""Say how long runs in processes of their own may take, and how many run at the same time."""

import math
import time
from dataclasses import dataclass


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
