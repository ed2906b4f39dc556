"""Run `replay scan`: replay a folder in groups of inputs, each in its own processes."""

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from actor_init.spec import UsageError
from replay.on_ray.command import RayOptions
from replay.on_ray.executor import Executor, executor
from replay.option_parsing import command_line
from replay.processes.limits import RunLimits
from replay.processes.pool import Child, Task, sigterm_interrupts
from replay.report.text import counted, damaged_files
from replay.resolution.selection import select
from replay.runlog.reader import log_below
from replay.runlog.run_file import read_section
from replay.runlog.writer import INTERRUPTED, create_folder
from replay.scan.console import ScanConsole
from replay.scan.state import Group, ScanLog, State
from replay.spec import ReplaySpec
from replay.verdict.judge import Outcome, Verdict


def begin(spec: ReplaySpec, size: int, limits: RunLimits, ray: RayOptions | None) -> int:
    """Scan the inputs of `spec` in groups of `size`, and return the exit code.

    A gradient is never split: the size is rounded up to whole accumulation windows. Raises UsageError before anything
    has run if there is nothing to replay, or too few devices.
    """
    num_processes = spec.actor.parallel.tp * spec.actor.parallel.ring
    selection = select(spec.inputs, 0, 1, loss=spec.measure.loss, grad_accumulation=spec.actor.grad_accumulation)
    if not selection.inputs:
        raise UsageError("every input is damaged. Try: replay inspect, with that folder")
    size = math.ceil(size / selection.grad_accumulation) * selection.grad_accumulation
    num_inputs = len(selection.inputs)
    with executor(ray) as where:
        machine = where.machine(None, "--workers")
        if machine.has_gpus and ray is None and num_processes > machine.num_devices:
            raise UsageError(
                f"tp x ring needs {counted(num_processes, 'GPU')}, and there are {machine.num_devices}. "
                "Try: a smaller --tp or --ring"
            )
        log = ScanLog(
            folder=create_folder(spec.measure.log_folder, "scan"),
            command=shlex.join(["replay", "scan", "--group", str(size), *command_line(spec)]),
            machine=machine,
            spec=spec,
            damaged=[text for _, text in damaged_files(selection.damaged)],
            groups=[
                Group(first=spec.inputs.skip_inputs + first, size=min(size, num_inputs - first))
                for first in range(0, num_inputs, size)
            ],
        )
        log.write()
        return _work(log, where, limits)


def go_on(folder: Path, limits: RunLimits, ray: RayOptions | None) -> int:
    """Run the groups of a scan that have not run yet, and report all of them.

    Raises UsageError if there is no such scan, or if it was made on another machine.
    """
    log = ScanLog.read(folder)
    with executor(ray) as where:
        if any(log.pending()):
            where.refuse_other(log.machine, folder)
        return _work(log, where, limits)


def _work(log: ScanLog, where: Executor, limits: RunLimits) -> int:
    console = ScanConsole(log)
    run = where.runner(log.folder, log.machine, limits.at_once)
    tasks = ((number, _task(log, number, group, limits.each)) for number, group in log.pending())
    interrupted = False
    try:
        with sigterm_interrupts():
            for number, child in run(tasks, until=limits.end()):
                group = log.settle(number, seconds=child.seconds, **_outcome(log, child))
                console.ended(group, run.num_running)
    except KeyboardInterrupt:
        interrupted = True
    console.finish()
    if interrupted:
        return INTERRUPTED
    bad = (Outcome.DIFFERS, Outcome.UNSETTLED)
    is_clean = all(group.state is State.DONE and group.outcome not in bad for group in log.groups)
    return 0 if is_clean and not log.damaged else 1


def _task(log: ScanLog, number: int, group: Group, limit: float) -> Task:
    inputs = replace(log.spec.inputs, skip_inputs=group.first, max_inputs=group.size)
    return Task.attempt(
        log.folder / "groups" / f"{number + 1:04d}",
        command_line(replace(log.spec, inputs=inputs)),
        num_processes=log.spec.actor.parallel.tp * log.spec.actor.parallel.ring,
        limit=limit,
    )


def _outcome(log: ScanLog, child: Child) -> dict[str, Any]:
    """Return what became of a group. A damaged file is no fault of the groups that come upon it."""
    folder, run, records = log_below(child.logs)
    place = {"log": str(folder.relative_to(log.folder))} if folder is not None else {}
    if failed := [record for record in records if record.error is not None]:
        first = failed[0]
        more = f", and {counted(len(failed) - 1, 'more pass')}" if failed[1:] else ""
        said = f"pass {first.index + 1}, {first.source}: {first.error_type}: {first.error}{more}"
        return {"state": State.FAILED, "said": said, **place}
    written = None if run is None or run.end is None else run.end.verdict
    verdict = read_section(Verdict, written, source=f"{folder}: verdict")
    if verdict is None or child.exit_code not in (0, 1):  # 1: a file on the way to its inputs is damaged
        return {"state": State.FAILED, "said": child.error, **place}
    return {"state": State.DONE, "outcome": verdict.outcome, "said": _in_words(verdict), **place}


def _in_words(verdict: Verdict) -> str:
    counts = ", ".join(f"{number} {outcome}" for outcome, number in verdict.counts.items())
    return f"{counts}; {verdict.reason}" if verdict.reason else counts
