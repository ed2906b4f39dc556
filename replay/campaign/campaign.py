"""Run the jobs that a command asks for, each once: a journal keeps those that are over, whatever ends the command.

`logs/<time>-<command>/` holds two files. `<command>.json` has the plan, what the command needs to ask for its jobs, and
the result; it is written when the command begins and when it ends:

    {"format": 1, "command": "replay scan --group 4", "machine": {"num_devices": 2, "has_gpus": false},
     "versions": {"torch": "2.11.0", ...}, "plan": {...}, "result": {...}}

`journal.jsonl` gets a line whenever a job is over:

    {"job": "3f2a...", "exit_code": 0, "seconds": 8.1, "ran_alone": true, "home": "groups/0001/0"}

`--continue` asks for the same jobs again. Those of the journal come back without a run.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

from actor_init.as_json import from_json, json_bytes, parse_json, to_json
from actor_init.spec import UsageError
from capture.file_format.atomic_write import write_atomically
from replay.campaign.executor import Executor
from replay.options.option_parsing import in_flags
from replay.options.spec import InputsSpec, MeasureSpec, ReplaySpec
from replay.processes.child_job import ChildJob
from replay.processes.pool import REFUSED_EXIT_CODE, Child, Machine, RunLimits, RunTasks, Task, sigterm_interrupts
from replay.profiling.prediction import InputShape, read_shapes
from replay.resolution.selection import Selection, select
from replay.runlog.writer import create_folder, list_versions, refuse_other_versions

FORMAT = 1
JOURNAL = "journal.jsonl"
OUTPUT = "output.txt"
Plan = TypeVar("Plan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A replay in processes of its own.

    home      its folder in the campaign's, such as `groups/0001`, which holds a folder for each attempt
    python    path of another environment's interpreter; empty: this one
    repeat    which of several runs of the same
    contents  tells its inputs from others that may lie in the same folder; empty: the folder always holds the same
    """

    home: str
    spec: ReplaySpec
    num_processes: int = 1
    python: str = ""
    repeat: int = 0
    contents: str = ""

    def digest_in(self, folder: Path) -> str:
        """Return a digest of what is run, for the campaign in `folder`.

        Where its files lie makes no other job of it: a campaign's folder may be moved.
        """
        measure = replace(self.spec.measure, log_folder=MeasureSpec().log_folder)
        what = to_json(replace(self, home="", spec=replace(self.spec, measure=measure)))
        text = json.dumps(what, sort_keys=True).replace(f"{json.dumps(str(folder.absolute()))[1:-1]}/", "")
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def ended_early(child: Child) -> bool:
    """Did a replay neither come to its end nor refuse its options?"""
    return child.exit_code not in (0, 1, REFUSED_EXIT_CODE)


class Settled(NamedTuple):
    """A job that is over."""

    place: int  # among the jobs that were asked for
    child: Child
    ran_alone: bool  # otherwise its times mean nothing
    is_new: bool  # False: it was in the journal


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A line of the journal."""

    job: str  # digest
    exit_code: int | None
    seconds: float
    ran_alone: bool  # otherwise its times mean nothing
    home: str  # relative to the campaign's folder


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """The fields of `<command>.json` that --continue reads."""

    format: int
    command: str
    machine: Machine
    versions: dict[str, str | None]
    plan: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Campaign(Generic[Plan]):
    """The jobs of one command.

    name        of the command
    command     as it was typed
    machine     on which it was begun
    plan        what the command needs to ask for its jobs; read and written as JSON
    has_failed  whether a job is to run again where it ran beside others
    """

    folder: Path
    name: str
    command: str
    machine: Machine
    plan: Plan
    versions: Mapping[str, str | None] = field(default_factory=list_versions)  # of what it was begun with
    result: Mapping[str, Any] | None = None
    has_failed: Callable[[Child], bool] = ended_early
    _entries: dict[str, _Entry] = field(default_factory=dict)  # by the job's digest
    _run_tasks: RunTasks | None = None
    _runs_alone: bool = True
    _limit: float = 0.0  # seconds for one job
    _until: float = 0.0  # monotonic; no job is started after it

    @classmethod
    def begin(cls, name: str, logs: Path, plan: Plan, *, words: Sequence[str], machine: Machine) -> Self:
        """Make the folder of a new campaign below `logs`. `words` are the options of the command line that began it."""
        return cls.begin_in(create_folder(logs, name), name, plan, words=words, machine=machine)

    @classmethod
    def begin_in(cls, folder: Path, name: str, plan: Plan, *, words: Sequence[str], machine: Machine) -> Self:
        """Begin a campaign in a folder that is there, with what its plan needs."""
        campaign = cls(
            folder=folder,
            name=name,
            command=shlex.join(["replay", name, *words]),
            machine=machine,
            plan=plan,
        )
        campaign.write()
        return campaign

    @classmethod
    def read(cls, name: str, folder: Path, kind: type[Plan]) -> Self:
        """Read the campaign that `replay <name>` left. Raises UsageError for anything but one of this version."""
        path = folder / f"{name}.json"
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(whole, dict) and whole.get("format", FORMAT) != FORMAT:
                raise UsageError(f"{path} is of format {whole['format']}; this version goes on with {FORMAT} alone")
            written = from_json(_File, whole, source=f"{path} is damaged", ignore_others=True)
            plan = from_json(kind, written.plan, source=f"{path} is damaged: plan")
            entries = _read_journal(folder / JOURNAL)
        except (OSError, ValueError) as error:
            said = in_flags(error) if isinstance(error, UsageError) else f"{path} is damaged: {error}"
            raise UsageError(f"{said}. Try: replay {name}, from the beginning") from error
        return cls(
            folder=folder,
            name=name,
            command=written.command,
            machine=written.machine,
            versions=written.versions,
            plan=plan,
            _entries={entry.job: entry for entry in entries},
        )

    def write(self) -> None:
        """Write the plan and what is known of the result."""
        whole = {
            "format": FORMAT,
            "command": self.command,
            "machine": self.machine,
            "versions": self.versions,
            "plan": self.plan,
            "result": self.result,
        }
        write_atomically(self.path, json_bytes(whole))

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.json"

    def open(self, where: Executor, limits: RunLimits, *, storage: str | None = None) -> None:
        """Have jobs run there, under these limits; the time for all of them begins.

        storage  where jobs keep the states that they go on from; None: they keep none
        """
        self._limit, self._until = limits.each, limits.compute_deadline()
        if storage is None:
            self._run_tasks = where.runner(self.folder, self.machine, limits.at_once)
        else:
            self._run_tasks = where.trainer(self.folder, self.machine, storage)
        self._runs_alone = where.runs_alone(self.machine, limits.at_once)

    @property
    def num_running(self) -> int:
        return self._run_tasks.num_running if self._run_tasks is not None else 0

    @property
    def num_known(self) -> int:
        """Return how many jobs are over."""
        return len(self._entries)

    def refuse_elsewhere(self, where: Executor, jobs: Iterable[Job] | None = None) -> None:
        """Raise UsageError if a job has to run, and cannot run there as those did that are known.

        jobs  None: which there will be is not known yet
        """
        if jobs is not None and all(self.known(job) for job in jobs):
            return
        where.refuse_other(self.machine, self.folder)
        refuse_other_versions(self.versions, self.folder)

    def known(self, job: Job, place: int = 0) -> Settled | None:
        """Return what came of a job; None if it has to run.

        It has to run again if it failed beside others: alone it might succeed.
        """
        entry = self._entries.get(job.digest_in(self.folder))
        if entry is None:
            return None
        home = self.folder / entry.home
        child = Child(exit_code=entry.exit_code, seconds=entry.seconds, output=home / OUTPUT, logs=home)
        if not entry.ran_alone and self.has_failed(child):
            return None
        return Settled(place, child, entry.ran_alone, is_new=False)

    def forget(self, job: Job) -> None:
        """Have a job run again, although it is known."""
        self._entries.pop(job.digest_in(self.folder), None)

    def settle(self, jobs: Iterable[Job], *, until: float | None = None) -> Generator[Settled]:
        """Yield each job when it is over, first those that are known.

        until  monotonic time, after which none of the others starts; None: that of the limits
        """
        assert self._run_tasks is not None, "open() says where jobs run"
        unknown = {}
        for place, job in enumerate(jobs):
            if (settled := self.known(job, place)) is not None:
                yield settled
            else:
                unknown[place] = job
        tasks = ((place, self._task(job)) for place, job in unknown.items())
        for place, child in self._run_tasks(tasks, until=self._until if until is None else until):
            self._note(unknown[place], child)
            yield Settled(place, child, self._runs_alone, is_new=True)

    def run(self, job: Job) -> Child:
        """Run one job, unless it is known, whatever time is left."""
        [settled] = self.settle([job], until=math.inf)
        return settled.child

    def _task(self, job: Job) -> Task:
        return Task.attempt(
            self.folder / job.home,
            ChildJob(spec=job.spec),
            num_processes=job.num_processes,
            limit=self._limit,
            python=job.python,
        )

    def _note(self, job: Job, child: Child) -> None:
        entry = _Entry(
            job=job.digest_in(self.folder),
            exit_code=child.exit_code,
            seconds=child.seconds,
            ran_alone=self._runs_alone,
            home=child.logs.relative_to(self.folder).as_posix(),
        )
        self._entries[entry.job] = entry
        with open(self.folder / JOURNAL, "a", encoding="utf-8") as journal:
            journal.write(json.dumps(to_json(entry), allow_nan=False) + "\n")


def _read_journal(path: Path) -> list[_Entry]:
    """Return the lines of a journal. A last line that was cut short, with what ended the command, is taken off it."""
    if not path.exists():
        return []
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
    return [
        parse_json(_Entry, line, source=f"{path} is damaged in line {number}")
        for number, line in enumerate(lines, start=1)
    ]


class Interruption:
    """Whether a campaign was ended by Ctrl-C or SIGTERM."""

    happened = False


@contextmanager
def until_interrupted() -> Iterator[Interruption]:
    """Leave the block on Ctrl-C or SIGTERM, after running jobs were ended, so that what is known can be reported."""
    interruption = Interruption()
    try:
        with sigterm_interrupts():
            yield interruption
    except KeyboardInterrupt:
        interruption.happened = True


# Read the shapes of the inputs that a campaign replays in an order of its own.


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedInputs:
    """The inputs of a folder that can be fed to a model, and the files that cannot, each with the reason."""

    selection: Selection
    shapes: Sequence[InputShape]
    damaged: Sequence[tuple[Path, str]]

    @classmethod
    def of(cls, spec: InputsSpec, *, loss: str, grad_accumulation: int | None) -> "ShapedInputs":
        """Read the shapes, of one data rank. Raises UsageError if no input can be replayed.

        grad_accumulation  passes of a window; None: the job's
        """
        selection = select(spec, 0, 1, loss=loss, grad_accumulation=grad_accumulation)
        shapes, wrong = read_shapes(selection.inputs, loss)
        if not shapes:
            raise UsageError("no input can be fed to a model. Try: replay inspect, with that folder")
        return cls(selection=selection, shapes=shapes, damaged=[*selection.damaged, *wrong])
