"""One run: open the actor, feed it the inputs one by one, write down what each pass did."""

import shutil
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from actor_init.model import ModelSource, find_model, lasting_config
from actor_init.optimizer import TORCH_DTYPES
from actor_init.spec import PadTo, UsageError
from actor_init.world import World
from capture.actor_config import read_actor_config
from capture.capture_file import read_call
from capture.job import device_name
from capture.job import versions as loaded_versions
from capture.micro_batch import CaptureError
from capture.reproduction import environment
from replay.console import Console
from replay.digests import digest_of_weights
from replay.evidence import outlast
from replay.findings import Setting
from replay.keeping import SavingError, loaded_source, not_saved, refuse_folders, save
from replay.logbook import INTERRUPTED, Logbook, create_folder
from replay.meter import Meter
from replay.pass_runner import PassRunner, ReopenedActor, ReopeningError
from replay.position import Phase
from replay.recorded import Recorded
from replay.records import PassRecord
from replay.run_trace import RunTrace
from replay.same_weights import SameWeights
from replay.same_work import dropouts
from replay.selection import Selection, default_folder, select
from replay.spec import InputsSpec, RunSpec, VerdictRule
from replay.summary import summarize
from replay.verdict import Outcome, judge
from replay.verdict_wording import verdict_lines, weights_line
from replay.watch import Watch, watching
from replay.wording import Pairs, counted, engine_text


def run(spec: RunSpec, *, show_traceback: bool) -> int:
    """Replay what `spec` says and return the exit code: 0 only if every pass succeeded and every file could be read.

    Raises UsageError for what cannot be had here.
    """
    with World.from_env(spec.actor.parallel) as world:
        return run_in(world, spec, show_traceback=show_traceback)


def run_in(world: World, spec: RunSpec, *, show_traceback: bool = False) -> int:
    """`run` in a world that is already open, and stays open."""
    selection = select(spec.inputs, world.data_rank, world.num_data_ranks)
    source = loaded_source(spec, find_source(spec), world)
    refuse_folders(spec.state, world)
    folder = world.from_first(create_folder(spec.measure.log_folder, spec.measure.name) if world.rank == 0 else None)
    with watching(world, folder, spec.measure.timeout, show_traceback=show_traceback) as watch:
        return _run_watched(world, spec, selection, source, folder, watch, show_traceback)


def _run_watched(
    world: World,
    spec: RunSpec,
    selection: Selection,
    source: ModelSource,
    folder: Path,
    watch: Watch,
    show_traceback: bool,
) -> int:
    try:
        actor = ReopenedActor(spec.actor, source, world, spec.state.load_state)
    except Exception as reason:
        if world.rank == 0 and (world.world_size == 1 or isinstance(reason, UsageError)):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    outlast(spec.measure.timeout)
    meter = Meter.for_device(world.device)
    logbook = Logbook(folder, world.rank)
    devices = world.gather("CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device))
    console = Console(quiet=spec.measure.quiet) if world.rank == 0 else None
    num_inputs = world.gather(len(selection.inputs))
    same_weights = SameWeights(source)
    setting = _setting(spec, source, world, actor.backend.facts())
    if console:
        facts = {"model": source.name, "weights": source.weights.describe(), **actor.backend.facts()}
        logbook.begin(
            spec,
            facts=facts,
            work={"weights": digest_of_weights(source.weights), "config": lasting_config(source.config)},
            selection=selection,
            memory_kind=meter.memory_kind,
            devices=devices,
        )
        header = _header(spec, source, facts, selection, devices, num_inputs)
        header |= _first_look(same_weights, setting.dropout, selection)
        console.header(header, num_passes=len(selection.inputs))
    world.gather(None)  # no rank fails before run.json is there
    trace = RunTrace.of(folder, spec.actor, source, world, actor.backend) if spec.measure.trace else None
    runner = PassRunner(spec, world, source, actor, meter, watch.tracker, same_weights, trace)
    passes: list[tuple[PassRecord, Recorded | None]] = []
    saved: Pairs = []
    ended: BaseException | None = None
    try:
        for index, path in enumerate(selection.inputs):
            record, error = runner.replay(index, path)
            logbook.write(record)
            if error and show_traceback:
                traceback.print_exception(error)
            if error and world.world_size > 1:
                watch.stop_all(error)
            watch.tracker.at(Phase.GATHERING)
            ranks = world.gather((record, runner.recorded))
            passes += ranks
            if console:
                console.passed([own for own, _ in ranks])
            if error and spec.measure.step:
                break  # the weights of the steps so far are lost
            del error  # its frames hold the pass's tensors
            runner.mend()
        watch.tracker.has_passed(len(selection.inputs), Phase.OUT_OF_INPUTS)
        watch.meet()
        watch.tracker.has_passed(len(selection.inputs), Phase.SAVING)
        if not any(record.error for record, _ in passes):
            saved = save(spec, source, world, actor.backend, runner.num_settled, len(passes) // world.world_size)
        watch.tracker.has_passed(len(selection.inputs), Phase.CLOSING)
    except (KeyboardInterrupt, ReopeningError, SavingError) as reason:
        if isinstance(reason, SavingError) and world.world_size > 1:
            raise  # the others wait for this rank
        ended = reason
    records = [record for record, _ in passes]
    verdict = judge(passes, setting)
    differs = verdict.outcome is Outcome.DIFFERS and spec.measure.verdict is VerdictRule.STRICT
    exit_code = 1 if ended or selection.damaged or any(record.error for record in records) or differs else 0
    if isinstance(ended, KeyboardInterrupt):
        exit_code = INTERRUPTED
    if console:
        statistics = summarize(records)
        logbook.finish(statistics, exit_code=exit_code, verdict=verdict)
        console.finish(
            records,
            statistics,
            selection,
            folder,
            memory_kind=meter.memory_kind,
            verdict=verdict_lines(verdict),
            saved=saved or not_saved(spec.state),
        )
    logbook.close()
    if ended:
        raise ended
    actor.backend.close()
    return exit_code


def find_source(spec: RunSpec) -> ModelSource:
    folder = _inputs_folder(spec.inputs)
    try:
        captured = read_actor_config(folder) if spec.actor.model is None else None
    except CaptureError as error:
        raise UsageError(str(error)) from error
    return find_model(spec.actor, captured, str(_shown(folder / "actor.json")))


def _inputs_folder(spec: InputsSpec) -> Path:
    if spec.input_file is not None:
        return spec.input_file.parent
    return spec.inputs if spec.inputs is not None else default_folder()


def _setting(spec: RunSpec, source: ModelSource, world: World, facts: Mapping[str, Any]) -> Setting:
    dtype = str(TORCH_DTYPES[spec.actor.dtype]).removeprefix("torch.")
    kernel = {"attention": str(facts["attention_kernel"]), "dtype": dtype}
    return Setting(
        dtype=dtype,
        num_layers=source.config.get_text_config().num_hidden_layers,
        num_data_ranks=world.num_data_ranks,
        grad_accumulation=spec.actor.grad_accumulation,
        steps=spec.measure.step,
        dropout=dropouts(lasting_config(source.config)),
        environment={**loaded_versions(), **environment(), "device": device_name(world.device), **kernel},
    )


def _first_look(same_weights: SameWeights, dropout: Sequence[str], selection: Selection) -> dict[str, str]:
    """Wrong weights are said before the first pass, and whose random numbers it draws."""
    try:
        first = read_call(selection.inputs[0]) if selection.inputs else None
    except CaptureError:  # the pass will say so
        return {}
    if first is None:
        return {}
    whose = "from the job's random states" if first.random else "by chance: no random states were recorded"
    weights = {} if first.weights is None else {"recorded": weights_line(same_weights.check(first.weights))}
    return weights | ({"dropout": f"{', '.join(dropout)}, {whose}"} if dropout else {})


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
        "packed" if spec.actor.packing else "padded",
        f"attention {facts['attention_kernel']}",
        f"optimizer {facts['optimizer']}",
        *([f"tp {tp} (plan: {facts['tp_plan']})"] if (tp := spec.actor.parallel.tp) > 1 else []),
        *(["sequence parallel"] if spec.actor.parallel.sequence_parallel else []),
        *([f"ring {ring}"] if (ring := spec.actor.parallel.ring) > 1 else []),
        *([f"padded to the {spec.actor.pad_to}"] if spec.actor.pad_to is PadTo.LONGEST else []),
        *([f"compile {spec.actor.compile.value}"] if spec.actor.compile != "off" else []),
        *(["gradient checkpointing"] if spec.actor.gradient_checkpointing else []),
        *([f"gradient accumulation {n}"] if (n := spec.actor.grad_accumulation) > 1 else []),
    ]
    num_each = counted(num_inputs[0], "input") + (" a rank" if len(devices) > 1 else "")
    if len(set(num_inputs)) > 1:
        num_each = f"{', '.join(map(str, num_inputs))} inputs by rank"
    return {
        "model": f"{source.name}, {layers} layers, {facts['num_parameters'] / 1e6:,.4g} M parameters; "
        f"weights {facts['weights']}",
        "backend": f"{engine_text(spec.actor.backend, facts['zero_stage'])}, {', '.join(toggles)}",
        "device": ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
        "inputs": f"{num_each} from {_shown(_inputs_folder(spec.inputs))}, {selection.dealing}",
    }


def _shown(path: Path) -> Path:
    """As one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
