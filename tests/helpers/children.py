"""Run in this process what a process of its own would run."""

from dataclasses import replace

from replay.cli import main
from replay.processes.pool import Task


def run_quietly(task: Task) -> int:
    """Return the exit code of a task's job, which prints its summary alone."""
    spec = task.job.spec
    job = replace(task.job, spec=replace(spec, measure=replace(spec.measure, quiet=True)))
    return main(["--job", str(job.write())])
