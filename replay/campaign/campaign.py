"""Run the replays that a command needs, its planned runs. A journal keeps how each planned run ended.

So a command with `--continue` loses only what was running when it was killed.

A campaign writes two files into the command's folder, `logs/<time>-<command>/`. `<command>.json` has the plan, from
which the command makes its planned runs, and the result. It is written when the command begins, with `null` as the
result, and again whenever the command calls `Campaign.write`: some commands do so as results come in, others only at
the end.

    {"format": 2, "command": "replay scan --group 4", "machine": {"num_devices": 2, "has_gpus": false},
     "versions": {"torch": "2.11.0", ...}, "plan": {...}, "result": {...}}

`journal.jsonl` gets a line whenever a planned run has ended, and none for one that is broken off with the command:

    {"job": "3f2a...", "exit_code": 0, "seconds": 8.1, "ran_alone": true, "attempt": "groups/0001/0"}

In this line `job` is the digest of the planned run, not the training that was recorded. `attempt` is the folder of this
execution; a planned run that runs again gets a new one beside it.

With `--continue` a command asks for the same planned runs again. Those in the journal come back without a run, except
those that may have run beside others and have to run again (`Campaign._must_run_again`), and those that the command
gives to `Campaign.forget`.
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
from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import MeasureSpec, ReplaySpec
from replay.processes.child_job import ChildJob
from replay.processes.pool import (
    OUTPUT,
    REFUSED_EXIT_CODE,
    Machine,
    ProcessResult,
    RunLimits,
    RunTasks,
    Task,
    interrupt_on_sigterm,
)
from replay.runlog.writer import add_log_folder_note, create_folder, list_versions, refuse_other_versions

FORMAT = 2
JOURNAL = "journal.jsonl"
PlanT = TypeVar("PlanT")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A replay in processes of its own.

    The journal names a planned run by a digest of its fields and their names, without the values of `home` and the log
    folder. If a field of a planned run or of its spec is added or renamed, every digest changes, and a journal that
    was written before knows none of its planned runs.

    home      folder of the planned run's attempts, relative to the campaign's folder, such as `groups/0001`. Planned
              runs that are given to `Campaign.run_all` together need homes of their own (`Task.for_attempt` says why)
    python    path of another environment's interpreter; empty: the interpreter that runs this code
    repeat    number of this run, if the same replay is run several times
    inputs_digest  digest of the inputs if their folder may be filled anew (`minimise`); empty: their path says enough
    """

    home: str
    spec: ReplaySpec
    num_processes: int = 1
    python: str = ""
    repeat: int = 0
    inputs_digest: str = ""

    def digest_in(self, folder: Path) -> str:
        """Return the digest by which the campaign in `folder` knows the planned run."""
        # The digest leaves out where the planned run writes its log, and takes the campaign's folder out of all paths.
        # So a campaign whose folder was moved or copied still knows the planned runs with paths below it.
        measure = replace(self.spec.measure, log_folder=MeasureSpec().log_folder)
        content = to_json(replace(self, home="", spec=replace(self.spec, measure=measure)))
        # As JSON escapes it, without the quotes.
        folder_in_json = json.dumps(str(folder.absolute()))[1:-1]
        text = json.dumps(content, sort_keys=True).replace(f"{folder_in_json}/", "")
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def has_ended_without_answer(process_result: ProcessResult) -> bool:
    """Did a signal or the time limit end the replay before it gave an answer?

    Exit codes 0, 1 (it failed) and 2 (it refused its options) are answers.
    """
    return process_result.exit_code not in (0, 1, REFUSED_EXIT_CODE)


class EndedRun(NamedTuple):
    """How a planned run ended.

    position   number of the planned run among those that `Campaign.run_all` was given, from 0
    ran_alone  the command that ran it ran one planned run at a time. False: others may have run beside it, so its times
               mean nothing. On Ray always False
    is_new     the planned run was run now, also if it had run before; False: its result was in the journal
    """

    position: int
    process_result: ProcessResult
    ran_alone: bool
    is_new: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _JournalLine:
    """What the journal keeps of a planned run that has ended.

    job        digest of the planned run. Journals of earlier versions have the JSON key `job`, so the attribute keeps
               that name
    exit_code  None: it did not end within its time limit
    ran_alone  as in EndedRun
    attempt    folder of this attempt, below `PlannedRun.home`; relative to the campaign's folder
    """

    job: str
    exit_code: int | None
    seconds: float
    ran_alone: bool
    attempt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignFile:
    """`<command>.json`. Its schema is `replay/schemas/campaign.json`; `plan` and `result` depend on the command."""

    format: int
    command: str
    machine: Machine
    versions: Mapping[str, str | None]
    plan: Mapping[str, Any]
    result: Mapping[str, Any] | None


@dataclass(kw_only=True, slots=True)
class Campaign(Generic[PlanT]):
    """The planned runs of one command: which of them have ended, and where and under which limits the others run.

    folder      holds everything that the campaign writes
    command_name  such as `scan`
    command_line  what a user types to repeat the campaign
    machine     the devices with which the campaign was begun
    plan        what the command makes its planned runs from; read and written as JSON
    versions    of the libraries when the campaign was begun
    result      what the command knows of its answer so far: a dataclass or a mapping, written as JSON. None: nothing
                yet, also in a campaign that was read: the command finds its result anew
    may_succeed_alone  is given the result of a planned run that may have had others beside it. Tells whether the
                planned run might end otherwise if it ran alone: then it runs again. Default: `has_ended_without_answer`
    """

    folder: Path
    command_name: str
    command_line: str
    machine: Machine
    plan: PlanT
    versions: Mapping[str, str | None] = field(default_factory=list_versions)
    result: Any = None
    may_succeed_alone: Callable[[ProcessResult], bool] = has_ended_without_answer
    _lines_by_digest: dict[str, _JournalLine] = field(default_factory=dict)
    _task_runner: RunTasks | None = None
    _runs_are_alone: bool = True
    _run_limit_seconds: float = 0.0
    # A time of `time.monotonic`. After it `run_all` starts no run; those that run go on.
    _start_deadline: float = 0.0

    @classmethod
    def begin(cls, name: str, logs: Path, plan: PlanT, *, arguments: Sequence[str], machine: Machine) -> Self:
        """Begin a campaign in a new folder below `logs`.

        arguments  what follows `replay <name>` on the command line that repeats the campaign
        """
        return cls.begin_in(create_folder(logs, name), name, plan, arguments=arguments, machine=machine)

    @classmethod
    def begin_in(cls, folder: Path, name: str, plan: PlanT, *, arguments: Sequence[str], machine: Machine) -> Self:
        """Begin a campaign in a folder that exists."""
        campaign = cls(
            folder=folder,
            command_name=name,
            command_line=shlex.join(["replay", name, *arguments]),
            machine=machine,
            plan=plan,
        )
        campaign.write()
        return campaign

    @classmethod
    def read(cls, name: str, folder: Path, plan_class: type[PlanT]) -> Self:
        """Read the campaign that `replay <name>` left.

        Raises UsageError if the folder holds no campaign file that this version can read, or a damaged journal.
        """
        path = folder / f"{name}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
                raise UsageError(
                    f"{path} is of format {content['format']}; this version can only continue format {FORMAT}"
                )
            file = from_json(CampaignFile, content, source=f"{path} is damaged", ignore_unknown_fields=True)
            plan = from_json(plan_class, file.plan, source=f"{path} is damaged: plan")
            lines = _read_journal(folder / JOURNAL)
        except (OSError, ValueError) as error:
            match error:
                # Comes first, since a UsageError is a ValueError.
                case UsageError():
                    message = format_error_with_flags(error)
                case OSError():
                    message = f"the campaign cannot be read: {error}"
                case _:
                    message = f"{path} is damaged: {error}"
            raise UsageError(f"{message}. Try: replay {name}, from the beginning") from error
        return cls(
            folder=folder,
            command_name=name,
            command_line=file.command,
            machine=file.machine,
            versions=file.versions,
            plan=plan,
            # A planned run that ran again has several lines, of which the last one counts.
            _lines_by_digest={line.job: line for line in lines},
        )

    def write(self) -> None:
        """Write the plan and what is known of the result."""
        content = CampaignFile(
            format=FORMAT,
            command=self.command_line,
            machine=self.machine,
            versions=self.versions,
            plan=to_json(self.plan),
            result=to_json(self.result),
        )
        write_atomically(self.path, json_bytes(content))

    @property
    def path(self) -> Path:
        return self.folder / f"{self.command_name}.json"

    @property
    def continue_command(self) -> str:
        """Return what a user types to go on with the campaign."""
        return shlex.join(["replay", self.command_name, "--continue", str(self.folder)])

    def open(self, executor: Executor, limits: RunLimits, *, storage: str | None = None) -> None:
        """Make the campaign ready to run its planned runs on `executor`.

        The time that `limits` gives the whole command begins now. After this time `run_all` starts no planned run,
        unless it is given another deadline; `run` starts its planned run at any time.

        storage  None: planned runs may run side by side, as `RunLimits.at_once` says. Otherwise they run one after
                 another, on Ray and on this machine. Only Ray uses the value: the folder or URI where it keeps
                 the states from which planned runs resume. On this machine the folder of these states is in their specs
        """
        self._run_limit_seconds, self._start_deadline = limits.run_limit_seconds, limits.compute_start_deadline()
        if storage is None:
            self._task_runner = executor.make_runner(self.folder, self.machine, limits.at_once)
        else:
            self._task_runner = executor.make_resumable_runner(self.folder, self.machine, storage)
        self._runs_are_alone = executor.gives_whole_machine(self.machine, limits.at_once)

    @property
    def num_running(self) -> int:
        return self._task_runner.num_running if self._task_runner is not None else 0

    @property
    def num_ended(self) -> int:
        """Return how many planned runs have a result, including those that have to run again."""
        return len(self._lines_by_digest)

    def check_can_continue(self, executor: Executor, planned_runs: Iterable[PlannedRun] | None = None) -> None:
        """Raise UsageError if planned runs still have to run, and this machine or its libraries do not suit them.

        planned_runs  all planned runs that the command may ask for; None: what they are depends on how others end, so
                      some may have to run
        """
        if planned_runs is not None and all(self.find_ended(planned_run) for planned_run in planned_runs):
            return
        executor.check_machine(self.machine, self.folder)
        refuse_other_versions(self.versions, self.folder)

    def find_ended(self, planned_run: PlannedRun, position: int = 0) -> EndedRun | None:
        """Return what the journal knows of how a planned run ended.

        None if it has not ended, or if it has to run again (`_must_run_again`).

        position  is copied into the result
        """
        line = self._lines_by_digest.get(planned_run.digest_in(self.folder))
        if line is None:
            return None
        attempt_folder = self.folder / line.attempt
        process_result = ProcessResult(
            exit_code=line.exit_code, seconds=line.seconds, output=attempt_folder / OUTPUT, logs=attempt_folder
        )
        if self._must_run_again(line, process_result):
            return None
        return EndedRun(position, process_result, line.ran_alone, is_new=False)

    def _must_run_again(self, line: _JournalLine, process_result: ProcessResult) -> bool:
        """Must a planned run that has ended run again?

        Only if others may have run beside it: they may have taken the memory or the time that it lacked.
        """
        return not line.ran_alone and self.may_succeed_alone(process_result)

    def forget(self, planned_run: PlannedRun) -> None:
        """Forget, in this process, the result of a planned run, so that it runs again.

        Its line stays in the journal. If a planned run has several lines, the last one counts.
        """
        self._lines_by_digest.pop(planned_run.digest_in(self.folder), None)

    def run_all(
        self,
        planned_runs: Iterable[PlannedRun],
        *,
        start_deadline: float | None = None,
        working_folder: Path = Path(),
    ) -> Generator[EndedRun]:
        """Yield how each planned run ended.

        First come those whose result `find_ended` has. Then the others are run, and come in the order in which they
        end. A run that the deadline keeps from starting is not yielded.

        start_deadline  no run is started after this time of `time.monotonic`; None: the deadline from the limits
        working_folder  the folder in which relative paths of their specs begin
        """
        assert self._task_runner is not None, "call open() first"
        pending = {}
        for position, planned_run in enumerate(planned_runs):
            if (ended := self.find_ended(planned_run, position)) is not None:
                yield ended
            else:
                pending[position] = planned_run
        # Making a task creates its planned run's home. So tasks are made only as the runner asks for them.
        tasks = ((position, self._make_task(planned_run, working_folder)) for position, planned_run in pending.items())
        start_deadline = self._start_deadline if start_deadline is None else start_deadline
        for position, process_result in self._task_runner(tasks, start_deadline=start_deadline):
            self._add_to_journal(pending[position], process_result)
            yield EndedRun(position, process_result, self._runs_are_alone, is_new=True)

    def run(self, planned_run: PlannedRun, working_folder: Path = Path()) -> ProcessResult:
        """Return how one planned run ended. If `find_ended` has no result of it, it is run, also after the deadline."""
        [ended] = self.run_all([planned_run], start_deadline=math.inf, working_folder=working_folder)
        return ended.process_result

    def _make_task(self, planned_run: PlannedRun, working_folder: Path) -> Task:
        return Task.for_attempt(
            self.folder / planned_run.home,
            ChildJob(spec=planned_run.spec.make_child_spec()),
            num_processes=planned_run.num_processes,
            limit=self._run_limit_seconds,
            python=planned_run.python,
            folder=working_folder,
        )

    def _add_to_journal(self, planned_run: PlannedRun, process_result: ProcessResult) -> None:
        """Write a planned run that has ended into the journal."""
        line = _JournalLine(
            job=planned_run.digest_in(self.folder),
            exit_code=process_result.exit_code,
            seconds=process_result.seconds,
            ran_alone=self._runs_are_alone,
            attempt=process_result.logs.relative_to(self.folder).as_posix(),
        )
        self._lines_by_digest[line.job] = line
        with open(self.folder / JOURNAL, "a", encoding="utf-8") as journal:
            journal.write(json.dumps(to_json(line), allow_nan=False) + "\n")


def _read_journal(path: Path) -> list[_JournalLine]:
    """Return the lines of a journal, and remove an unfinished last line from the file."""
    if not path.exists():
        return []
    # What ended the command may have cut its last write short. The next line has to begin on a line of its own.
    *lines, unfinished = path.read_bytes().split(b"\n")
    if unfinished:
        write_atomically(path, b"".join(line + b"\n" for line in lines))
    return [
        parse_json(_JournalLine, line, source=f"{path} is damaged in line {number}")
        for number, line in enumerate(lines, start=1)
    ]


class Interruption:
    """Tells whether Ctrl-C or SIGTERM ended a block of `catch_interruption`."""

    error: KeyboardInterrupt | None = None

    @property
    def happened(self) -> bool:
        return self.error is not None

    def reraise(self, folder: Path) -> None:
        """Raise the interruption that ended the block, if one did, with a note that the results are in `folder`.

        Write the results before this call.
        """
        if self.error is not None:
            add_log_folder_note(self.error, folder)
            raise self.error


@contextmanager
def catch_interruption() -> Iterator[Interruption]:
    """Leave the block on Ctrl-C or SIGTERM, so that the caller reports the results so far.

    Planned runs in progress are ended first. For this, keep the generator of `Campaign.run_all` in no variable: the
    loop over it then holds the only reference, and an exception that leaves the loop closes it.
    """
    interruption = Interruption()
    try:
        with interrupt_on_sigterm():
            yield interruption
    except KeyboardInterrupt as error:
        interruption.error = error
