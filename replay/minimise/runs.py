"""Run `replay minimise`: see the replay fail, then replay less and less of it, each time in processes of its own."""

import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from actor_init.probe.small_config import DEPTHS
from actor_init.spec import UsageError
from capture.file_format.capture_file import Call, read_call
from capture.file_format.folder_layout import ACTOR_CONFIG_NAME, folder_of_capture
from capture.file_format.micro_batch import CaptureError
from replay.minimise.candidate import Candidate, Cut
from replay.minimise.console import MinimiseConsole
from replay.minimise.cutting import Shape, cut_call
from replay.minimise.failure import Failure, Log, failure_of
from replay.minimise.folder import write_folder
from replay.minimise.parity_cell import ParityCell, read_cell
from replay.minimise.search import OutOfRunsError, Search
from replay.minimise.state import Limits, MinimiseLog, Trial
from replay.option_parsing import command_line
from replay.processes.child_job import ChildJob
from replay.processes.devices import Machine
from replay.processes.pool import Child, Task, run_child, sigterm_interrupts
from replay.report.text import counted
from replay.resolution.selection import select
from replay.runlog.writer import INTERRUPTED, create_folder
from replay.spec import ReplaySpec
from replay.wording import in_flags

KEPT_CALLS = 16  # captures in memory
AS_TYPED = "as typed"


def begin(spec: ReplaySpec, num_processes: int | None, limits: Limits, *, redact: bool) -> int:
    """Minimise the failure of a replay, and return the exit code.

    0: it failed, and what is smallest was written; 1: it did not fail in `limits.tries` runs. Raises UsageError before
    anything has run if there is nothing to replay, or too few devices.
    """
    ranks = spec.actor.parallel.tp * spec.actor.parallel.ring
    num_processes = ranks if num_processes is None else num_processes
    if num_processes % ranks:
        raise UsageError(
            f"--processes {num_processes} is no multiple of tp x ring, {ranks}. Try: --processes {ranks}, or without"
        )
    own = ["--processes", str(num_processes)] if num_processes > ranks else []
    return _begin(spec, num_processes, limits, redact=redact, typed=[*own, *command_line(spec)])


def begin_with_cell(parity: Path, name: str, logs: Path, limits: Limits, *, redact: bool) -> int:
    """Minimise what a cell of the parity run in the folder `parity` differs in; see `begin`.

    Raises UsageError for a cell that does not differ.
    """
    cell, num_processes = read_cell(parity, name)
    spec = replace(cell.spec, measure=replace(cell.spec.measure, log_folder=logs))
    typed = ["--parity", str(parity), "--cell", name]
    return _begin(spec, num_processes, limits, redact=redact, typed=typed, cell=cell)


def _begin(
    spec: ReplaySpec,
    num_processes: int,
    limits: Limits,
    *,
    redact: bool,
    typed: Sequence[str],
    cell: ParityCell | None = None,
) -> int:
    machine = Machine.here()
    if machine.has_gpus and num_processes > machine.num_devices:
        raise UsageError(
            f"{counted(num_processes, 'process')} need as many GPUs, and there are {machine.num_devices}. "
            "Try: a smaller --processes, --tp or --ring"
        )
    sources = _sources(spec, num_processes // (spec.actor.parallel.tp * spec.actor.parallel.ring))
    log = MinimiseLog(
        folder=create_folder(spec.measure.log_folder.absolute(), "minimise"),
        command=shlex.join(["replay", "minimise", *(["--redact"] if redact else []), *typed]),
        spec=spec,
        limits=limits,
        num_processes=num_processes,
        redact=redact,
        sources=sources,
        parity=cell,
    )
    log.write()
    return _work(log)


def go_on(folder: Path, limits: Callable[[Limits], Limits]) -> int:
    """Go on with a minimisation, under the limits that `limits` makes of its own. Nothing is tried twice.

    Raises UsageError if there is no such minimisation, or if it was made with other versions.
    """
    log = MinimiseLog.read(folder)
    log.folder = folder.absolute()  # runs are made in other folders too
    log.limits = limits(log.limits)
    if missing := [path for path in log.sources if not _is_there(path)]:
        raise UsageError(
            f"--continue {folder}: {missing[0]} is no longer there. Try: replay minimise, from the beginning"
        )
    return _work(log)


def _is_there(path: Path) -> bool:
    return path.exists() or path.parent.is_file()  # in a segment


def _sources(spec: ReplaySpec, num_data_ranks: int) -> list[Path]:
    """Return the captures that a replay takes, in the order of its rounds. Raises UsageError if there are none."""
    of_ranks = [
        select(
            spec.inputs, rank, num_data_ranks, loss=spec.measure.loss, grad_accumulation=spec.actor.grad_accumulation
        )
        for rank in range(num_data_ranks)
    ]
    longest = max(len(one.inputs) for one in of_ranks)
    rounds = [one.inputs[number] for number in range(longest) for one in of_ranks if number < len(one.inputs)]
    if not rounds:
        raise UsageError("every input is damaged. Try: replay inspect, with that folder")
    return list(dict.fromkeys(path.absolute() for path in rounds))


def _work(log: MinimiseLog) -> int:
    console = MinimiseConsole(log)
    work = _Work(log=log, console=console)
    try:
        with sigterm_interrupts():
            return work.run()
    except KeyboardInterrupt:
        console.interrupted()
        return INTERRUPTED


@lru_cache(maxsize=KEPT_CALLS)
def _read(path: Path) -> Call:
    return read_call(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """What a replay did, of a parity cell with its reference. `child` is the one that failed, else the last."""

    failure: Failure | None
    child: Child
    num_runs: int
    seconds: float

    @property
    def said(self) -> str:
        if self.failure is not None:
            return f"another failure: {self.failure.text}"
        return f"refused: {self.child.error}" if self.child.is_refusal else "no failure"


@dataclass(kw_only=True, slots=True)
class _Work:
    log: MinimiseLog
    console: MinimiseConsole
    known: dict[Candidate, Trial] = field(default_factory=dict)

    def run(self) -> int:
        log = self.log
        if log.failure is None and not self._see_it_fail():
            self.console.not_seen()
            return 1
        assert log.failure is not None
        self.known = log.known
        shapes = [Shape.of(_read(path)) for path in log.sources]
        log.num_rows = sum(one.num_rows for one in shapes)
        log.num_tokens = sum(one.num_rows * one.num_columns for one in shapes)
        whole = [
            Cut(source=number, rows=tuple(range(shape.num_rows)), first=0, end=shape.num_columns)
            for number, shape in enumerate(shapes)
        ]
        search = Search(
            best=Candidate.of(whole, log.spec, log.num_processes),
            failure=log.failure,
            shapes=shapes,
            num_layers=log.num_layers,
            fixed=log.parity.shared if log.parity is not None else (),
            shows=self.shows,
        )
        is_whole = True
        try:
            search.run()
        except OutOfRunsError:
            is_whole = False
        written = write_folder(log, search.best, write_inputs, self._check, is_whole=is_whole)
        self.console.finish(written, is_whole=is_whole)
        return 0

    def _see_it_fail(self) -> bool:
        """Run the replay as it was typed until it fails. Raises UsageError if it refuses its options."""
        log = self.log
        as_typed = Candidate.of([], log.spec, log.num_processes)
        while sum(trial.what == AS_TYPED for trial in log.trials) < log.limits.tries:
            seen = self._seen(as_typed, None)
            if seen.child.is_refusal:
                raise UsageError(seen.child.error)
            start = Log.of(seen.child.logs).start
            log.num_layers = _num_layers({} if start is None else start.work.config)
            log.failure = seen.failure
            said = "no failure" if seen.failure is None else seen.failure.text
            self._settle(AS_TYPED, as_typed, seen.failure, said, seen.seconds, seen.num_runs)
            if seen.failure is not None:
                return True
        return False

    def shows(self, candidate: Candidate, what: str) -> Failure | None:
        """Replay a candidate, unless it was before; return the failure if it is the one that is looked for.

        Raises OutOfRunsError.
        """
        if candidate in self.known:
            return self.known[candidate].found
        log = self.log
        if log.num_runs >= log.limits.num_runs:
            raise OutOfRunsError
        inputs = log.home_of(len(log.trials) + 1) / "inputs"
        try:
            write_inputs(inputs, log.sources, candidate)
            found, _ = self._until_it_shows(candidate, inputs, what)
        except (CaptureError, UsageError) as error:
            found = self._settle(what, candidate, None, f"no replay: {in_flags(error)}", 0.0, 0)
        if found is None:
            shutil.rmtree(inputs, ignore_errors=True)
        return found

    def _check(self, candidate: Candidate, inputs: Path, what: str) -> tuple[Failure | None, Child]:
        """Replay a candidate outside the search: with other inputs than its own, or in another place."""
        return self._until_it_shows(replace(candidate, cuts=()), inputs, what)

    def _until_it_shows(self, candidate: Candidate, inputs: Path, what: str) -> tuple[Failure | None, Child]:
        """Replay a candidate; a failure that did not come at once is given as many runs as it took."""
        log, num_runs, seconds = self.log, 0, 0.0
        assert log.failure is not None
        for _ in range(sum(trial.what == AS_TYPED for trial in log.trials)):
            seen = self._seen(candidate, inputs)
            num_runs, seconds = num_runs + seen.num_runs, seconds + seen.seconds
            is_it = seen.failure is not None and seen.failure.is_same_as(log.failure)
            if is_it:
                break
        found = seen.failure if is_it else None
        self._settle(what, candidate, found, "shows it" if is_it else seen.said, seconds, num_runs)
        return found, seen.child

    def _seen(self, candidate: Candidate, inputs: Path | None) -> _Seen:
        """Run one replay, and of a parity cell its reference too; without `inputs`, with those that were typed."""
        number = len(self.log.trials) + 1
        home = self.log.home_of(number)
        self.console.begins(number)
        cell, num_runs, seconds = self.log.parity, 0, 0.0
        reference: Child | None = None
        if cell is not None:
            spec = cell.reference if inputs is None else _of_inputs(cell.reference_of(candidate), inputs)
            reference = self._run(home / "reference", spec, cell.num_processes)
            num_runs, seconds = 1, reference.seconds
            if reference.exit_code != 0:
                failure = failure_of(reference)
                return _Seen(failure=failure, child=reference, num_runs=num_runs, seconds=seconds)
        spec = self.log.spec if inputs is None else _of_inputs(candidate.spec, inputs)
        child = self._run(home / "runs", spec, candidate.num_processes)
        failure = failure_of(child)
        if cell is not None and reference is not None and child.exit_code == 0:
            failure = cell.failure(reference, child)
        return _Seen(failure=failure, child=child, num_runs=num_runs + 1, seconds=seconds + child.seconds)

    def _run(self, home: Path, spec: ReplaySpec, num_processes: int) -> Child:
        job = ChildJob(spec=spec)
        return run_child(Task.attempt(home, job, num_processes=num_processes, limit=self.log.limits.run))

    def _settle(
        self, what: str, candidate: Candidate, found: Failure | None, said: str, seconds: float, num_runs: int
    ) -> Failure | None:
        trial = Trial(
            what=what,
            cuts=list(candidate.cuts),
            spec=candidate.spec,
            num_processes=candidate.num_processes,
            num_runs=num_runs,
            found=found,
            said=said,
            seconds=seconds,
        )
        self.log.settle(trial)
        self.known[candidate] = trial
        self.console.tried(trial)
        return found


def _of_inputs(spec: ReplaySpec, inputs: Path) -> ReplaySpec:
    return replace(spec, inputs=replace(spec.inputs, inputs=inputs))


def _num_layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers that a config says; None if it does not."""
    text = config.get("text_config") or {}
    named = [part[name] for part in (config, text) for name in DEPTHS if isinstance(part.get(name), int)]
    return named[0] if named else None


def write_inputs(folder: Path, sources: Sequence[Path], candidate: Candidate) -> None:
    """Write the captures of a candidate, and the config beside them, into a new folder. Raises CaptureError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    for cut in candidate.cuts:
        cut_call(_read(sources[cut.source]), cut).write(folder)
    config = folder_of_capture(sources[0]) / ACTOR_CONFIG_NAME
    if config.is_file():
        shutil.copy(config, folder)
