"""A replay in processes of its own, so that out of memory, a crash or a hang there ends nothing else."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from replay.launch import without_launcher

Key = TypeVar("Key")
POLL_SECONDS = 0.05  # as Popen.wait does
GRACE = 2.0  # seconds between SIGTERM and SIGKILL
PROGRAM: tuple[str, ...] = ("-u", str(Path(__file__).parent))
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
    tasks: Iterable[tuple[Key, Task]], *, at_once: int, gpus: Sequence[str] = ()
) -> Generator[tuple[Key, Child], None, None]:
    """What became of each, as they end; the next task is asked for when there is room for it.

    Of `gpus`, as CUDA_VISIBLE_DEVICES names them, a task sees one a process: those that the fewest others see.
    On Ctrl-C, or any other exception here or where this is iterated, those that run are ended first.
    """
    waiting = iter(tasks)
    running: list[tuple[Key, _Running]] = []
    try:
        while True:
            while len(running) < at_once and (found := next(waiting, None)) is not None:
                in_use = Counter(gpu for _, one in running for gpu in one.gpus)
                running.append((found[0], _Running.of(found[1], sorted(gpus, key=in_use.__getitem__))))
            if not running:
                return
            over = [pair for pair in running if pair[1].is_over]
            for pair in over:
                child = pair[1].ended()
                running.remove(pair)
                yield pair[0], child
            if not over:
                time.sleep(POLL_SECONDS)
    finally:
        for _, one in running:
            end(one.process)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    task: Task
    gpus: Sequence[str]  # that it alone was given; empty: it sees what this process does
    process: subprocess.Popen[bytes]
    began: float

    @classmethod
    def of(cls, task: Task, gpus: Sequence[str]) -> Self:
        """It is given the first of `gpus`."""
        own = gpus[: task.num_processes]
        task.output.parent.mkdir(parents=True, exist_ok=True)
        program = [sys.executable]
        if task.num_processes > 1:  # not torchrun, which has one exit code for whatever its ranks left with
            number = task.num_processes
            start = f"from replay.launch import start_processes; sys.exit(start_processes({number}, sys.argv[1:]))"
            program += ["-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"]
        began = time.monotonic()
        with task.output.open("wb") as file:
            process = subprocess.Popen(
                [*program, *PROGRAM, *task.arguments, "--log-folder", str(task.logs)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=without_launcher(os.environ) | ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {}),
                start_new_session=True,
            )
        return cls(task=task, gpus=own, process=process, began=began)

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None or time.monotonic() > self.began + self.task.limit

    def ended(self) -> Child:
        """If it has not, it is ended here."""
        exit_code = self.process.poll()
        seconds = time.monotonic() - self.began
        end(self.process)
        return Child(exit_code=exit_code, seconds=seconds, output=self.task.output, logs=self.task.logs)


def end(process: subprocess.Popen[bytes]) -> None:
    """End it if it still runs; SIGTERM first, on which torch's elastic launcher ends its ranks: no group holds them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
