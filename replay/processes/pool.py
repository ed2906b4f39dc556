"""A replay in processes of its own, so that out of memory, a crash or a hang there ends nothing else."""

import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from replay.processes import forkserver as warm
from replay.processes.launch import store_of_ranks, variables_of_ranks, without_launcher

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Key = TypeVar("Key")
POLL_SECONDS = 0.5  # between looks at the clock
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
PROGRAM = Path(__file__).parents[1]  # as in `python replay`
REFUSED = 2  # the exit code of a replay that cannot be had


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """A replay that has ended, well or not."""

    exit_code: int | None  # None: it did not end within its limit
    seconds: float
    output: Path  # what it printed
    logs: Path  # holds the folder of its run, if it came that far

    @property
    def is_refusal(self) -> bool:
        """Did it say beforehand that it cannot be had?"""
        return self.exit_code == REFUSED

    @property
    def trouble(self) -> str:
        """Why it failed, in one line; empty if all was well."""
        if self.exit_code == 0:
            return ""
        if self.exit_code is None:
            return f"no end within {self.seconds:.0f} s, see {self.output}"
        said = re.findall(r"^replay: (?:rank \d+: )?(.+)", self.output.read_text(errors="replace"), re.MULTILINE)
        errors = [line for line in said if not line.endswith("starting them")]
        if errors:
            return str(errors[-1])
        if self.exit_code < 0:
            return f"ended by {signal.Signals(-self.exit_code).name}, see {self.output}"
        return f"exit code {self.exit_code}, see {self.output}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """`replay` with `arguments` in that many processes on this machine, for at most `limit` seconds.

    Its run is logged in a new folder below `logs`, and what it prints goes into the file `output`.
    """

    arguments: Sequence[str]
    num_processes: int
    logs: Path
    output: Path
    limit: float


def run_child(task: Task) -> Child:
    """One task, to its end. On Ctrl-C, or any other exception here, it is ended first."""
    [(_, child)] = run_children([(None, task)], at_once=1)
    return child


def run_children(
    tasks: Iterable[tuple[Key, Task]], *, at_once: int, gpus: Sequence[str] = (), until: float = math.inf
) -> Generator[tuple[Key, Child], None, None]:
    """What became of each, as they end. None begins before there is room for it, or after time.monotonic() `until`.

    Of `gpus`, as CUDA_VISIBLE_DEVICES names them, a task sees one a process, those with the fewest others, and
    `at_once` processes are on each. Without them a task sees what this process does, and `at_once` tasks run.
    On Ctrl-C, or any other exception here or where this is iterated, those that run are ended first.
    """
    waiting = iter(tasks)
    following = next(waiting, None)
    running: list[tuple[Key, _Running]] = []
    try:
        while True:
            while following is not None and time.monotonic() <= until:
                key, task = following
                in_use = Counter(gpu for _, one in running for gpu in one.gpus)
                own = sorted(gpus, key=in_use.__getitem__)[: task.num_processes]
                if (in_use[own[-1]] if own else len(running)) >= at_once:
                    break
                running.append((key, _Running.of(task, own)))
                following = next(waiting, None)
            if not running:
                return
            over = [pair for pair in running if pair[1].is_over]
            for pair in over:
                child = pair[1].ended()
                running.remove(pair)
                yield pair[0], child
            if not over:
                wait([rank.sentinel for _, one in running for rank in alive(one.ranks)], POLL_SECONDS)
    finally:
        for _, one in running:
            end(one.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    task: Task
    gpus: Sequence[str]  # that it alone was given; empty: it sees what this process does
    ranks: list[ForkServerProcess]
    store: "TCPStore | None"  # where they meet, while this is alive
    began: float

    @classmethod
    def of(cls, task: Task, gpus: Sequence[str]) -> Self:
        task.output.parent.mkdir(parents=True, exist_ok=True)
        task.output.write_bytes(b"")
        environment = without_launcher(os.environ) | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        arguments = [*task.arguments, "--log-folder", str(task.logs)]
        store = store_of_ranks() if task.num_processes > 1 else None
        of_ranks = variables_of_ranks(task.num_processes, store.port) if store else [{}]
        one = cls(task=task, gpus=gpus, ranks=[], store=store, began=time.monotonic())
        try:
            one.ranks.extend(warm.start(PROGRAM, arguments, environment | own, task.output) for own in of_ranks)
        except BaseException:
            end(one.ranks)
            raise
        return one

    @property
    def _exit_codes(self) -> list[int | None]:
        return [rank.exitcode for rank in self.ranks]

    @property
    def is_over(self) -> bool:
        """All ranks have ended, or one has failed, as launchers see it, or there is no time left."""
        codes = self._exit_codes
        return None not in codes or any(codes) or time.monotonic() > self.began + self.task.limit

    def ended(self) -> Child:
        """What has not is ended here. The exit code is that of a rank that failed, if one did."""
        codes, seconds = self._exit_codes, time.monotonic() - self.began
        end(self.ranks)
        failed = [code for code in codes if code]
        exit_code = failed[0] if failed else None if None in codes else 0
        return Child(exit_code=exit_code, seconds=seconds, output=self.task.output, logs=self.task.logs)


def alive(ranks: Sequence[ForkServerProcess]) -> list[ForkServerProcess]:
    return [rank for rank in ranks if rank.exitcode is None]


def end(ranks: Sequence[ForkServerProcess]) -> None:
    """End those that still run, each with what it has started; SIGTERM first, at which a rank completes its log."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in alive(ranks):
            _signal(rank, number)
        until = time.monotonic() + GRACE
        while (left := alive(ranks)) and time.monotonic() < until:
            wait([rank.sentinel for rank in left], until - time.monotonic())


def _signal(rank: ForkServerProcess, number: int) -> None:
    assert rank.pid is not None
    try:
        os.killpg(rank.pid, number)
    except ProcessLookupError:  # it has ended, or has no session of its own yet
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)
