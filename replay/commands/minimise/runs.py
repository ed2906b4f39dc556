"""Run `replay minimise`: see the replay fail, then replay less and less of it, each time in processes of its own."""

import hashlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import IO, Any

from actor_init.probe.small_config import DEPTHS
from actor_init.spec import UsageError
from capture.facts import Setting
from capture.file_format.micro_batch import CaptureError
from replay.campaign.campaign import Campaign, PlannedRun, catch_interruption
from replay.campaign.campaign_options import list_words
from replay.campaign.executor import ThisMachine
from replay.campaign.result import CampaignResult
from replay.commands.minimise.console import MinimiseConsole
from replay.commands.minimise.cutting import Candidate, CaptureShape, Cut, read_source, write_inputs
from replay.commands.minimise.failure import ReplayFailure, ReplayLog, find_failure
from replay.commands.minimise.folder import SmallestFolder, write_folder
from replay.commands.minimise.search import MinimiseSearch, OutOfRunsError
from replay.commands.minimise.trials import (
    AS_TYPED,
    MinimiseLimits,
    MinimiseLog,
    MinimiseOutcome,
    MinimisePlan,
    MinimiseTrial,
    ParityCell,
    read_cell,
)
from replay.options.option_parsing import format_command_line, format_error_with_flags
from replay.options.spec import ReplaySpec
from replay.output.text import pluralise
from replay.processes.pool import Machine, ProcessResult, RunLimits
from replay.resolution.resolve import set_loss_of_job
from replay.resolution.selection import Selection, select


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimisedOutcome(MinimiseOutcome):
    """The `result` of minimise.json at the end, with the folder of the smallest replay that fails; None: none did."""

    smallest: SmallestFolder | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimiseResult(CampaignResult):
    """The failure of the replay as it was given, and the folder of the smallest one; None: it did not fail."""

    failure: ReplayFailure | None
    smallest: SmallestFolder | None

    def _list_rows(self) -> Iterable[dict[str, Any]]:
        for trial in self.result["trials"]:
            yield {name: trial[name] for name in ("what", "num_runs", "said", "seconds")} | {
                "shows_it": trial["found"] is not None
            }


def begin(
    spec: ReplaySpec, num_processes: int | None, limits: Mapping[str, Any], *, redact: bool, screen: IO[str]
) -> MinimiseResult:
    """Minimise the failure of a replay.

    limits  those of `MinimiseLimits`, by name

    The exit code is 0 if it failed, and what is smallest was written; 1 if it did not fail in as many tries. Raises
    UsageError before anything has run if there is nothing to replay, or too few devices.
    """
    ranks = spec.actor.parallel.tp * spec.actor.parallel.ring
    num_processes = ranks if num_processes is None else num_processes
    if num_processes % ranks:
        raise UsageError(
            Setting("processes", num_processes),
            f"is no multiple of tp x ring, {ranks}",
            f"Try: {Setting('processes', ranks)}, or without",
        )
    words = list_words({"processes": num_processes if num_processes > ranks else None})
    arguments = [*words, *format_command_line(spec)]
    return _begin(spec, num_processes, limits, redact=redact, arguments=arguments, screen=screen)


def begin_with_cell(
    parity: Path, name: str, logs: Path, limits: Mapping[str, Any], *, redact: bool, screen: IO[str]
) -> MinimiseResult:
    """Minimise what a cell of the parity run in the folder `parity` differs in; see `begin`.

    Raises UsageError for a cell that does not differ.
    """
    cell, num_processes = read_cell(parity, name)
    spec = replace(cell.spec, measure=replace(cell.spec.measure, log_folder=logs))
    words = list_words({"parity": parity, "cell": name})
    return _begin(spec, num_processes, limits, redact=redact, arguments=words, cell=cell, screen=screen)


def _begin(
    spec: ReplaySpec,
    num_processes: int,
    limits: Mapping[str, Any],
    *,
    redact: bool,
    arguments: Sequence[str],
    cell: ParityCell | None = None,
    screen: IO[str],
) -> MinimiseResult:
    machine = Machine.detect()
    if machine.has_gpus and num_processes > machine.num_devices:
        raise UsageError(
            f"{pluralise(num_processes, 'process')} need as many GPUs, and there are {machine.num_devices}. "
            f"Try: a smaller {Setting('processes')}, {Setting('tp')} or {Setting('ring')}"
        )
    selections = _select_for_all(spec, num_processes // (spec.actor.parallel.tp * spec.actor.parallel.ring))
    plan = MinimisePlan(
        # A part of a capture has no noted loss that would tell it.
        spec=set_loss_of_job(spec, selections[0]),
        num_processes=num_processes,
        limits=MinimiseLimits(**limits),
        redact=redact,
        sources=_list_sources(selections),
        parity=cell,
    )
    campaign = Campaign.begin(
        "minimise",
        # The path is absolute because trials also run in other working folders.
        spec.measure.log_folder.absolute(),
        plan,
        arguments=[*list_words({"redact": redact}), *arguments],
        machine=Machine.detect(num_processes),
    )
    return _run(campaign, screen)


def resume(folder: Path, limits: Mapping[str, Any], *, screen: IO[str]) -> MinimiseResult:
    """Go on with a minimisation, under these limits and else its own. Nothing is run twice.

    Raises UsageError if there is no such minimisation, or if it was made on another machine or with other versions.
    """
    campaign = Campaign.read("minimise", folder.absolute(), MinimisePlan)
    campaign.check_can_continue(ThisMachine())
    plan = campaign.plan
    if missing := [path for path in plan.sources if not _exists(path)]:
        raise UsageError(
            Setting("continue_", folder),
            f": {missing[0]} is no longer there",
            "Try: replay minimise, from the beginning",
        )
    campaign.plan = replace(plan, limits=replace(plan.limits, **limits))
    return _run(campaign, screen)


def _exists(path: Path) -> bool:
    # A capture in a segment has the segment's file as its parent.
    return path.exists() or path.parent.is_file()


def _select_for_all(spec: ReplaySpec, num_data_ranks: int) -> list[Selection]:
    """Select the inputs of each data rank."""
    return [
        select(
            spec.inputs, rank, num_data_ranks, loss=spec.measure.loss, grad_accumulation=spec.actor.grad_accumulation
        )
        for rank in range(num_data_ranks)
    ]


def _list_sources(selections: Sequence[Selection]) -> list[Path]:
    """Return the captures that a replay takes, in the order of its rounds. Raises UsageError if there are none."""
    longest = max(len(selection.inputs) for selection in selections)
    rounds = [
        selection.inputs[number]
        for number in range(longest)
        for selection in selections
        if number < len(selection.inputs)
    ]
    if not rounds:
        raise UsageError("every input is damaged. Try: replay inspect, with that folder")
    return list(dict.fromkeys(path.absolute() for path in rounds))


def _run(campaign: Campaign[MinimisePlan], screen: IO[str]) -> MinimiseResult:
    campaign.open(
        ThisMachine(), RunLimits(run_limit_seconds=campaign.plan.limits.run, total_seconds=None, at_once=None)
    )
    log = MinimiseLog(campaign=campaign)
    console = MinimiseConsole(log, screen)
    smallest = None
    with catch_interruption() as interruption:
        smallest = _Minimisation(log=log, console=console).run()
        log.write_outcome(MinimisedOutcome, smallest=smallest)
    if interruption.happened:
        console.report_interruption()
    interruption.reraise(campaign.folder)
    return MinimiseResult.from_campaign(
        campaign, exit_code=1 if smallest is None else 0, failure=log.failure, smallest=smallest
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrialPlan:
    """A trial that is to be made.

    home      its folder in the campaign's
    inputs    what it replays; None: as it was typed
    inputs_digest  tells its inputs from those of other trials
    folder    where its relative paths begin
    """

    what: str
    candidate: Candidate
    home: str
    inputs: Path | None = None
    inputs_digest: str = ""
    folder: Path = Path()

    def with_inputs(self, spec: ReplaySpec) -> ReplaySpec:
        """Return a spec with its inputs."""
        return spec if self.inputs is None else replace(spec, inputs=replace(spec.inputs, inputs=self.inputs))


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrialOutcome:
    """What a replay did; of a parity cell its reference ran before it, and alone if that failed."""

    failure: ReplayFailure | None
    children: list[ProcessResult]

    @property
    def child(self) -> ProcessResult:
        return self.children[-1]

    @property
    def text(self) -> str:
        if self.failure is not None:
            return f"another failure: {self.failure.text}"
        return f"refused: {self.child.error}" if self.child.is_refusal else "no failure"


@dataclass(kw_only=True, slots=True)
class _Minimisation:
    """Ask for one replay after another. Those that the campaign knows come back unrun, and are not printed again."""

    log: MinimiseLog
    console: MinimiseConsole
    # By candidate of the search, the failure that it showed; None if it showed none.
    failures: dict[Candidate, ReplayFailure | None] = field(default_factory=dict)
    # Whether the current trial has a run that was not in the journal.
    is_new: bool = False

    def run(self) -> SmallestFolder | None:
        log = self.log
        if not self._reproduce_failure():
            self.console.report_no_failure()
            return None
        assert log.failure is not None
        shapes = [CaptureShape.read(read_source(path)) for path in log.plan.sources]
        log.num_rows = sum(shape.num_rows for shape in shapes)
        log.num_tokens = sum(shape.num_rows * shape.num_columns for shape in shapes)
        whole_cuts = [
            Cut(source=number, rows=tuple(range(shape.num_rows)), first=0, end=shape.num_columns)
            for number, shape in enumerate(shapes)
        ]
        search = MinimiseSearch(
            best=Candidate.from_spec(whole_cuts, log.plan.spec, log.plan.num_processes),
            failure=log.failure,
            shapes=shapes,
            num_layers=log.num_layers,
            fixed=log.plan.parity.shared_flags if log.plan.parity is not None else (),
            shows=self.try_candidate,
        )
        is_whole = True
        try:
            search.run()
        except OutOfRunsError:
            is_whole = False
        smallest = write_folder(log, search.best, self._check, is_whole=is_whole)
        self.console.finish(smallest, is_whole=is_whole)
        return smallest

    def _reproduce_failure(self) -> bool:
        """Run the replay as it was typed until it fails. Raises UsageError if it refuses its options."""
        log = self.log
        candidate = Candidate.from_spec([], log.plan.spec, log.plan.num_processes)
        for repeat in count():
            trial = _TrialPlan(what=AS_TYPED, candidate=candidate, home=self._name_next_home())
            if repeat >= log.plan.limits.tries and self._has_to_run(trial, repeat):
                break
            outcome = self._replay(trial, repeat)
            if outcome.child.is_refusal:
                raise UsageError(outcome.child.error)
            start = ReplayLog.read(outcome.child.logs).start
            log.num_layers = _read_num_layers({} if start is None else start.work.config)
            log.failure = outcome.failure
            message = "no failure" if outcome.failure is None else outcome.failure.text
            self._add_trial(trial, outcome.failure, message, outcome.children)
            if outcome.failure is not None:
                return True
        return False

    def try_candidate(self, candidate: Candidate, what: str) -> ReplayFailure | None:
        """Replay a candidate, unless it was before; return the failure if it is the one that is looked for.

        Raises OutOfRunsError.
        """
        if candidate in self.failures:
            return self.failures[candidate]
        log, home = self.log, self._name_next_home()
        inputs = log.folder / home / "inputs"
        trial = _TrialPlan(
            what=what, candidate=candidate, home=home, inputs=inputs, inputs_digest=candidate.inputs_digest
        )
        shown_failure = None
        try:
            if self._has_to_run(trial, 0):
                if log.num_runs >= log.plan.limits.num_runs:
                    raise OutOfRunsError
                write_inputs(inputs, log.plan.sources, candidate)
            shown_failure, _ = self._repeat_until_shown(trial)
        except (CaptureError, UsageError) as error:
            self.is_new = True
            self._add_trial(trial, None, f"no replay: {format_error_with_flags(error)}", [])
        if shown_failure is None:
            shutil.rmtree(inputs, ignore_errors=True)
        self.failures[candidate] = shown_failure
        return shown_failure

    def _check(
        self, candidate: Candidate, inputs: Path, what: str, folder: Path = Path()
    ) -> tuple[ReplayFailure | None, ProcessResult]:
        """Replay a candidate outside the search: with other inputs than its own, or in another folder."""
        digest = hashlib.sha256()
        for path in sorted((folder / inputs).iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
        home = f"trials/{what.replace(', ', '-')}"
        without_cuts = replace(candidate, cuts=())
        return self._repeat_until_shown(
            _TrialPlan(
                what=what,
                candidate=without_cuts,
                home=home,
                inputs=inputs,
                inputs_digest=digest.hexdigest(),
                folder=folder,
            )
        )

    def _repeat_until_shown(self, trial: _TrialPlan) -> tuple[ReplayFailure | None, ProcessResult]:
        """Replay a candidate; a failure that did not come at once is given as many runs as it took."""
        children: list[ProcessResult] = []
        assert self.log.failure is not None
        for repeat in range(self.log.num_tries):
            outcome = self._replay(trial, repeat)
            children += outcome.children
            is_shown = outcome.failure is not None and outcome.failure.is_same_as(self.log.failure)
            if is_shown:
                break
        shown_failure = outcome.failure if is_shown else None
        self._add_trial(trial, shown_failure, "shows it" if is_shown else outcome.text, children)
        return shown_failure, outcome.child

    def _replay(self, trial: _TrialPlan, repeat: int) -> _TrialOutcome:
        """Run one replay, and of a parity cell first its reference."""
        children: list[ProcessResult] = []
        for planned_run in self._plan_runs(trial, repeat):
            if self.log.campaign.find_ended(planned_run) is None:
                self.is_new = True
                self.console.show_progress(len(self.log.trials) + 1)
            children.append(self.log.campaign.run(planned_run, trial.folder))
            if children[-1].exit_code != 0:
                break
        failure, cell = find_failure(children[-1]), self.log.plan.parity
        if cell is not None and all(child.exit_code == 0 for child in children):
            failure = cell.compare_runs(*children)
        return _TrialOutcome(failure=failure, children=children)

    def _has_to_run(self, trial: _TrialPlan, repeat: int) -> bool:
        """Is a replay of this trial still to be run?"""
        return self.log.campaign.find_ended(self._plan_runs(trial, repeat)[0]) is None

    def _plan_runs(self, trial: _TrialPlan, repeat: int) -> list[PlannedRun]:
        """Return the runs of a trial: of a parity cell its reference's first. Raises UsageError for wrong options."""
        plan, cell, candidate = self.log.plan, self.log.plan.parity, trial.candidate
        runs = [("runs", plan.spec if trial.inputs is None else candidate.spec, candidate.num_processes)]
        if cell is not None:
            reference = cell.reference if trial.inputs is None else cell.build_reference(candidate)
            runs.insert(0, ("reference", reference, cell.num_processes))
        shared: dict[str, Any] = {"repeat": repeat, "inputs_digest": trial.inputs_digest}
        return [
            PlannedRun(home=f"{trial.home}/{name}", spec=trial.with_inputs(spec), num_processes=num_processes, **shared)
            for name, spec, num_processes in runs
        ]

    def _name_next_home(self) -> str:
        return f"trials/{len(self.log.trials) + 1:04d}"

    def _add_trial(
        self, plan: _TrialPlan, shown_failure: ReplayFailure | None, message: str, children: Sequence[ProcessResult]
    ) -> None:
        trial = MinimiseTrial(
            what=plan.what,
            candidate=plan.candidate,
            num_runs=len(children),
            found=shown_failure,
            said=message,
            seconds=sum(child.seconds for child in children),
        )
        self.log.add_trial(trial)
        if self.is_new:
            self.console.show_trial(trial)
        self.is_new = False


def _read_num_layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers that a config says; None if it does not."""
    text = config.get("text_config") or {}
    numbers = [part[name] for part in (config, text) for name in DEPTHS if isinstance(part.get(name), int)]
    return numbers[0] if numbers else None
