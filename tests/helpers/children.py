"""Run in this process what a process of its own would run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from replay.command_line.cli import main
from replay.processes.child_job import ChildJob
from replay.processes.pool import Task
from tests.helpers.typed import spec_of


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
