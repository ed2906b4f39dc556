"""Run a replay: open the actor, feed it the inputs one by one, and record each pass."""

import gc
import shutil
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch

from actor_init.backends.protocol import free_closed
from actor_init.dropout_settings import acting_dropouts
from actor_init.model import ModelSource, count_parameters, lasting_config
from actor_init.optimizer import TORCH_DTYPES
from actor_init.spec import UsageError
from actor_init.world import World
from capture import facts
from capture.file_format.actor_config import read_actor_config
from capture.file_format.capture_file import Call
from capture.file_format.micro_batch import CaptureError
from capture.record.job_facts import device_name
from capture.record.job_facts import versions as loaded_versions
from capture.record.rng_and_outputs import environment
from replay.loss import may_count_after_padding
from replay.objective.inputs import ObjectiveError, Recorded
from replay.objective.objective import Objective
from replay.processes.torchrun_error import repeat_for_torchrun
from replay.report.printing import open_console, print_table
from replay.report.text import Pairs, counted, not_recorded, one_line, short_names_differ
from replay.resolution.model_source import inputs_folder
from replay.resolution.resolve import resolve
from replay.resolution.selection import Selection, first_call, select
from replay.resolved import ResolvedReplay
from replay.runlog.records import PassRecord
from replay.runlog.summary import summarize
from replay.runlog.writer import INTERRUPTED, Logbook, create_folder
from replay.runner import rounding_floor
from replay.runner.checkpoint import Saver, SavingError, loaded_source, not_saved, refuse_folders, state_to_load
from replay.runner.console import Console
from replay.runner.digests import digest_of_weights
from replay.runner.header import Header
from replay.runner.job_config import differences_from_job
from replay.runner.meter import Meter
from replay.runner.non_finite import first_non_finite
from replay.runner.reopened_actor import ReopenedActor, ReopeningError
from replay.runner.replayer import Replayer
from replay.runner.reruns import Found, Reruns
from replay.runner.states import Earlier, FolderStates, States
from replay.runner.text import choice_table
from replay.spec import ReplaySpec, VerdictRule
from replay.tolerances.job import Floor
from replay.tracing.writer import RunTrace
from replay.verdict.findings import Setting
from replay.verdict.incidents import with_incidents
from replay.verdict.judge import Outcome, Pass, Verdict, judge
from replay.verdict.router_loss import is_mixture
from replay.verdict.text import verdict_lines
from replay.verdict.training_remarks import remarks_on_training
from replay.verdict.weight_check import SameWeights
from replay.watch.progress import Phase
from replay.watch.stacks import outlast
from replay.watch.watcher import Watch, watching
from replay.wording import in_flags


def run(spec: ReplaySpec, *, show_traceback: bool, states: States | None = None) -> int:
    """Replay as `spec` says and return the exit code: 0 only if every pass succeeded and every file could be read.

    states  where those of --save-every are kept; None: below --save-state

    Raises UsageError for options that cannot be satisfied here.
    """
    with World.from_env(spec.actor.parallel) as world:
        return run_in(world, spec, show_traceback=show_traceback, states=states)


def explain(spec: ReplaySpec) -> int:
    """Print who chose each setting of the replay, and why, and return 0. No actor is opened, nothing is written.

    Raises UsageError for options that cannot be satisfied here.
    """
    with World.from_env(spec.actor.parallel) as world:
        resolved = _Prepared.of(spec, world).resolved
        if world.rank == 0:
            print_table(open_console(), choice_table(resolved.choices))
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """A replay that is resolved, and not begun."""

    resolved: ResolvedReplay
    selection: Selection
    meter: Meter
    first: Call | None  # the first capture; None if it cannot be read
    objective: Objective | None  # None: the loss is the negated mean log-prob

    @classmethod
    def of(cls, spec: ReplaySpec, world: World) -> Self:
        selection = select(
            spec.inputs,
            world.data_rank,
            world.num_data_ranks,
            loss=spec.measure.loss,
            grad_accumulation=spec.actor.grad_accumulation,
            packs=spec.actor.packs,
            padding_predicts=may_count_after_padding(spec),
        )
        meter = Meter.for_device(world.device)
        if spec.measure.memory_snapshot and meter.held_bytes() is None:
            snapshot = facts.Setting("memory_snapshot")
            why = "needs CUDA's allocator, or the memory that Linux says a process has; this system says its peak alone"
            raise UsageError(snapshot, why, f"Try: without {snapshot}")
        first = first_call(selection)
        objective = Objective.of(spec)
        _check_objective(objective, first)
        resolved = resolve(spec, selection, first, world, objective)
        return cls(resolved=resolved, selection=selection, meter=meter, first=first, objective=objective)


def run_in(world: World, spec: ReplaySpec, *, show_traceback: bool = False, states: States | None = None) -> int:
    """Run a replay in a world that is already open, and leave it open."""
    prepared = _Prepared.of(spec, world)
    resolved, selection = prepared.resolved, prepared.selection
    original, measure = resolved.source, resolved.measure
    states = states or FolderStates.of(resolved.state)
    refuse_folders(resolved.state, world, states)
    latest = states.latest(world) if states is not None and resolved.state.resume else None
    earlier = Earlier.read(latest, selection, world) if latest is not None else Earlier()
    state = earlier.folder or state_to_load(resolved.state)
    source = loaded_source(resolved, original, world, state)
    resolved = resolved.variant(why="the state that is loaded", source=source)
    name = world.from_first(create_folder(measure.log_folder, measure.name).name if world.rank == 0 else None)
    folder = measure.log_folder / name
    folder.mkdir(parents=True, exist_ok=True)  # on nodes that share no disk with rank 0
    with watching(world, folder, measure.timeout, show_traceback=show_traceback) as watch:
        full_names = measure.full_names or not short_names_differ([path.name for path in selection.inputs])
        console = Console(quiet=measure.quiet, full_names=full_names) if world.rank == 0 else None
        actor = _open(resolved, source, world, folder, state, watch, console)
        resolved = resolved.completed(actor.backend.facts(), actor.backend.loss_scale())
        gc.enable()
        same_weights = SameWeights(source)
        session = Session(
            world=world,
            spec=resolved,
            selection=selection,
            source=source,
            folder=folder,
            watch=watch,
            show_traceback=show_traceback,
            meter=prepared.meter,
            logbook=Logbook(folder, world.rank),
            console=console,
            same_weights=same_weights,
            setting=_setting(resolved, same_weights, world, actor.backend.facts()),
            saver=Saver(spec=resolved, source=source, world=world, logs=folder, states=states),
            earlier=earlier,
            objective=prepared.objective,
            begun_with=source if earlier.folder is None else original,
        )
        session.describe(actor, prepared.first)
        session.repeat_earlier()
        done = session.replay_each(actor)
        if done.ended is None:
            actor.backend.close()
        del actor  # the measurements below need its memory
        conclusion = session.conclude(done)
        exit_code = session.report(done, conclusion)
        if done.ended is not None:
            raise done.ended
        return exit_code


def _not_replayed(num_inputs: int) -> Pairs:
    """Say that a training ended with a pass that failed, if there were inputs left."""
    why = "with --step a pass that fails loses the weights of the steps so far. Try: without its input"
    return [("ended", f"{counted(num_inputs, 'input')} not replayed: {why}")] if num_inputs else []


def _open(
    spec: ResolvedReplay,
    source: ModelSource,
    world: World,
    folder: Path,
    state: Path | None,
    watch: Watch,
    console: Console | None,
) -> ReopenedActor:
    """Open the actor. If this raises a usage error, remove the log folder."""

    num_parameters = count_parameters(source.config) if console and console.has_bar else 0

    def goes_on(num_filled: int) -> None:
        watch.tracker.goes_on()
        if console:
            console.opening(num_filled, num_parameters)

    try:
        actor = ReopenedActor(spec.actor, source, world, state, goes_on)
    except Exception as reason:
        if world.rank == 0 and (world.world_size == 1 or isinstance(reason, UsageError)):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    outlast(spec.measure.timeout)
    return actor


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The result of the passes: records of all ranks, what was saved, and why the run ended early, if it did."""

    passes: Sequence[Pass]
    saved: Pairs
    ended: BaseException | None
    found: Found = field(default_factory=Found)  # by --profile and --memory-snapshot
    earlier: Sequence[PassRecord] = ()  # of passes that were done before this process began

    @property
    def records(self) -> list[PassRecord]:
        return [*self.earlier, *(record for record, _, _ in self.passes)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """The verdict on a run, and remarks about it."""

    verdict: Verdict
    remarks: Pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """The parts of one run on this rank. All ranks must call its methods, in order."""

    world: World
    spec: ResolvedReplay
    selection: Selection
    source: ModelSource
    folder: Path
    watch: Watch
    show_traceback: bool
    meter: Meter
    logbook: Logbook
    console: Console | None  # on rank 0
    same_weights: SameWeights
    setting: Setting
    saver: Saver
    earlier: Earlier  # under --resume
    objective: Objective | None  # None: the loss is the negated mean log-prob
    begun_with: ModelSource  # before the first pass in the log

    def describe(self, actor: ReopenedActor, first: Call | None) -> None:
        """Begin run.json and print the header, on rank 0."""
        world, source = self.world, self.source
        devices = world.gather("CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device))
        num_inputs = world.gather(len(self.selection.inputs))
        if self.console:
            folder_of_inputs = inputs_folder(self.spec.inputs)
            header = Header(
                resolved=self.spec,
                selection=self.selection,
                facts=actor.backend.facts(),
                devices=devices,
                num_inputs=num_inputs,
                objective=self.objective,
                first=first,
                earlier=self.earlier,
                same_weights=self.same_weights,
                dropout=self.setting.dropout,
                other_config=differences_from_job(self.spec.actor, source, read_actor_config(folder_of_inputs)),
                world=world,
            )
            self.logbook.begin(
                self.spec,
                facts=header.run_facts(),
                work={"weights": digest_of_weights(self.begun_with.weights), "config": _config_of(source)},
                inputs=self.selection.described(),
                memory_kind=self.meter.memory_kind,
                devices=devices,
            )
            self.console.header(header.lines(), num_passes=len(self.selection.inputs))
        world.gather(None)  # run.json exists before any rank can fail

    def repeat_earlier(self) -> None:
        """Begin this rank's log with the passes that were done before."""
        for record in self.earlier.records:
            if record.rank == self.world.rank:
                self.logbook.write(record)

    def replay_each(self, actor: ReopenedActor) -> Done:
        """Replay the inputs one by one, record each pass, and save what --save-state and --save-model ask for."""
        spec, world, tracker = self.spec, self.world, self.watch.tracker
        trace = RunTrace.of(self.folder, spec.actor, self.source, world, actor.backend) if spec.measure.trace else None
        replayer = Replayer(
            spec,
            world,
            actor,
            self.meter,
            tracker,
            self.same_weights,
            trace,
            self.selection.rounds,
            self.folder,
        )
        passes: list[Pass] = []
        saved: Pairs = []
        begin = replayer.num_settled = self.earlier.num_passes
        num_steps = num_kept = self.earlier.num_steps
        try:
            for index, path in islice(enumerate(self.selection.inputs), begin, None):
                ranks, error = self._replay_one(replayer, index, path, [record for record, _, _ in passes])
                passes += ranks
                has_failed = error is not None
                del error  # its frames hold the pass's tensors
                if has_failed and spec.measure.step:
                    saved = [*_not_replayed(len(self.selection.inputs) - index - 1), *not_saved(spec.state)]
                    break
                replayer.mend()
                num_steps += ranks[world.rank][0].grad_norm is not None
                if self._is_due(num_steps, num_kept):
                    tracker.at(Phase.SAVING)
                    self.saver.keep(actor.backend, num_steps, replayer.num_settled)
                    num_kept = num_steps
            tracker.has_passed(len(self.selection.inputs), Phase.OUT_OF_INPUTS)
            self.watch.meet()
            tracker.has_passed(len(self.selection.inputs), Phase.SAVING)
            if not any(record.error for record, _, _ in passes):
                if spec.state.save_every is not None and num_steps > num_kept:
                    self.saver.keep(actor.backend, num_steps, replayer.num_settled)
                num_passes = begin + len(passes) // world.world_size
                saved = self.saver.at_end(actor.backend, replayer.num_settled, num_passes)
            found = self._reruns(replayer).found([*self.earlier.records, *(record for record, _, _ in passes)])
            tracker.has_passed(len(self.selection.inputs), Phase.CLOSING)
        except (KeyboardInterrupt, ReopeningError, SavingError) as reason:
            if isinstance(reason, SavingError) and world.world_size > 1:
                raise  # the other ranks wait for this one
            return Done(passes=passes, saved=saved, ended=reason, earlier=self.earlier.records)
        return Done(passes=passes, saved=saved, ended=None, found=found, earlier=self.earlier.records)

    def _reruns(self, replayer: Replayer) -> Reruns:
        return Reruns(
            spec=self.spec,
            world=self.world,
            source=self.source,
            inputs=self.selection.inputs,
            folder=self.folder,
            watch=self.watch,
            meter=self.meter,
            replayer=replayer,
        )

    def _is_due(self, num_steps: int, num_kept: int) -> bool:
        every = self.spec.state.save_every
        return every is not None and num_steps > num_kept and num_steps % every == 0

    def _replay_one(
        self, replayer: Replayer, index: int, path: Path, before: Sequence[PassRecord]
    ) -> tuple[list[Pass], Exception | None]:
        """Replay one input on every rank. A pass that fails ends a run of several ranks.

        before  records of this run's earlier passes
        """
        own, error = self._reruns(replayer).watched(index, path)
        self.logbook.write(own.record)
        if error and self.show_traceback:
            traceback.print_exception(error)
        if error and self.world.world_size > 1:
            self._reruns(replayer).tell_ran_out([*before, own.record])
            self.watch.stop_all(error)
        self.watch.tracker.at(Phase.GATHERING)
        ranks: list[Pass] = self.world.gather(own)
        if replayer.search.is_wanted([rank.record for rank in ranks]):
            own = own._replace(record=replayer.with_first_non_finite(own.record))
            self.logbook.write_again(own.record)
            ranks = self.world.gather(own)
        if replayer.wants_again(records := [rank.record for rank in ranks]):
            own = own._replace(record=replayer.with_second_run(own.record, records))
            self.logbook.write_again(own.record)
            ranks = self.world.gather(own)
        if self.console:
            self.console.passed([rank.record for rank in ranks])
        return ranks, error

    def conclude(self, done: Done) -> Conclusion:
        """Judge the passes against the job, measuring the rounding floor first where the dtype is coarse."""
        setting = self.setting
        opinion: Verdict | None = None
        remarks: Pairs = []
        measures = self.spec.measure.noise_floor or self.spec.measure.second_opinion
        passes = with_incidents(done.passes, inputs_folder(self.spec.inputs))
        whole = done.ended is None and self.earlier.folder is None
        again = rounding_floor.Again(
            world=self.world,
            spec=self.spec,
            selection=self.selection,
            tracker=self.watch.tracker,
            has_dropout=bool(setting.dropout),
        )
        if whole and measures and rounding_floor.is_worth_it(again, done.passes):
            setting, opinion, remarks = _rounded(again, done.passes, setting)
        verdict = judge(passes, setting)
        if opinion is not None and _is_worse(opinion, verdict):
            verdict = replace(opinion, environment=verdict.environment)
        if self.earlier.folder is None:
            is_whole = done.ended is None and self.selection.is_whole
            remarks = [*remarks_on_training(done.passes, verdict, is_whole=is_whole), *remarks]
        return Conclusion(verdict=verdict, remarks=remarks)

    def report(self, done: Done, conclusion: Conclusion) -> int:
        """Finish run.json and print the summary, on rank 0. Return the exit code."""
        is_refused = conclusion.verdict.outcome in (Outcome.DIFFERS, Outcome.UNSETTLED)
        is_strict = self.spec.measure.verdict is VerdictRule.STRICT
        failed = done.ended or self.selection.damaged or any(record.error for record in done.records)
        exit_code = 1 if failed or (is_refused and is_strict) else 0
        if isinstance(done.ended, KeyboardInterrupt):
            exit_code = INTERRUPTED
        if failed:
            damaged, broken = len(self.selection.damaged), [record for record in done.records if record.error]
            repeat_for_torchrun(
                f"replay: {counted(len(broken), 'pass')} failed and {counted(damaged, 'file')} "
                f"{'is' if damaged == 1 else 'are'} damaged, see {self.folder / 'run.json'}"
            )
        if self.console:
            statistics = summarize(done.records)
            self.logbook.finish(
                statistics,
                exit_code=exit_code,
                verdict=conclusion.verdict,
                profile=done.found.profile,
                memory=done.found.memory,
                out_of_memory=done.found.ran_out,
                first_non_finite=first_non_finite(done.records),
            )
            self.console.finish(
                done.records,
                statistics,
                self.selection,
                self.folder,
                memory_kind=self.meter.memory_kind,
                verdict=[
                    *verdict_lines(conclusion.verdict),
                    *not_recorded(self.selection.not_recorded),
                    *conclusion.remarks,
                ],
                saved=done.saved or not_saved(self.spec.state),
                found=done.found,
            )
        self.logbook.close()
        return exit_code


def _rounded(
    again: rounding_floor.Again, passes: Sequence[Pass], setting: Setting
) -> tuple[Setting, Verdict | None, Pairs]:
    """Return `setting` with the measured rounding floors, and the fp32 verdict if one was requested.

    If the floor cannot be measured, a remark says so and the formula bounds apply. All ranks must call this.
    """
    remarks: Pairs = []
    opinion: Verdict | None = None
    spec = again.spec
    free_closed()
    try:
        if spec.measure.noise_floor:
            floors: Mapping[str, Floor] = {}
            step_floors: Mapping[int, Mapping[str, Floor]] = {}
            if spec.measure.step:
                step_floors = rounding_floor.grown(again, passes)
                first = step_floors[min(step_floors)]
            else:
                first = floors = rounding_floor.measured(again, passes, inputs_folder(spec.inputs))
            if setting.dropout and not rounding_floor.have_same_masks(first, setting, passes):
                unknown = "another attention kernel draws other dropout masks"
                remarks.append(("rounding", f"not measured: {unknown}"))
                setting = replace(setting, unknown_rounding=unknown)
            else:
                setting = replace(setting, floors=floors, step_floors=step_floors)
            if again.why_one_kernel is not None:
                setting = replace(setting, unknown_rounding=again.why_one_kernel)
        if spec.measure.second_opinion:
            fp32 = again.passes(rounding_floor.in_fp32(spec), len(again.selection.inputs))
            # this run's own distance from the more precise one
            apart = rounding_floor.floors_of(passes, fp32)
            if setting.dropout and not rounding_floor.have_same_masks(apart, setting, passes):
                apart = {}
            opinion = judge(fp32, replace(setting, floors=apart))
            remarks.append(("in fp32", verdict_lines(opinion)[0][1]))
    except Exception as error:
        if again.world.world_size > 1:
            raise  # the other ranks wait for this one
        unknown = f"{type(error).__name__}: {one_line(in_flags(error))}"
        remarks.append(("rounding", f"not measured: {unknown}"))
        setting = replace(setting, unknown_rounding=unknown)
    return setting, opinion, remarks


def _is_worse(one: Verdict, other: Verdict) -> bool:
    order = (Outcome.DIFFERS, Outcome.UNSETTLED, Outcome.REPRODUCED, Outcome.CANNOT_TELL)
    return order.index(one.outcome) < order.index(other.outcome)


def _setting(spec: ResolvedReplay, same_weights: SameWeights, world: World, facts: Mapping[str, Any]) -> Setting:
    source = spec.source
    dtype = str(TORCH_DTYPES[spec.actor.dtype]).removeprefix("torch.")
    kernel = {
        "attention": str(facts["attention_kernel"]),
        "kernels": _kind_of(facts.get("kernels", "")),
        "dtype": dtype,
    }
    return Setting(
        dtype=dtype,
        num_layers=source.config.get_text_config().num_hidden_layers,
        num_data_ranks=world.num_data_ranks,
        grad_accumulation=spec.actor.num_accumulated,
        steps=spec.actor if spec.measure.step else None,
        dropout=[
            *acting_dropouts(lasting_config(source.config)),
            *(["lora_dropout"] if source.adapter and source.adapter.settings.get("lora_dropout") else []),
        ],
        packs=spec.actor.packs and spec.actor.parallel.ring == 1,
        is_mixture=is_mixture(same_weights.names),
        environment={**loaded_versions(), **environment(), "device": device_name(world.device), **kernel},
    )


def _kind_of(kernels: str) -> str:
    """Return the word that captures have for what a backend says that it fused: model or liger; else fused."""
    if not kernels.startswith("fused"):
        return "model"
    return "liger" if "; liger" in kernels else "fused"


def _check_objective(objective: Objective | None, first: Call | None) -> None:
    """Raise UsageError if the first capture lacks what the objective needs."""
    if objective is None or first is None:
        return
    try:
        objective.check(Recorded.of(first, first.micro_batch()))
    except (ObjectiveError, CaptureError) as error:
        raise UsageError(facts.Setting("loss", objective.loss), f": {error.text}") from error


def _config_of(source: ModelSource) -> dict[str, Any]:
    """Return the model's config, with its adapter, as two runs have to share it."""
    adapter = source.adapter
    adapted = {} if adapter is None else {"adapter": {"name": adapter.name, **adapter.settings}}
    return lasting_config(source.config) | adapted
