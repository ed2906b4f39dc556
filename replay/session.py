"""One run: open the actor, feed it the inputs one by one, write down what each pass did."""

import gc
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from actor_init.backends import Backend, open_backend
from actor_init.compiling import num_graphs
from actor_init.model import ModelSource, find_model
from actor_init.packing import actor_inputs
from actor_init.spec import ActorSpec, UsageError
from actor_init.world import World
from capture.capture_file import read_actor_config, read_micro_batch
from capture.micro_batch import CaptureError, MicroBatch
from replay.console import Console
from replay.logbook import INTERRUPTED, Logbook, create_folder
from replay.loss import negated_mean, tokens_for
from replay.meter import Meter
from replay.records import PassRecord
from replay.selection import Selection, default_folder, select
from replay.spec import InputsSpec, RunSpec
from replay.summary import summarize
from replay.wording import one_line


def run(spec: RunSpec, *, show_traceback: bool) -> int:
    """Replay what `spec` says and return the exit code: 0 only if every pass succeeded and every file could be read.

    Raises UsageError for what cannot be had here.
    """
    with World.from_env(spec.actor.parallel) as world:
        return run_in(world, spec, show_traceback=show_traceback)


def run_in(world: World, spec: RunSpec, *, show_traceback: bool = False) -> int:
    """`run` in a world that is already open, and stays open."""
    selection = select(spec.inputs, world.data_rank, world.num_data_ranks)
    source = find_source(spec)
    folder = world.from_first(create_folder(spec.measure.log_folder, spec.measure.name) if world.rank == 0 else None)
    try:
        actor = ReopenedActor(spec.actor, source, world)
    except Exception:
        if world.rank == 0:
            folder.rmdir()
        raise
    meter = Meter.for_device(world.device)
    logbook = Logbook(folder, world.rank)
    devices = world.gather("CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device))
    console = Console(quiet=spec.measure.quiet) if world.rank == 0 else None
    if console:
        facts = {"model": source.name, "weights": source.weights.describe(), **actor.backend.facts()}
        logbook.begin(spec, facts=facts, selection=selection, memory_kind=meter.memory_kind, devices=devices)
        console.header(_header(spec, source, facts, selection, devices), num_passes=len(selection.inputs))
    world.gather(None)  # no rank fails before run.json is there
    session = Session(spec, world, source, actor, meter)
    records: list[PassRecord] = []
    ended: BaseException | None = None
    try:
        for index, path in enumerate(selection.inputs):
            record, error = session.replay(index, path)
            logbook.write(record)
            if error and show_traceback:
                traceback.print_exception(error)
            if error and world.world_size > 1:
                _stop_all_ranks(record, logbook)
            ranks = world.gather(record)
            records += ranks
            if console:
                console.passed(ranks)
            if error and spec.measure.step:
                break  # the weights of the steps so far are lost
            del error  # its frames hold the pass's tensors
            session.mend()
    except (KeyboardInterrupt, ReopeningError) as reason:
        ended = reason
    exit_code = 1 if ended or selection.damaged or any(record.error for record in records) else 0
    if isinstance(ended, KeyboardInterrupt):
        exit_code = INTERRUPTED
    if console:
        statistics = summarize(records)
        logbook.finish(statistics, exit_code=exit_code)
        console.finish(records, statistics, selection, folder, memory_kind=meter.memory_kind)
    logbook.close()
    if ended:
        raise ended
    actor.backend.close()
    return exit_code


class ReopeningError(RuntimeError):
    """A pass broke off, and the actor could not be opened again."""


class ReopenedActor:
    """A backend that is opened again after a pass that broke off: its leftovers would falsify the next pass."""

    def __init__(self, spec: ActorSpec, source: ModelSource, world: World) -> None:
        self._arguments = (spec, source, world)
        self.backend: Backend = open_backend(spec, source, world)

    def reopen(self) -> None:
        self.backend.close()
        del self.backend
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            self.backend = open_backend(*self._arguments)
        except Exception as error:
            raise ReopeningError(f"the actor could not be opened again after the failed pass: {error}") from error


class Session:
    """One pass after the other through the actor, and where the accumulation window stands."""

    def __init__(self, spec: RunSpec, world: World, source: ModelSource, actor: ReopenedActor, meter: Meter) -> None:
        self.spec = spec
        self.world = world
        self.source = source
        self.actor = actor
        self.meter = meter
        self._num_in_window = 0
        self._broke_off = False

    def mend(self) -> None:
        """Open the actor again if a pass broke off. Call it once the error is dropped: its frames hold the model."""
        if self._broke_off:
            self.actor.reopen()
            self._broke_off = False

    def replay(self, index: int, path: Path) -> tuple[PassRecord, Exception | None]:
        """One input through forward, and backward and step if it is to. What goes wrong is recorded and returned."""
        known: dict[str, Any] = {
            "index": index,
            "source": path.name,
            "rank": self.world.rank,
            "data_rank": self.world.data_rank,
            "warmup": index < self.spec.measure.warmup,
        }
        try:
            batch = tokens_for(self.spec.measure.loss, read_micro_batch(path))
            known |= {
                "rows": batch.num_rows,
                "padded_tokens": batch.num_padded_tokens,
                "real_tokens": batch.num_real_tokens,
                "row_tokens": batch.attention_mask_BS.sum(dim=1).tolist(),
                "trains": batch.trains,
            }
            self._check_vocabulary(batch)
            return PassRecord(**known, **self._measured(batch)), None
        except Exception as error:
            return PassRecord(**known, error=one_line(str(error)), error_type=type(error).__name__), error

    def _measured(self, batch: MicroBatch) -> dict[str, Any]:
        backward = batch.trains and self.spec.measure.backward
        last_of_window = backward and self._num_in_window + 1 == self.spec.actor.grad_accumulation
        step = last_of_window and self.spec.measure.step
        inputs = actor_inputs(batch, packing=self.spec.actor.packing).to(self.world.device)
        graphs_before = num_graphs()
        self.world.meet()
        try:
            self.meter.start_pass()
            with torch.set_grad_enabled(batch.trains):
                with self.meter.phase("forward"):
                    log_probs_BA = self.actor.backend.forward(inputs, trains=batch.trains)
                    loss = negated_mean(log_probs_BA, inputs)
                if self.world.world_size > 1:
                    with self.meter.phase("wait"):
                        self.world.meet()
                if backward:
                    with self.meter.phase("backward"):
                        self.actor.backend.backward(loss)
                grad_norm = None
                if step:
                    with self.meter.phase("step"):
                        grad_norm = self.actor.backend.end_window(step=True)
            phases, seconds = self.meter.end_pass()
            if last_of_window and not step:
                grad_norm = self.actor.backend.end_window(step=False)
        except Exception:
            self._num_in_window = 0
            self._broke_off = True
            raise
        self._num_in_window = 0 if last_of_window else self._num_in_window + backward
        wait = phases.pop("wait", None)
        return {
            "phases": phases,
            "seconds": seconds,
            "wait_seconds": wait.seconds if wait else None,
            "loss": loss.item(),
            "grad_norm": grad_norm,
            "new_graphs": num_graphs() - graphs_before,
        }

    def _check_vocabulary(self, batch: MicroBatch) -> None:
        largest, size = int(batch.sequences_BS.max()), self.source.config.get_text_config().vocab_size
        if largest >= size:
            raise CaptureError(
                f"{batch.origin.source}: token id {largest} is beyond the model's vocabulary of {size}; "
                "these inputs belong to another model. Name it with --model"
            )


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


def _header(
    spec: RunSpec, source: ModelSource, facts: dict[str, Any], selection: Selection, devices: list[str]
) -> dict[str, str]:
    layers = source.config.get_text_config().num_hidden_layers
    toggles = [
        spec.actor.dtype.value,
        "packed" if spec.actor.packing else "padded",
        f"attention {facts['attention_kernel']}",
        f"optimizer {facts['optimizer']}",
        *([f"compile {spec.actor.compile.value}"] if spec.actor.compile != "off" else []),
        *(["gradient checkpointing"] if spec.actor.gradient_checkpointing else []),
        *([f"gradient accumulation {n}"] if (n := spec.actor.grad_accumulation) > 1 else []),
    ]
    where = spec.inputs.input_file or _shown(_inputs_folder(spec.inputs))
    num_each = f"{len(selection.inputs)} inputs" + (" a rank" if len(devices) > 1 else "")
    return {
        "model": f"{source.name}, {layers} layers, {facts['num_parameters'] / 1e6:,.4g} M parameters; "
        f"weights {facts['weights']}",
        "backend": f"{facts['backend']}, ZeRO stage {facts['zero_stage']}, {', '.join(toggles)}",
        "device": ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
        "inputs": f"{num_each} from {where}, {selection.dealing}",
    }


def _shown(path: Path) -> Path:
    """As one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _stop_all_ranks(record: PassRecord, logbook: Logbook) -> NoReturn:
    """Leave at once: a rank that goes on alone would leave the others waiting. The launcher ends them."""
    first = logbook.fail(record)
    logbook.close()
    reason = "All ranks stop" if first == record.rank else f"That is because rank {first} failed before"
    shape = f"{record.rows} rows, {record.padded_tokens} tokens, {record.real_tokens} of them real"
    print(
        f"replay: rank {record.rank} failed in pass {record.index + 1} on {record.source} ({shape}): "
        f"{record.error_type}: {record.error}. {reason}; the log is in {logbook.folder}",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(1)  # no exit handlers: closing the process group would wait for the other ranks
