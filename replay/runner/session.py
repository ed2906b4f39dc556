"""Run a replay: open the actor, feed it the inputs one by one, and record each pass."""

import gc
import shutil
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from actor_init.backends.protocol import free_closed
from actor_init.declarations.attention import form_of
from actor_init.dropout_settings import acting_dropouts
from actor_init.model import ModelSource, count_parameters, find_model, lasting_config
from actor_init.optimizer import TORCH_DTYPES
from actor_init.probe.head_probe import choose_head
from actor_init.probe.layout_choice import choose_layout
from actor_init.spec import ActorSpec, Compile, CompileLengths, PadTo, UsageError
from actor_init.world import World
from capture.file_format.actor_config import read_actor_config, read_adapter_configs, read_frozen_names
from capture.file_format.capture_file import Call, read_call
from capture.file_format.folder_layout import folder_of_capture
from capture.file_format.micro_batch import CaptureError
from capture.record.job_facts import device_name
from capture.record.job_facts import versions as loaded_versions
from capture.record.rng_and_outputs import environment
from replay.loss import may_count_after_padding
from replay.objective.inputs import ObjectiveError, Recorded
from replay.objective.objective import Objective, described_loss
from replay.processes.torchrun_error import repeat_for_torchrun
from replay.report.text import Pairs, counted, engine_text, not_recorded, one_line, short_names_differ
from replay.runlog.records import PassRecord
from replay.runlog.summary import summarize
from replay.runlog.writer import INTERRUPTED, Logbook, create_folder
from replay.runner import rounding_floor
from replay.runner.checkpoint import Saver, SavingError, loaded_source, not_saved, refuse_folders, state_to_load
from replay.runner.console import Console
from replay.runner.digests import digest_of_weights
from replay.runner.job_config import differences_from_job, header_line
from replay.runner.job_defaults import job_kernel, settled
from replay.runner.meter import Meter
from replay.runner.non_finite import first_non_finite
from replay.runner.pass_runner import PassRunner, ReopenedActor, ReopeningError, what_wants_logits
from replay.runner.reruns import Found, Reruns
from replay.runner.selection import Selection, select
from replay.runner.states import Earlier, FolderStates, States
from replay.shipped_inputs import default_folder
from replay.spec import InputsSpec, Passes, RunSpec, VerdictRule, WindowWeights
from replay.tracing.writer import RunTrace
from replay.verdict.findings import Setting
from replay.verdict.incidents import with_incidents
from replay.verdict.judge import Outcome, Pass, Verdict, judge
from replay.verdict.optimizer_settings import differences
from replay.verdict.router_loss import is_mixture
from replay.verdict.text import verdict_lines, weights_line
from replay.verdict.tolerances import Floor
from replay.verdict.training_remarks import remarks_on_training
from replay.verdict.weight_check import SameWeights
from replay.watch.progress import Phase
from replay.watch.stacks import outlast
from replay.watch.watcher import Watch, watching


def run(spec: RunSpec, *, show_traceback: bool, states: States | None = None) -> int:
    """Replay as `spec` says and return the exit code: 0 only if every pass succeeded and every file could be read.

    states  where those of --save-every are kept; None: below --save-state

    Raises UsageError for options that cannot be satisfied here.
    """
    with World.from_env(spec.actor.parallel) as world:
        return run_in(world, spec, show_traceback=show_traceback, states=states)


def run_in(world: World, spec: RunSpec, *, show_traceback: bool = False, states: States | None = None) -> int:
    """Run a replay in a world that is already open, and leave it open."""
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
        raise UsageError(
            "--memory-snapshot needs CUDA's allocator, or the memory that Linux says a process has; this system says "
            "its peak alone. Try: without --memory-snapshot"
        )
    first = first_call(selection)
    objective = Objective.of(spec)
    _check_objective(objective, first)
    resolved = resolve(spec, world, selection, first, objective)
    spec, original = resolved.spec, resolved.source
    states = states or FolderStates.of(spec.state)
    refuse_folders(spec.state, world, states)
    latest = states.latest(world) if states is not None and spec.state.resume else None
    earlier = Earlier.read(latest, selection, world) if latest is not None else Earlier()
    state = earlier.folder or state_to_load(spec.state)
    source = loaded_source(spec, original, world, state)
    measure = spec.measure
    name = world.from_first(create_folder(measure.log_folder, measure.name).name if world.rank == 0 else None)
    folder = measure.log_folder / name
    folder.mkdir(parents=True, exist_ok=True)  # on nodes that share no disk with rank 0
    with watching(world, folder, measure.timeout, show_traceback=show_traceback) as watch:
        full_names = measure.full_names or not short_names_differ([path.name for path in selection.inputs])
        console = Console(quiet=measure.quiet, full_names=full_names) if world.rank == 0 else None
        actor = _open(spec, source, world, folder, state, watch, console)
        gc.enable()
        same_weights = SameWeights(source)
        session = Session(
            world=world,
            spec=spec,
            selection=selection,
            source=source,
            folder=folder,
            watch=watch,
            show_traceback=show_traceback,
            meter=meter,
            logbook=Logbook(folder, world.rank),
            console=console,
            same_weights=same_weights,
            setting=_setting(spec, source, same_weights, world, actor.backend.facts()),
            saver=Saver(spec=spec, source=source, world=world, logs=folder, states=states),
            earlier=earlier,
            objective=objective,
            begun_with=source if earlier.folder is None else original,
        )
        session.describe(actor, first, resolved.why_kernel)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """What a run does where its options leave it open."""

    spec: RunSpec
    source: ModelSource  # with the layout of rows and the form of the head
    why_kernel: str  # why the attention kernel was taken; empty where it was asked for


def resolve(
    spec: RunSpec, world: World, selection: Selection, first: Call | None, objective: Objective | None
) -> Resolved:
    """Resolve the dtype, kernels, layout and head that options leave to the job, the model or the machine.

    All ranks must call this. Raises UsageError for what cannot run here.
    """
    packing_is_given = spec.actor.packing is not None
    spec = world.from_first(
        settled(
            spec,
            first,
            selection.grad_accumulation,
            world.device.type,
            padding_predicts=selection.padding_predicts,
        )
    )
    source = source_of_all(spec, world)
    source = replace(source, frozen=world.from_first(_frozen(spec, source, first)))
    kernel = world.from_first(job_kernel(spec.actor, first, world.device, source.config))
    spec = replace(spec, actor=spec.actor.settled(attention=kernel.attention))
    trains = spec.inputs.passes is not Passes.ROLLOUT
    actor_spec, layout = choose_layout(spec.actor, source.config, world, is_given=packing_is_given, trains=trains)
    if selection.padding_predicts and not packing_is_given and not layout.why:
        layout = replace(layout, why="padding on the left predicts labels of the job's loss")
    head = choose_head(actor_spec, source, world, wants_logits=what_wants_logits(spec, objective))
    return Resolved(
        spec=replace(spec, actor=actor_spec), source=replace(source, layout=layout, head=head), why_kernel=kernel.why
    )


def _not_replayed(num_inputs: int) -> Pairs:
    """Say that a training ended with a pass that failed, if there were inputs left."""
    why = "with --step a pass that fails loses the weights of the steps so far. Try: without its input"
    return [("ended", f"{counted(num_inputs, 'input')} not replayed: {why}")] if num_inputs else []


def _open(
    spec: RunSpec,
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
    spec: RunSpec
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

    def describe(self, actor: ReopenedActor, first: Call | None, kernel_reason: str) -> None:
        """Begin run.json and print the header, on rank 0. `kernel_reason` says why the attention kernel was taken."""
        world, spec, source = self.world, self.spec, self.source
        devices = world.gather("CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device))
        num_inputs = world.gather(len(self.selection.inputs))
        if self.console:
            facts = {
                "model": source.name,
                **source.facts,
                "rows": source.layout_under(spec.actor).describe(),
                "weights": source.weights.describe(),
                **({"head": source.head.describe()} if source.head is not None else {}),
                **actor.backend.facts(),
                **({"attention_reason": kernel_reason} if kernel_reason else {}),
            }
            other_config = differences_from_job(spec.actor, source, read_actor_config(inputs_folder(spec.inputs)))
            if other_config:
                facts["config_differences"] = "; ".join(other_config)
            if self.objective is not None and self.objective.sha256 is not None:
                facts["loss_sha256"] = self.objective.sha256
            self.logbook.begin(
                spec,
                facts=facts,
                work={"weights": digest_of_weights(self.begun_with.weights), "config": _described_model(source)},
                inputs=self.selection.described(),
                memory_kind=self.meter.memory_kind,
                devices=devices,
            )
            header = _header(spec, source, facts, self.selection, devices, num_inputs)
            if kernel_reason:
                header["attention"] = f"{form_of(str(facts['attention_kernel'])).describe()}: {kernel_reason}"
            header["loss"] = described_loss(self.objective, spec, first)
            header |= header_line(other_config)
            header |= _adapter(source, spec) | _named(source.frozen)
            header |= _resumed(spec, self.earlier, len(self.selection.inputs))
            header |= _first_look(self.same_weights, self.setting.dropout, first)
            header |= _first_step(spec, self.selection)
            header |= _snapshot(spec, world)
            self.console.header(header, num_passes=len(self.selection.inputs))
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
        runner = PassRunner(
            spec,
            world,
            self.source,
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
        begin = runner.num_settled = self.earlier.num_passes
        num_steps = num_kept = self.earlier.num_steps
        try:
            for index, path in islice(enumerate(self.selection.inputs), begin, None):
                ranks, error = self._replay_one(runner, index, path, [record for record, _, _ in passes])
                passes += ranks
                has_failed = error is not None
                del error  # its frames hold the pass's tensors
                if has_failed and spec.measure.step:
                    saved = [*_not_replayed(len(self.selection.inputs) - index - 1), *not_saved(spec.state)]
                    break
                runner.mend()
                num_steps += ranks[world.rank][0].grad_norm is not None
                if self._is_due(num_steps, num_kept):
                    tracker.at(Phase.SAVING)
                    self.saver.keep(actor.backend, num_steps, runner.num_settled)
                    num_kept = num_steps
            tracker.has_passed(len(self.selection.inputs), Phase.OUT_OF_INPUTS)
            self.watch.meet()
            tracker.has_passed(len(self.selection.inputs), Phase.SAVING)
            if not any(record.error for record, _, _ in passes):
                if spec.state.save_every is not None and num_steps > num_kept:
                    self.saver.keep(actor.backend, num_steps, runner.num_settled)
                num_passes = begin + len(passes) // world.world_size
                saved = self.saver.at_end(actor.backend, runner.num_settled, num_passes)
            found = self._reruns(runner).found([*self.earlier.records, *(record for record, _, _ in passes)])
            tracker.has_passed(len(self.selection.inputs), Phase.CLOSING)
        except (KeyboardInterrupt, ReopeningError, SavingError) as reason:
            if isinstance(reason, SavingError) and world.world_size > 1:
                raise  # the other ranks wait for this one
            return Done(passes=passes, saved=saved, ended=reason, earlier=self.earlier.records)
        return Done(passes=passes, saved=saved, ended=None, found=found, earlier=self.earlier.records)

    def _reruns(self, runner: PassRunner) -> Reruns:
        return Reruns(
            spec=self.spec,
            world=self.world,
            source=self.source,
            inputs=self.selection.inputs,
            folder=self.folder,
            watch=self.watch,
            meter=self.meter,
            runner=runner,
        )

    def _is_due(self, num_steps: int, num_kept: int) -> bool:
        every = self.spec.state.save_every
        return every is not None and num_steps > num_kept and num_steps % every == 0

    def _replay_one(
        self, runner: PassRunner, index: int, path: Path, before: Sequence[PassRecord]
    ) -> tuple[list[Pass], Exception | None]:
        """Replay one input on every rank. A pass that fails ends a run of several ranks.

        before  records of this run's earlier passes
        """
        record, error = self._reruns(runner).watched(index, path)
        self.logbook.write(record)
        if error and self.show_traceback:
            traceback.print_exception(error)
        if error and self.world.world_size > 1:
            self._reruns(runner).tell_ran_out([*before, record])
            self.watch.stop_all(error)
        self.watch.tracker.at(Phase.GATHERING)
        ranks = self.world.gather((record, runner.recorded, runner.replayed))
        if runner.search.is_wanted([own for own, _, _ in ranks]):
            self.logbook.write_again(record := runner.with_first_non_finite(record))
            ranks = self.world.gather((record, runner.recorded, runner.replayed))
        if runner.wants_again(records := [own for own, _, _ in ranks]):
            self.logbook.write_again(record := runner.with_second_run(record, records))
            ranks = self.world.gather((record, runner.recorded, runner.replayed))
        if self.console:
            self.console.passed([own for own, _, _ in ranks])
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
            source=self.source,
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


def _snapshot(spec: RunSpec, world: World) -> Mapping[str, str]:
    """Say what --memory-snapshot is of, and what it costs."""
    if not spec.measure.memory_snapshot:
        return {}
    what = "of CUDA's allocator" if world.device.type == "cuda" else "none on a CPU: of the process's resident memory"
    slower = ", in every pass, which makes them slower" if world.world_size > 1 else ""
    return {"snapshot": what + slower}


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
        unknown = f"{type(error).__name__}: {one_line(str(error))}"
        remarks.append(("rounding", f"not measured: {unknown}"))
        setting = replace(setting, unknown_rounding=unknown)
    return setting, opinion, remarks


def _is_worse(one: Verdict, other: Verdict) -> bool:
    order = (Outcome.DIFFERS, Outcome.UNSETTLED, Outcome.REPRODUCED, Outcome.CANNOT_TELL)
    return order.index(one.outcome) < order.index(other.outcome)


def find_source(spec: RunSpec) -> ModelSource:
    folder = inputs_folder(spec.inputs)
    try:
        captured = read_actor_config(folder) if spec.actor.model is None or spec.actor.is_custom else None
        adapters = {} if spec.actor.is_custom else read_adapter_configs(folder)
    except CaptureError as error:
        raise UsageError(str(error)) from error
    source = find_model(spec.actor, captured, str(_shown(folder / "actor.json")), adapters)
    if source.adapter is not None and spec.state.save_model is not None:
        raise UsageError("--save-model writes whole models, and this one has an adapter. Try: --save-state")
    return source


def source_of_all(spec: RunSpec, world: World) -> ModelSource:
    """Find the model on every rank. Raises UsageError on all of them if one lacks it, or has another file of it."""
    source: ModelSource | None = None
    problem = ""
    try:
        source = find_source(spec)
    except UsageError as error:
        if world.world_size == 1:
            raise
        problem = str(error)
    found = world.gather((problem, dict(source.facts) if source is not None else {}))
    problems = [(rank, said) for rank, (said, _) in enumerate(found) if said]
    if problems:
        rank, said = problems[0]
        raise UsageError(said if len(problems) == len(found) else f"on rank {rank}: {said}")
    assert source is not None
    for rank, (_, facts) in enumerate(found):
        if facts.get("model_file_sha256") != found[0][1].get("model_file_sha256"):
            raise UsageError(
                f"{facts['model_file']} is another file on rank {rank} than {found[0][1]['model_file']} on rank 0. "
                "Copy one to all nodes"
            )
    return source


def inputs_folder(spec: InputsSpec) -> Path:
    if spec.input_file is not None:
        return folder_of_capture(spec.input_file)
    return spec.inputs if spec.inputs is not None else default_folder()


def _setting(
    spec: RunSpec, source: ModelSource, same_weights: SameWeights, world: World, facts: Mapping[str, Any]
) -> Setting:
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


def first_call(selection: Selection) -> Call | None:
    """Read the first input; None if it cannot be read."""
    try:
        return read_call(selection.inputs[0]) if selection.inputs else None
    except CaptureError:  # the pass itself will report it
        return None


def _check_objective(objective: Objective | None, first: Call | None) -> None:
    """Raise UsageError if the first capture lacks what the objective needs."""
    if objective is None or first is None:
        return
    try:
        objective.check(Recorded.of(first, first.micro_batch()))
    except (ObjectiveError, CaptureError) as error:
        raise UsageError(f"--loss {objective.loss}: {error}") from error


def _first_look(same_weights: SameWeights, dropout: Sequence[str], first: Call | None) -> dict[str, str]:
    """Describe, before the first pass, whether weights match and where the random states of dropout come from."""
    if first is None:
        return {}
    whose = "from the job's random states" if first.random else "by chance: no random states were recorded"
    weights = {} if first.weights is None else {"recorded": weights_line(same_weights.check(first.weights))}
    return weights | ({"dropout": f"{', '.join(dropout)}, {whose}"} if dropout else {})


def _described_model(source: ModelSource) -> dict[str, Any]:
    adapter = source.adapter
    adapted = {} if adapter is None else {"adapter": {"name": adapter.name, **adapter.settings}}
    return lasting_config(source.config) | adapted


def _adapter(source: ModelSource, spec: RunSpec) -> dict[str, str]:
    """Describe the actor's adapter, or say that the job's is not built."""
    if source.adapter is not None:
        return {"adapter": f"{source.adapter.describe()}; the rest is frozen"}
    if not (adapters := read_adapter_configs(inputs_folder(spec.inputs))):
        return {}
    named = counted(len(adapters), "adapter")
    if spec.actor.adapter == "none":
        return {"adapter": f"not built; the job had {named}"}
    return {
        "adapter": f"not built: the job had {named}, which the weights are taken to have merged. Try: --adapter FOLDER"
    }


def _frozen(spec: RunSpec, source: ModelSource, first: Call | None) -> frozenset[str]:
    """Return the parameters that the job did not train, if its first pass had as many as were there to begin with.

    None where it had an adapter, which freezes what is not its own; merged into the weights, that is trained here.
    """
    folder = inputs_folder(spec.inputs)
    names = read_frozen_names(folder)
    num_frozen = None if first is None or first.weights is None else first.weights.num_frozen
    if not names or num_frozen != len(names) or source.adapter is not None:
        return frozenset()
    return SameWeights(source).own_names(names)


def _named(frozen: Collection[str]) -> dict[str, str]:
    if not frozen:
        return {}
    first, *rest = sorted(frozen)
    more = f" and {len(rest)} more" if rest else ""
    return {"frozen": f"{first}{more}, as in the job"}


def _resumed(spec: RunSpec, earlier: Earlier, num_passes: int) -> dict[str, str]:
    """Under --resume, say where the run goes on."""
    if not spec.state.resume:
        return {}
    if earlier.folder is None:
        return {"resumed": "from the beginning: no state was saved yet"}
    done = f"{counted(earlier.num_steps, 'step')}, {earlier.num_passes} of {counted(num_passes, 'pass')} on each rank"
    return {"resumed": f"behind {done}"}


def _first_step(spec: RunSpec, selection: Selection) -> dict[str, str]:
    """Under --step, report whether the job's first step used other settings than the replay will."""
    if not spec.measure.step:
        return {}
    for path in selection.inputs[: spec.actor.num_accumulated]:
        try:
            step = read_call(path).step
        except CaptureError:  # the pass itself will report it
            return {}
        if step is not None:
            differing = differences(step, spec.actor, 0)
            return {"optimizer": f"other than the job's: {'; '.join(differing)}" if differing else "as the job's"}
    return {}


def _header(
    spec: RunSpec,
    source: ModelSource,
    facts: dict[str, Any],
    selection: Selection,
    devices: list[str],
    num_inputs: list[int],
) -> dict[str, str]:
    layers = source.config.get_text_config().num_hidden_layers
    toggles = [
        spec.actor.dtype.value,
        facts["rows"],
        *([head.describe()] if (head := source.head) is not None and not head.in_chunks else []),
        f"attention {facts['attention_kernel']}",
        *([f"kernels {facts['kernels']}"] if "kernels" in facts else []),
        f"optimizer {facts['optimizer']}",
        *([f"tp {tp} (plan: {facts['tp_plan']})"] if (tp := spec.actor.parallel.tp) > 1 else []),
        *(["sequence parallel"] if spec.actor.parallel.sequence_parallel else []),
        *([f"ring {ring}"] if (ring := spec.actor.parallel.ring) > 1 else []),
        *([f"padded to the {spec.actor.pad_to}"] if spec.actor.pad_to is PadTo.LONGEST else []),
        *([f"padded to {spec.actor.pad_tokens} tokens"] if spec.actor.pad_tokens is not None else []),
        *([_compile_text(spec.actor)] if spec.actor.compile is not Compile.OFF else []),
        *(["gradient checkpointing"] if spec.actor.gradient_checkpointing else []),
        *([f"gradient accumulation {n}"] if (n := spec.actor.num_accumulated) > 1 else []),
        *(["window mean-of-means"] if spec.measure.window is WindowWeights.MEAN_OF_MEANS else []),
    ]
    num_each = counted(num_inputs[0], "input") + (" a rank" if len(devices) > 1 else "")
    if len(set(num_inputs)) > 1:
        num_each = f"{', '.join(map(str, num_inputs))} inputs by rank"
    return {
        "model": f"{source.name}, {layers} layers, {facts['num_parameters'] / 1e6:,.4g} M parameters; "
        f"weights {facts['weights']}",
        "backend": f"{engine_text(spec.actor.backend, facts['zero_stage'])}, {', '.join(toggles)}",
        "device": ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
        "inputs": f"{num_each} from {_shown(inputs_folder(spec.inputs))}, {selection.dealing}",
    }


def _compile_text(actor: ActorSpec) -> str:
    of_lengths = "" if actor.compile_lengths is CompileLengths.DYNAMIC else f", {actor.compile_lengths} lengths"
    return f"compile {actor.compile}{of_lengths}"


def _shown(path: Path) -> Path:
    """Return the path relative to the current folder, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
