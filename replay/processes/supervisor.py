"""Start child processes, watch them and end them: the only place in replay that does so.

Each child has its own session, so that a signal also reaches the processes it has started. Children that succeed or
fail together, such as the ranks of one run, are a `Group`: it is over when all have ended, when one has failed, or
when its time is up. The rest are then ended: SIGTERM, a grace period, SIGKILL.

`python -m replay.processes.supervisor MODULE ...` is `python -m MODULE ...` in a process that is killed when the one
that started it ends, however that ends. Ray kills a worker, but not the processes that the worker has started.
"""

import ctypes
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from typing import IO, Self

Process = subprocess.Popen[bytes] | ForkServerProcess  # either has its own session
POLL_SECONDS = 0.05  # between polls of the children
PR_SET_PDEATHSIG = 1  # of prctl(2)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int | None = None,
    output: IO[bytes] | None = None,
) -> Process:
    """Start `command` in its own session. Its output goes to `output`, or to this process's output."""
    return subprocess.Popen(
        command, stdin=stdin, stdout=output, stderr=output, env=dict(environment), start_new_session=True
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """Children that succeed or fail together, with a `deadline` in time.monotonic()."""

    processes: Sequence[Process]
    began: float
    deadline: float = math.inf

    @classmethod
    def start(cls, starts: Iterable[Callable[[], Process]], *, limit: float = math.inf) -> Self:
        """Start all children, for at most `limit` seconds. If one cannot be started, the earlier ones are ended."""
        began = time.monotonic()
        processes: list[Process] = []
        try:
            processes.extend(one() for one in starts)
        except BaseException:
            end(processes, grace=0.0)
            raise
        return cls(processes=processes, began=began, deadline=began + limit)

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of a failed process if there is one; None if one has not ended; else 0."""
        codes = [_exit_code(one) for one in self.processes]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes else 0

    @property
    def is_over(self) -> bool:
        """Have all ended, or has one failed, or is the time up?"""
        return self.exit_code is not None or time.monotonic() > self.deadline

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.began

    def wait(self) -> int | None:
        """Wait until the group is over, and return its exit code."""
        while not self.is_over:
            time.sleep(POLL_SECONDS)
        return self.exit_code

    def end(self, *, grace: float, first: int = signal.SIGTERM) -> None:
        end(self.processes, grace=grace, first=first)


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends, however that ends. Only Linux can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # it ended before
            os._exit(1)


def wait_for_one(groups: Sequence[Group]) -> None:
    """Wait until one of the groups is over."""
    while not any(group.is_over for group in groups):
        time.sleep(POLL_SECONDS)


def end(processes: Sequence[Process], *, grace: float, first: int = signal.SIGTERM) -> None:
    """End the running processes and what they have started: signal `first`, `grace` seconds, SIGKILL."""
    for number in (first, signal.SIGKILL):
        for process in _alive(processes):
            _signal(process, number)
        until = time.monotonic() + grace
        while _alive(processes) and time.monotonic() < until:
            time.sleep(min(POLL_SECONDS, grace))


def _alive(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if _exit_code(process) is None]


def _exit_code(process: Process) -> int | None:
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def _signal(process: Process, number: int) -> None:
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # it has ended, or has no session of its own yet
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
