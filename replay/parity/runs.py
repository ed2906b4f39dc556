"""Run `replay parity`: replay one folder under a matrix of configurations, each in its own processes."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from actor_init.spec import UsageError
from replay.on_ray.command import RayOptions
from replay.on_ray.executor import Executor, executor
from replay.option_parsing import command_line, replay_spec, toggles
from replay.parity.console import ParityProgress
from replay.parity.matrix import EDGES, arranged, edge_settings, settings_of
from replay.parity.plan import Here, Plan, Role, in_environments, plan, together
from replay.parity.report import report
from replay.parity.results import MatrixJudge
from replay.parity.state import ParityLog, Row, State
from replay.parity.traced_rerun import Partings
from replay.processes.devices import Machine
from replay.processes.interpreter import Environment, probe
from replay.processes.limits import RunLimits
from replay.processes.pool import Child, RunTasks, Task, sigterm_interrupts
from replay.report.text import Pairs
from replay.resolution.model_source import inputs_folder
from replay.runlog.reader import PastRun
from replay.runlog.writer import INTERRUPTED, create_folder
from replay.shipped_inputs import edge_folder
from replay.spec import Passes, ReplaySpec
from replay.wording import in_flags

SET_HERE = ("shuffle_inputs", "reverse_rows", "quiet", "full_names", "name", "details")
NOT_FOR_ALL = (*SET_HERE, "uneven", "skip_inputs", "save_state", "save_model", "load_state", "save_every", "resume")
NOT_OF_A_CELL = ("max_inputs", "log_folder")
NUM_INPUTS = 8


def begin(
    matrix: str,
    common: Mapping[str, Any],
    num_devices: int | None,
    limits: RunLimits,
    *,
    trace: bool,
    ray: RayOptions | None,
    pythons: Sequence[str] = (),
) -> int:
    """Run the matrix, and return the exit code: 0 if every cell that ran is equal or within noise.

    `common` holds the replay options that were typed, `pythons` the interpreters of the environments to run it in;
    empty: this one. Raises UsageError before anything has run.
    """
    _refuse_what_parity_sets(common)
    spec = replay_spec(common)
    if ray is not None and pythons:
        raise UsageError(
            "--python names interpreters of this machine, and --launcher ray runs elsewhere. Leave out one"
        )
    environments = [probe(python) for python in pythons]
    with executor(ray) as where:
        machine = where.machine(num_devices, "--num-devices")
        log = _planned(matrix, common, spec, machine, num_devices, environments)
        return _work(log, where, machine, limits, trace=trace)


def _planned(
    matrix: str,
    common: Mapping[str, Any],
    spec: ReplaySpec,
    machine: Machine,
    num_devices: int | None,
    environments: Sequence[Environment],
) -> ParityLog:
    here = _here(spec, machine)
    shared = {name: value for name, value in common.items() if value is not None and name not in NOT_OF_A_CELL}
    settings = settings_of(matrix, here.num_devices, here.kernel)
    planned = together(
        [plan(settings, shared, here, partial(arranged, matrix)), *_edge_plans(matrix, shared, spec, here)]
    )
    if environments:
        planned = in_environments(planned, environments)
    pythons = [word for one in environments for word in ("--python", one.python)]
    devices = [] if num_devices is None else ["--num-devices", str(num_devices)]
    return ParityLog.begin(
        create_folder(spec.measure.log_folder, "parity"),
        planned,
        command=shlex.join(["replay", "parity", "--matrix", matrix, *devices, *pythons, *command_line(spec)]),
        device=here.device,
        num_devices=here.num_devices,
        environments=environments,
    )


def _edge_plans(matrix: str, shared: Mapping[str, Any], spec: ReplaySpec, here: Here) -> Iterator[Plan]:
    """Plan the runs of edge shapes: the same model and options on inputs that ship with the project.

    Skipped under --step: steps on so few tokens are dominated by rounding.
    """
    if spec.measure.step or spec.inputs.passes is Passes.ROLLOUT:
        return
    of_inputs = {toggle.parameter for toggle in toggles() if toggle.part == "inputs"}
    common = {name: value for name, value in shared.items() if name not in of_inputs}
    common |= {"inputs": "", "model": spec.actor.model or str(inputs_folder(spec.inputs))}
    chosen = {"dtype": spec.actor.dtype, "attention": spec.actor.attention}
    for group, settings in edge_settings(matrix, here.num_devices, here.kernel).items():
        folder = edge_folder(EDGES[group])
        own = [one | {name: value for name, value in chosen.items() if name in shared} for one in map(dict, settings)]
        try:
            yield plan(own, common | {"inputs": str(folder)}, replace(_of_edges(here, folder), group=group))
        except UsageError as error:
            yield Plan(cells=[], refused={group: in_flags(error)})


def _of_edges(here: Here, folder: Path) -> Here:
    """Return `here` for the edge shapes. Raises UsageError if the model's vocabulary lacks their tokens."""
    from actor_init.inputs.documents import documents_of
    from capture.file_format.capture_file import read_micro_batch
    from capture.file_format.listing import capture_files

    if here.is_custom:
        raise UsageError("nothing says how long the rows of a user's model may be")
    batches = [read_micro_batch(path) for path in capture_files(folder)]
    largest, size = max(int(one.sequences_BS.max()) for one in batches), here.config.get_text_config().vocab_size
    if largest >= size:
        raise UsageError(f"their token ids go up to {largest}, and the model's vocabulary is of {size}")
    return replace(here, num_inputs=len(batches), must_pack=any(documents_of(one).share_rows for one in batches))


def go_on(folder: Path, limits: RunLimits, *, trace: bool, ray: RayOptions | None) -> int:
    """Run the cells of a parity run that have not run yet, and report all of them.

    Raises UsageError if there is no such run, or if it was made on another machine or with other versions.
    """
    log = ParityLog.read(folder)
    machine = Machine(num_devices=log.num_devices, has_gpus=log.device == "cuda")
    with executor(ray) as where:
        if any(log.pending()):
            _refuse_elsewhere(log, machine, where)
        return _work(log, where, machine, limits, trace=trace)


def _refuse_elsewhere(log: ParityLog, machine: Machine, where: Executor) -> None:
    """Raise UsageError on another kind of machine: new runs would be compared with runs made there."""
    where.refuse_other(machine, log.folder)
    for one in log.environments:
        if (now := probe(one.python)) != one:
            raise UsageError(
                f"--continue {log.folder} has runs of {one.text}, which now has {now.beside(one)}. Begin anew"
            )
    if log.environments:
        return
    if done := [row.log for row in log.rows if row.log]:
        PastRun.read(done[0]).refuse_other_versions(log.folder)


def _refuse_what_parity_sets(common: Mapping[str, Any]) -> None:
    for toggle in toggles():
        if toggle.field in NOT_FOR_ALL and common.get(toggle.parameter) is not None:
            raise UsageError(f"{toggle.flag} cannot be given to parity, which starts many runs. Leave it out")


def _here(spec: ReplaySpec, machine: Machine) -> Here:
    """Describe the machine and the inputs. Slow: reads the inputs, and imports torch and transformers."""
    from actor_init.inputs.documents import documents_of
    from capture.file_format.capture_file import read_micro_batch
    from replay.resolution.model_source import find_source
    from replay.resolution.selection import select

    wanted = replace(spec.inputs, shuffle_inputs=True, max_inputs=spec.inputs.max_inputs or NUM_INPUTS)
    inputs = select(wanted, 0, 1).inputs
    if not inputs:
        raise UsageError("every input is damaged. Try: replay inspect, with that folder")
    batches = map(read_micro_batch, inputs)
    return Here(
        device="cuda" if machine.has_gpus else "cpu",
        num_devices=machine.num_devices,
        num_inputs=len(inputs),
        config=find_source(spec).config,
        must_pack=any(documents_of(batch).share_rows for batch in batches),
    )


def _work(log: ParityLog, where: Executor, machine: Machine, limits: RunLimits, *, trace: bool) -> int:
    run, runs_alone = where.runner(log.folder, machine, limits.at_once), where.runs_alone(machine, limits.at_once)
    until = limits.end()
    judge, progress = MatrixJudge(), ParityProgress(log)
    differences: Pairs = []
    interrupted = False
    try:
        with sigterm_interrupts():
            for are_references in (True, False):  # the others depend on the outcome of their references
                for number, settled in _settle(log, are_references, limits.each, run, until, runs_alone):
                    progress.ended(number, settled, judge.result_of(log.rows), run.num_running)
            if trace:
                differences.extend(Partings(log, limits.each, run).of(judge.result_of(log.rows)))
    except KeyboardInterrupt:
        interrupted = True
    result = judge.result_of(log.rows)
    report(log, result, differences, progress)
    if interrupted:
        return INTERRUPTED
    failed = any(row.state in (State.FAILED, State.PENDING) for row in log.rows)
    return 0 if result.is_clean and result.cells and not failed else 1


def _settle(
    log: ParityLog, are_references: bool, limit: float, run: RunTasks, until: float, ran_alone: bool
) -> Iterator[tuple[int, Row]]:
    """Run pending rows, except those whose reference failed. Interrupted or out-of-time rows stay pending."""
    states = {row.cell.name: row.state for row in log.rows}
    runnable = []
    for number, row in log.pending():
        if (row.cell.role is Role.REFERENCE) is not are_references:
            continue
        reference = State.DONE if are_references else states[row.cell.reference]
        if reference is State.DONE:
            runnable.append((number, row))
        elif reference is not State.PENDING:
            error = f"not run because its reference was not: {row.cell.reference}"
            yield number, log.settle(number, state=State.FAILED, error=error)
    tasks = ((number, _task(log, number, row, limit)) for number, row in runnable)
    for number, child in run(tasks, until=until):
        state, error, folder = _outcome(child)
        row = log.settle(number, state=state, error=error, seconds=child.seconds, ran_alone=ran_alone, log=folder)
        yield number, row


def _task(log: ParityLog, number: int, row: Row, limit: float) -> Task:
    arguments = command_line(row.cell.spec)
    return Task.attempt(
        log.home_of(number), arguments, num_processes=row.cell.num_processes, limit=limit, python=row.cell.python
    )


def _outcome(child: Child) -> tuple[State, str, Path | None]:
    if child.is_refusal:
        return State.REFUSED, child.error, None
    if child.exit_code not in (0, 1):
        return State.FAILED, child.error, None
    try:
        # an exit code of 1 with every pass done: some inputs were damaged
        return State.DONE, child.error, PastRun.read(child.logs).folder
    except UsageError as error:
        has_run = any(child.logs.glob("*/run.json"))
        return State.FAILED, in_flags(error) if has_run else child.error, None
