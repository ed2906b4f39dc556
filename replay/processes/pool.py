"""Run replays in their own processes, so that out of memory, a crash or a hang there ends nothing else."""

import math
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from replay.output.text import pluralise
from replay.processes import forkserver, interpreter
from replay.processes.child_job import REFUSAL, ChildJob
from replay.processes.launch import list_rank_variables, open_rank_store, without_launcher
from replay.processes.supervisor import ChildGroup, end_processes, wait_for_any

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PROCESSES_ON_A_CPU = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
    """Limits of the runs that one command starts.

    run_limit_seconds  for one run
    total_seconds      for the command: no run is started after them, and those that run go on; None: no limit
    at_once            processes on each GPU at the same time, or runs on a CPU; None: one run at a time on this
                       machine, and on Ray one process on each GPU
    """

    run_limit_seconds: float
    total_seconds: float | None
    at_once: int | None

    def compute_start_deadline(self) -> float:
        """Return the time, by `time.monotonic`, after which a command that begins now starts no run."""
        return math.inf if self.total_seconds is None else time.monotonic() + self.total_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    num_devices: int
    has_gpus: bool

    @classmethod
    def detect(cls, num_devices: int | None = None, *, num_gpus: int | None = None) -> "Machine":
        """Return this machine with all its devices, or with `num_devices`, which may be more than it has.

        num_gpus  GPUs that it has; None: those that torch sees
        """
        if num_gpus is None:
            import torch

            num_gpus = torch.cuda.device_count()
        return cls(num_devices=num_devices or num_gpus or PROCESSES_ON_A_CPU, has_gpus=num_gpus > 0)

    def is_part_of(self, other: "Machine") -> bool:
        """Tell whether the other is of the same kind, with at least as many GPUs."""
        return self.has_gpus == other.has_gpus and (not self.has_gpus or self.num_devices <= other.num_devices)

    @property
    def text(self) -> str:
        return pluralise(self.num_devices, "GPU") if self.has_gpus else "a CPU"


Key = TypeVar("Key")
# How long a process may take to end after SIGTERM, until it gets SIGKILL.
GRACE_SECONDS = 5.0
# The folder that `python` runs as a program.
PROGRAM = Path(__file__).parents[1]
REFUSED_EXIT_CODE = 2
# The file of an attempt's folder with what its processes print.
OUTPUT = "output.txt"


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, such as that of a time limit, so that running tasks are ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessResult:
    """A replay that has ended, successfully or not."""

    # None: the replay did not end within its limit.
    exit_code: int | None
    seconds: float
    # The file with what it printed.
    output: Path
    # The folder that holds the folder of its run, if the run began.
    logs: Path

    @property
    def is_refusal(self) -> bool:
        """Tell whether it refused its options before it started."""
        return self.exit_code == REFUSED_EXIT_CODE

    @property
    def refusal(self) -> str | None:
        """Return the sentence of its refusal, with marks for settings; None where it left none."""
        try:
            return (self.logs / REFUSAL).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    @property
    def error(self) -> str:
        """Return why it failed, in one line; empty if it succeeded."""
        if self.exit_code == 0:
            return ""
        if self.exit_code is None:
            return f"not finished within {self.seconds:.0f} s, see {self.output}"
        messages = re.findall(r"^replay: (?:rank \d+: )?(.+)", self.output.read_text(errors="replace"), re.MULTILINE)
        errors = [message for message in messages if not message.endswith("starting them")]
        if errors:
            return str(errors[-1])
        if self.exit_code < 0:
            return f"ended by {signal.Signals(-self.exit_code).name}, see {self.output}"
        return f"exit code {self.exit_code}, see {self.output}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One attempt at a replay, in a number of processes, for at most `limit` seconds.

    Its output goes into the file `output`. `python` is the path of another environment's interpreter; empty: this one.
    `words` are the name and own options of the command that does the job; none: `replay` itself. `folder` is where its
    relative paths begin.
    """

    job: ChildJob
    num_processes: int
    output: Path
    limit: float
    python: str = ""
    words: Sequence[str] = ()
    folder: Path = Path()

    @classmethod
    def for_attempt(
        cls,
        home: Path,
        job: ChildJob,
        *,
        num_processes: int,
        limit: float,
        python: str = "",
        folder: Path = Path(),
    ) -> Self:
        """Return a task that logs into a new folder below `home`, which holds those of earlier attempts.

        The folder's name is the number of earlier attempts. It is made when the task starts, which on Ray may be after
        the next task was made. So two tasks of one home could get one folder.
        """
        home.mkdir(parents=True, exist_ok=True)
        logs = home / str(len(list(home.iterdir())))
        return cls(
            job=job.with_log_folder(logs),
            num_processes=num_processes,
            output=logs / OUTPUT,
            limit=limit,
            python=python,
            folder=folder,
        )

    @property
    def logs(self) -> Path:
        return self.job.logs


class RunTasks(Protocol):
    """Runs tasks, here or elsewhere, and yields the result of each as it ends.

    None starts after `start_deadline`, of time.monotonic.

    On Ctrl-C, or any other exception here or in the caller's loop, running tasks are ended first.
    """

    @property
    def num_running(self) -> int: ...

    def __call__(
        self, tasks: Iterable[tuple[Key, Task]], *, start_deadline: float = math.inf
    ) -> Generator[tuple[Key, ProcessResult], None, None]: ...


def run_children(
    tasks: Iterable[tuple[Key, Task]],
    *,
    at_once: int,
    gpus: Sequence[str] = (),
    start_deadline: float = math.inf,
    running: list[tuple[Any, "RunningTask"]] | None = None,
    grace: float = GRACE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[tuple[Key, ProcessResult], None, None]:
    """Yield the result of each task as it ends. No task starts before there is room for it, or after
    `start_deadline`, a time of `clock`. A process that is to end gets SIGTERM, and `grace` seconds later SIGKILL.

    If `gpus` are given, as CUDA_VISIBLE_DEVICES names them, a task gets one per process, the least used ones, and up
    to `at_once` processes share each. Otherwise a task sees what this process sees, and `at_once` tasks run. The list
    `running` holds those that run, for a caller who wants to know. On Ctrl-C, or any other exception here or in the
    caller's loop, running tasks are ended first.
    """
    waiting = iter(tasks)
    following = next(waiting, None)
    running = [] if running is None else running
    try:
        while True:
            while following is not None and clock() <= start_deadline:
                key, task = following
                in_use = Counter(gpu for _, other in running for gpu in other.gpus)
                task_gpus = sorted(gpus, key=in_use.__getitem__)[: task.num_processes]
                if (in_use[task_gpus[-1]] if task_gpus else len(running)) >= at_once:
                    break
                running.append((key, RunningTask.start(task, task_gpus)))
                following = next(waiting, None)
            if not running:
                return
            ended_pairs = [pair for pair in running if pair[1].ranks.is_over]
            for pair in ended_pairs:
                child = pair[1].finish(grace=grace)
                running.remove(pair)
                yield pair[0], child
            if not ended_pairs:
                wait_for_any([task.ranks for _, task in running])
    finally:
        end_processes([rank for _, task in running for rank in task.ranks.processes], grace=grace)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHere:
    """Runs tasks on this machine; see `run_children`."""

    at_once: int
    gpus: Sequence[str] = ()
    _running: list[tuple[Any, "RunningTask"]] = field(default_factory=list)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def __call__(
        self, tasks: Iterable[tuple[Key, Task]], *, start_deadline: float = math.inf
    ) -> Generator[tuple[Key, ProcessResult], None, None]:
        return run_children(
            tasks, at_once=self.at_once, gpus=self.gpus, start_deadline=start_deadline, running=self._running
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningTask:
    """A task whose processes run."""

    task: Task
    # The GPUs that are reserved for the task. Empty: it sees what this process sees.
    gpus: Sequence[str]
    ranks: ChildGroup
    # The store where its ranks meet. It is open as long as this object is.
    store: "TCPStore | None"

    @classmethod
    def start(cls, task: Task, gpus: Sequence[str] = ()) -> Self:
        """Start the processes of a task."""
        task.output.parent.mkdir(parents=True, exist_ok=True)
        task.output.write_bytes(b"")
        environment = without_launcher(os.environ) | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        arguments = [*task.words, "--job", str(task.job.write())]
        store = open_rank_store() if task.num_processes > 1 else None
        rank_variables = list_rank_variables(task.num_processes, store.port) if store else [{}]
        run = partial(interpreter.start, task.python) if task.python else partial(forkserver.start, PROGRAM)
        starts = [
            partial(run, arguments, environment | variables, task.output, task.folder) for variables in rank_variables
        ]
        return cls(task=task, gpus=gpus, ranks=ChildGroup.start(starts, limit=task.limit), store=store)

    def finish(self, *, grace: float = GRACE_SECONDS) -> ProcessResult:
        """End what still runs, within `grace` seconds, and return the result.

        The exit code is that of a failed rank, if any.
        """
        exit_code, seconds = self.ranks.exit_code, self.ranks.seconds
        self.ranks.end(grace=grace)
        return ProcessResult(exit_code=exit_code, seconds=seconds, output=self.task.output, logs=self.task.logs)
