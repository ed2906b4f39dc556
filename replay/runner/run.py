"""Run a replay from what was typed: resolve it, open its actor, and let a session feed it the inputs."""

import gc
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from actor_init.model import ModelSource, count_parameters
from actor_init.spec import UsageError
from actor_init.world import World
from capture.facts import Setting
from capture.file_format.capture_file import Call
from capture.file_format.micro_batch import CaptureError
from replay.objective.inputs import ObjectiveError, Recorded
from replay.objective.objective import Objective, may_count_after_padding
from replay.options.resolved import ResolvedReplay
from replay.options.spec import ReplaySpec
from replay.output.printing import open_console, print_table
from replay.output.text import short_names_differ
from replay.resolution.resolve import resolve
from replay.resolution.selection import Selection, first_call, select
from replay.runlog.writer import Logbook, create_folder
from replay.runner.checkpoint import Saver, loaded_source, refuse_folders, state_to_load
from replay.runner.meter import Meter
from replay.runner.replayer import ReopenedActor
from replay.runner.result import Run, setting_of
from replay.runner.session import Session
from replay.runner.states import Earlier, FolderStates, States
from replay.runner.text import Console, choice_table
from replay.verdict.weight_check import SameWeights
from replay.watch.stacks import outlast
from replay.watch.watcher import Watch, watching


def run(spec: ReplaySpec, *, show_traceback: bool, states: States | None = None) -> Run:
    """Replay as `spec` says. The exit code of the run is 0 only if every pass succeeded and every file could be read.

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
            snapshot = Setting("memory_snapshot")
            why = "needs CUDA's allocator, or the memory that Linux says a process has; this system says its peak alone"
            raise UsageError(snapshot, why, f"Try: without {snapshot}")
        first = first_call(selection)
        objective = Objective.of(spec)
        _check_objective(objective, first)
        resolved = resolve(spec, selection, first, world, objective)
        return cls(resolved=resolved, selection=selection, meter=meter, first=first, objective=objective)


def run_in(world: World, spec: ReplaySpec, *, show_traceback: bool = False, states: States | None = None) -> Run:
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
            setting=setting_of(resolved, same_weights, world, actor.backend.facts()),
            saver=Saver(
                spec=resolved, source=source, world=world, logs=folder, states=states, num_steps=earlier.num_steps
            ),
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
        replayed = session.report(done, conclusion)
        if done.ended is not None:
            raise done.ended
        return replayed


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


def _check_objective(objective: Objective | None, first: Call | None) -> None:
    """Raise UsageError if the first capture lacks what the objective needs."""
    if objective is None or first is None:
        return
    try:
        objective.check(Recorded.of(first, first.micro_batch()))
    except (ObjectiveError, CaptureError) as error:
        raise UsageError(Setting("loss", objective.loss), f": {error.text}") from error
