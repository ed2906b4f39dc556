"""Run in this process what a process of its own would run."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from replay.command_line.cli import main
from replay.processes import pool
from replay.processes.child_job import ChildJob
from replay.processes.pool import ProcessResult, RunningTask, Task
from tests.helpers.typed import spec_of


def end_each_task(end: Callable[[Task], ProcessResult], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `end` say how each task of a campaign ends, one after the other, where processes would run them."""

    def one_by_one(
        tasks: Iterable[tuple[Any, Task]], *, start_deadline: float = math.inf, **_: Any
    ) -> Iterator[tuple[Any, ProcessResult]]:
        for key, task in tasks:
            if time.monotonic() <= start_deadline:
                yield key, end(task)

    monkeypatch.setattr(pool, "run_children", one_by_one)


def start_each_task(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `start` begin each task in the place of its processes, and return what stands for the running task.

    It gets what `RunningTask.start` gets: the task, and where runs have GPUs of their own, these.
    """
    monkeypatch.setattr(RunningTask, "start", start)


def replay_here(task: Task) -> ProcessResult:
    """Replay a task in this process, and return how it ended."""
    task.output.parent.mkdir(parents=True, exist_ok=True)
    task.output.write_text("")
    return ProcessResult(exit_code=run_quietly(task), seconds=1.0, output=task.output, logs=task.logs)


def run_quietly(task: Task) -> int:
    """Return the exit code of a task's job, which prints its summary alone."""
    spec = task.job.spec
    job = replace(task.job, spec=replace(spec, measure=replace(spec.measure, quiet=True)))
    return main(["--job", str(job.write())])


def run_with(typed: Sequence[str], *, reverse_rows: bool = False, details: bool = False) -> int:
    """Run a replay with fields that no option sets. Returns the exit code."""
    spec = spec_of(typed)
    inputs, measure = replace(spec.inputs, reverse_rows=reverse_rows), replace(spec.measure, details=details)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(ChildJob(spec=replace(spec, inputs=inputs, measure=measure)).text)
        return main(["--job", str(file)])
