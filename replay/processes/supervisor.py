"""Start child processes, watch them and end them: the only place in replay that does so.

Each child has its own session, so that a signal also reaches the processes it has started. Children that succeed or
fail together, such as the ranks of one run, are a `ChildGroup`: it is over when all have ended, when one has failed, or
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
from pathlib import Path
from typing import IO, Self

Process = subprocess.Popen[bytes] | ForkServerProcess
POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1  # prctl(2)


def start_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int | None = None,
    output: IO[bytes] | None = None,
    folder: Path | None = None,
) -> Process:
    """Start `command` in its own session, in `folder`. Its output goes to `output`, or to this process's output."""
    return subprocess.Popen(
        command, stdin=stdin, stdout=output, stderr=output, cwd=folder, env=dict(environment), start_new_session=True
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChildGroup:
    """Children that succeed or fail together, with a `deadline` in time.monotonic()."""

    processes: Sequence[Process]
    started_at: float
    deadline: float = math.inf

    @classmethod
    def start(cls, starts: Iterable[Callable[[], Process]], *, limit: float = math.inf) -> Self:
        """Start all children, for at most `limit` seconds. If one cannot be started, the earlier ones are ended."""
        started_at = time.monotonic()
        processes: list[Process] = []
        try:
            processes.extend(start() for start in starts)
        except BaseException:
            end_processes(processes, grace=0.0)
            raise
        return cls(processes=processes, started_at=started_at, deadline=started_at + limit)

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of a failed process if there is one; None if one has not ended; else 0."""
        codes = [_read_exit_code(process) for process in self.processes]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes else 0

    @property
    def is_over(self) -> bool:
        """Tell whether all have ended, one has failed, or the time is up."""
        return self.exit_code is not None or time.monotonic() > self.deadline

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.started_at

    def wait(self) -> int | None:
        """Wait until the group is over, and return its exit code."""
        while not self.is_over:
            time.sleep(POLL_SECONDS)
        return self.exit_code

    def end(self, *, grace: float, first_signal: int = signal.SIGTERM) -> None:
        end_processes(self.processes, grace=grace, first_signal=first_signal)


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends, however that ends. Only Linux can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent ended before the call above: no signal will come.
        if os.getppid() == 1:
            os._exit(1)


def wait_for_any(groups: Sequence[ChildGroup]) -> None:
    """Wait until one of the groups is over."""
    while not any(group.is_over for group in groups):
        time.sleep(POLL_SECONDS)


def end_processes(processes: Sequence[Process], *, grace: float, first_signal: int = signal.SIGTERM) -> None:
    """End the running processes and what they have started: `first_signal`, `grace` seconds, SIGKILL."""
    for number in (first_signal, signal.SIGKILL):
        for process in _list_running(processes):
            _send_signal(process, number)
        until = time.monotonic() + grace
        while _list_running(processes) and time.monotonic() < until:
            time.sleep(min(POLL_SECONDS, grace))


def _list_running(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if _read_exit_code(process) is None]


def _read_exit_code(process: Process) -> int | None:
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def _send_signal(process: Process, number: int) -> None:
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        # The process has ended, or it has no session of its own yet, and then the signal is for it alone.
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
