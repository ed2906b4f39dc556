"""Run a replay from what was typed: resolve it, open its actor, and let a session feed it the inputs."""

import gc
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Self

from actor_init.model import ModelSource, count_parameters
from actor_init.spec import UsageError
from actor_init.world import World, compute_on_rank0, try_on_all_ranks
from capture.facts import Setting
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import CaptureError
from replay.objective.inputs import ObjectiveData, ObjectiveError
from replay.objective.objective import Objective, padding_may_predict_label
from replay.options.resolved import ChosenBy, ResolvedChoice, ResolvedReplay
from replay.options.spec import ReplaySpec, is_objective
from replay.output.printing import open_console, print_table
from replay.output.text import have_distinct_short_names
from replay.resolution.resolve import choose_loss, resolve
from replay.resolution.selection import Selection, read_first_call, select
from replay.runlog.writer import Logbook, create_folder
from replay.runner.checkpoint import Saver, find_state_to_load, load_state_weights, refuse_folders
from replay.runner.job_optimizer_state import find_job_optimizer_state
from replay.runner.meter import Meter
from replay.runner.model_check import find_model_differences
from replay.runner.replayer import ReopenableActor
from replay.runner.result import Run, make_verdict_settings
from replay.runner.session import Session
from replay.runner.state_store import EarlierPasses, FolderStateStore, StateStore
from replay.runner.text import Console, build_choice_table
from replay.verdict.weight_check import WeightChecker
from replay.watch.stacks import extend_collective_timeouts
from replay.watch.watcher import Watch, watch_run


def run(
    spec: ReplaySpec, *, show_traceback: bool, states: StateStore | None = None, screen: IO[str] | None = None
) -> Run:
    """Replay as `spec` says. The exit code of the run is 0 only if every pass succeeded and every file could be read.

    states  where those of --save-every are kept; None: below --save-state
    screen  what rank 0 prints to; None: the standard output

    Raises UsageError for options that cannot be satisfied here.
    """
    with World.from_env(spec.actor.parallel) as world:
        return run_in(world, spec, show_traceback=show_traceback, states=states, screen=screen)


def explain(spec: ReplaySpec) -> int:
    """Print who chose each setting of the replay, and why, and return 0. No actor is opened, nothing is written.

    Raises UsageError for options that cannot be satisfied here.
    """
    with World.from_env(spec.actor.parallel) as world:
        resolved = _PreparedReplay.prepare(spec, world).resolved
        if world.rank == 0:
            print_table(open_console(), build_choice_table(resolved.choices))
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _PreparedReplay:
    """A replay that is resolved, and not begun.

    first_call  of the first input; None if it cannot be read
    objective   None: the loss is the mean cross entropy
    """

    resolved: ResolvedReplay
    selection: Selection
    meter: Meter
    first_call: CapturedCall | None
    objective: Objective | None

    @classmethod
    def prepare(cls, spec: ReplaySpec, world: World) -> Self:
        """Select the inputs and make every choice of the run. Raises UsageError, on all ranks, for what cannot run."""
        selection, first_call, loss = select_for_loss(spec, world, partial(_select, world=world))
        meter = try_on_all_ranks(world, lambda: _make_meter(spec, world))
        spec_with_loss = _set_loss(spec, loss)
        objective = try_on_all_ranks(world, lambda: _open_objective(spec_with_loss, first_call))
        resolved = resolve(spec, selection, first_call, world, loss, objective)
        return cls(resolved=resolved, selection=selection, meter=meter, first_call=first_call, objective=objective)


def select_for_loss(
    spec: ReplaySpec, world: World, select_inputs: Callable[[ReplaySpec], Selection]
) -> tuple[Selection, CapturedCall | None, ResolvedChoice]:
    """Select the inputs, read the first one, and choose the loss by them.

    All ranks must call this. Raises UsageError on all of them for inputs that one of them cannot select.

    select_inputs  selects this rank's inputs, and counts the tokens of the loss that its argument names
    """
    selection = try_on_all_ranks(world, lambda: select_inputs(spec))
    first_call = read_first_call(selection)
    loss = compute_on_rank0(world, lambda: choose_loss(spec, selection, first_call))
    if loss.by is ChosenBy.JOB and is_objective(loss.value) and any(world.gather(_has_labels(first_call))):
        # The labels' tokens were counted, before it was known that the loss is not theirs.
        selection = try_on_all_ranks(world, lambda: select_inputs(_set_loss(spec, loss)))
    return selection, first_call, loss


def _set_loss(spec: ReplaySpec, loss: ResolvedChoice) -> ReplaySpec:
    return replace(spec, measure=replace(spec.measure, loss=loss.value))


def _make_meter(spec: ReplaySpec, world: World) -> Meter:
    """Raise UsageError for a snapshot of memory where the system tells too little of it."""
    meter = Meter.for_device(world.device)
    if spec.measure.memory_snapshot and meter.read_held_bytes() is None:
        snapshot = Setting("memory_snapshot")
        why = "needs CUDA's allocator, or the memory that Linux says a process has; this system says its peak alone"
        raise UsageError(snapshot, why, f"Try: without {snapshot}")
    return meter


def _select(spec: ReplaySpec, world: World) -> Selection:
    return select(
        spec.inputs,
        world.data_rank,
        world.num_data_ranks,
        loss=spec.measure.loss,
        grad_accumulation=spec.actor.grad_accumulation,
        packs=spec.actor.packs,
        padding_predicts_label=padding_may_predict_label(spec),
    )


def run_in(
    world: World,
    spec: ReplaySpec,
    *,
    show_traceback: bool = False,
    states: StateStore | None = None,
    screen: IO[str] | None = None,
) -> Run:
    """Run a replay in a world that is already open, and leave it open.

    First everything that can be refused is: options, inputs, folders to save into, the state to go on from. Only then
    comes the log folder. Under the watch the actor opens, the passes run, and the actor is closed; the verdict and the
    report follow. What ended the run early is raised at the end, when all is reported.
    """
    prepared = _PreparedReplay.prepare(spec, world)
    resolved, selection = prepared.resolved, prepared.selection
    original_source, measure = resolved.source, resolved.measure
    states = states or FolderStateStore.from_spec(resolved.state)
    refuse_folders(resolved.state, world, states)
    latest_state = states.find_latest(world) if states is not None and resolved.state.resume else None
    earlier = (
        EarlierPasses()
        if latest_state is None
        else try_on_all_ranks(world, lambda: EarlierPasses.read(latest_state, selection, world))
    )
    # Rank 0's folder, where the latest state is another one on another rank's disk.
    state_folder = earlier.folder or world.broadcast_from_rank0(
        try_on_all_ranks(world, lambda: find_state_to_load(resolved.state))
    )
    source = load_state_weights(resolved, original_source, world, state_folder)
    source = find_job_optimizer_state(resolved, source, world)
    resolved = resolved.derive_variant(world, why="the state that is loaded", source=source)
    name = world.broadcast_from_rank0(create_folder(measure.log_folder, measure.name).name if world.rank == 0 else None)
    folder = measure.log_folder / name
    # Rank 0 made the folder; on nodes that share no disk with it there is none yet.
    folder.mkdir(parents=True, exist_ok=True)
    with watch_run(world, folder, measure.timeout, show_traceback=show_traceback) as watch:
        full_names = measure.full_names or not have_distinct_short_names([path.name for path in selection.inputs])
        console = Console(quiet=measure.quiet, full_names=full_names, file=screen) if world.rank == 0 else None
        actor = _open_actor(resolved, source, world, folder, watch, console)
        resolved = resolved.complete(actor.backend.facts(), actor.backend.loss_scale())
        gc.enable()
        weight_checker = WeightChecker(source)
        model_findings = find_model_differences(resolved, actor.backend.model, _list_recording_ids(prepared), world)
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
            weight_checker=weight_checker,
            model_problem=model_findings.problem,
            settings=make_verdict_settings(
                resolved, weight_checker, world, actor.backend.facts(), model_findings.differences
            ),
            saver=Saver(
                spec=resolved, source=source, world=world, log_folder=folder, states=states, num_steps=earlier.num_steps
            ),
            earlier=earlier,
            objective=prepared.objective,
            original_source=source if earlier.folder is None else original_source,
        )
        session.begin_log(actor, prepared.first_call)
        session.log_earlier_passes()
        replayed = session.replay_inputs(actor)
        if replayed.end_reason is None:
            actor.backend.close()
        # The verdict may measure the rounding floor, which opens other actors and needs the memory of this one.
        del actor
        conclusion = session.conclude(replayed)
        finished_run = session.report(replayed, conclusion)
        if replayed.end_reason is not None:
            raise replayed.end_reason
        return finished_run


def _list_recording_ids(prepared: _PreparedReplay) -> frozenset[str | None]:
    """List the ids of the recording that the inputs are of."""
    if prepared.selection.recording is not None:
        return prepared.selection.recording.ids
    return frozenset() if prepared.first_call is None else frozenset({prepared.first_call.recording})


def _open_actor(
    spec: ResolvedReplay,
    source: ModelSource,
    world: World,
    folder: Path,
    watch: Watch,
    console: Console | None,
) -> ReopenableActor:
    """Open the actor. If this raises a usage error, remove the log folder."""
    num_parameters = count_parameters(source.config) if console and console.has_bar else 0

    def report_progress(num_filled: int) -> None:
        watch.tracker.report_progress()
        if console:
            console.show_opening(num_filled, num_parameters)

    try:
        actor = ReopenableActor(spec.actor, source, world, report_progress)
    except Exception as reason:
        if world.rank == 0 and (world.world_size == 1 or isinstance(reason, UsageError)):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    extend_collective_timeouts(spec.measure.timeout)
    return actor


def _has_labels(call: CapturedCall | None) -> bool:
    return call is not None and not call.tensors.keys().isdisjoint(("labels", "shift_labels"))


def _open_objective(spec: ReplaySpec, first_call: CapturedCall | None) -> Objective | None:
    """Open the objective, if the run has one. Raises UsageError if the first capture lacks what it needs."""
    objective = Objective.open(spec)
    if objective is None or first_call is None:
        return objective
    try:
        objective.check(ObjectiveData.collect(first_call, first_call.micro_batch()))
    except (ObjectiveError, CaptureError) as error:
        raise UsageError(Setting("loss", objective.loss), f": {error.text}") from error
    return objective
