"""Load model state before the first pass, save it every few steps and after the last pass, and report both.

saved      state in runs/a: 3 steps, the next with learning rate 0.0003
go on      torchrun --nproc-per-node 2 -m replay --step --skip-inputs 3 --max-inputs 3 --load-state runs/a
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from actor_init.backends.protocol import Backend
from actor_init.custom.checkpoint import CheckpointWeights
from actor_init.model import ModelSource
from actor_init.saving.huggingface import check_folder, create_whole_folder
from actor_init.saving.state_file import STATE_FILE, SavedState
from actor_init.spec import UsageError
from actor_init.weights import FolderWeights, OnProgress, Weights, ignore_progress
from actor_init.world import World
from capture.facts import Setting
from capture.file_format.micro_batch import MicroBatch
from capture.file_format.tensor_codec import view_bytes
from replay.options.option_parsing import as_typed, in_flags
from replay.options.resolved import ResolvedReplay
from replay.options.spec import StateSpec
from replay.output.text import Pairs, counted, gibibytes, one_line
from replay.processes.child_job import ChildJob
from replay.runlog.writer import versions
from replay.runner.states import States, passes_file, whole_states


class SavingError(RuntimeError):
    """Raised if what --save-model or --save-state asks for could not be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateWeights:
    """Placeholder weights until --load-state fills them: NaN, so that a parameter missing from the state shows up."""

    folder: Path
    num_steps: int

    def describe(self) -> str:
        return f"from the state in {self.folder}, after {counted(self.num_steps, 'step')}"

    def has_tensor(self, name: str) -> bool:
        return False

    @torch.no_grad()
    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = ignore_progress) -> bool:
        parameter.fill_(torch.nan)
        return True

    def sample(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        return None


SAFE_LOAD = "2.10.0"


def loaded_source(spec: ResolvedReplay, source: ModelSource, world: World, folder: Path | None) -> ModelSource:
    """Return `source` with the weights of the state in `folder`, if any. Raises UsageError if they cannot be loaded."""
    if folder is None:
        return source
    state = SavedState.read(folder)
    state.check(folder, spec.actor, source, world)
    return replace(source, weights=StateWeights(folder=folder, num_steps=state.num_steps))


def state_to_load(spec: StateSpec) -> Path | None:
    """Return the folder of --load-state; of one with the states of --save-every, the latest.

    Raises UsageError for a torch whose `torch.load`, which the libraries read a state with, runs code from a file. The
    states that --resume finds are the run's own.
    """
    folder = spec.load_state
    if folder is not None and TorchVersion(torch.__version__) < SAFE_LOAD:
        why = (
            f"needs torch {SAFE_LOAD} or later, and {torch.__version__} is installed: its torch.load can run code from "
            "a file (CVE-2025-32434, CVE-2026-24747)"
        )
        advice = f"Try: {Setting('model')} with what {Setting('save_model')} wrote"
        raise UsageError(Setting("load_state", folder), why, advice)
    if folder is None or (folder / STATE_FILE).is_file():
        return folder
    return next(reversed(whole_states(folder)), folder)


def refuse_folders(spec: StateSpec, world: World, states: States | None) -> None:
    """Raise UsageError, on all ranks, for a folder that cannot be written, before the run begins."""
    problem = None
    if world.rank == 0:
        try:
            if states is not None:
                states.check()
            for name, folder in _wanted(spec).items():
                if states is None or folder != spec.save_state:
                    check_folder(folder, name)
        except UsageError as error:
            problem = error.text
    if problem := world.from_first(problem):
        raise UsageError(problem)


@dataclass(kw_only=True, slots=True)
class Saver:
    """Saves what a run asks for: a state every few steps, and what is left at its end.

    All ranks must call its methods. They raise SavingError; the other ranks may then wait for this one.
    """

    spec: ResolvedReplay
    source: ModelSource
    world: World
    logs: Path  # the run's log folder
    states: States | None  # of --save-every
    num_steps: int  # that were done so far
    num_steps_kept: int = field(init=False)  # of the latest state

    def __post_init__(self) -> None:
        self.num_steps_kept = self.num_steps

    def is_due(self, *, has_stepped: bool) -> bool:
        """Count a step, if the latest pass ended with one, and tell whether a state is to be kept now."""
        self.num_steps += has_stepped
        every = self.spec.state.save_every
        return every is not None and has_stepped and self.num_steps % every == 0

    def keep(self, backend: Backend, num_inputs: int) -> None:
        """Keep a state after `num_inputs` inputs of each data rank, with the log so far."""
        states = self.states
        assert states is not None

        def write(folder: Path) -> None:
            self._write_state(backend, folder, self.spec.inputs.skip_inputs + num_inputs)
            with passes_file(self.logs, self.world.rank).open("rb") as log:
                passes_file(folder, self.world.rank).write_bytes(b"".join(islice(log, num_inputs)))

        with _saving(f"{self.spec.state.save_state}, the state after {counted(self.num_steps, 'step')},"):
            states.keep(self.num_steps, write, self.world)
        self.num_steps_kept = self.num_steps

    def at_end(self, backend: Backend, num_settled: int, num_passes: int) -> Pairs:
        """Write what was asked for and return the lines that report it.

        An incomplete last accumulation window changed no weights, so its inputs count as not replayed.
        """
        spec = self.spec
        lines: Pairs = []
        if spec.state.save_every is not None and self.num_steps > self.num_steps_kept:
            self.keep(backend, num_settled)
        if (folder := spec.state.save_model) is not None:
            with _saving(str(folder)), create_whole_folder(folder, self.world) as unfinished:
                backend.save_model(unfinished)
            lines.append(("saved", f"model in {folder}: {spec.actor.dtype}, {gibibytes(_size(folder))} GiB"))
        if (folder := spec.state.save_state) is None:
            return lines
        num_inputs = spec.inputs.skip_inputs + num_settled
        progress = backend.progress()
        if self.states is None:
            with _saving(str(folder)), create_whole_folder(folder, self.world) as unfinished:
                self._write_state(backend, unfinished, num_inputs)
            what = "state"
        else:
            what = f"states, every {counted(spec.state.save_every or 1, 'step')},"
        steps = counted(progress.num_steps, "step")
        lines.append(("saved", f"{what} in {folder}: {steps}, the next with learning rate {progress.learning_rate:g}"))
        if num_passes > num_settled:
            open_window = counted(num_passes - num_settled, "pass")
            lines.append(("not saved", f"the last {open_window}: their accumulation window was cut short"))
        if self.states is None or self.states.has_folder:
            lines.append(("go on", _go_on(spec, folder, num_inputs, self.world)))
        return lines

    def _write_state(self, backend: Backend, folder: Path, num_inputs: int) -> None:
        backend.save_state(folder)
        if self.world.rank == 0:
            state = SavedState.from_actor(
                self.spec.actor,
                self.source,
                self.world,
                backend.progress(),
                num_inputs=num_inputs,
                versions=versions(),
            )
            state.write(folder)


@contextmanager
def _saving(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise SavingError(f"{what} could not be saved and does not exist: {one_line(in_flags(error))}") from error


def not_saved(spec: StateSpec) -> Pairs:
    """Return the lines that report what a failed or interrupted run did not save."""
    missing = {name: folder for name, folder in _wanted(spec).items() if not (folder.is_dir() and _size(folder))}
    return [
        ("not saved", f"{as_typed(Setting(name, folder))}: the run did not succeed") for name, folder in missing.items()
    ]


def _wanted(spec: StateSpec) -> dict[str, Path]:
    """Return the folders to save into, by the settings that name them."""
    folders = {"save_model": spec.save_model, "save_state": spec.save_state}
    return {name: folder for name, folder in folders.items() if folder is not None}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _go_on(resolved: ResolvedReplay, folder: Path, num_inputs: int, world: World) -> str:
    spec = resolved.to_spec()
    inputs = replace(spec.inputs, skip_inputs=num_inputs)
    job = ChildJob(spec=replace(spec, inputs=inputs, state=StateSpec(load_state=folder)))
    return job.repeat_line(num_processes=world.world_size)


# Compute digests of inputs and weights, so that a comparison can tell whether two runs used the same ones.

BLOCK_BYTES = 2**12
BLOCKS_PER_FILE = 64  # at least
MOST_BYTES_BETWEEN = 2**22


def digest_of_inputs(batch: MicroBatch) -> str:
    """Return a digest of every tensor in a capture, independent of its file name."""
    named: dict[str, Tensor | None] = {
        "sequences": batch.sequences_BS,
        "attention_mask": batch.attention_mask_BS,
        "action_mask": batch.action_mask_BA,
        "labels": batch.labels_BS,
        **dict(sorted(batch.extra_tensors.items())),
    }
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in named.items():
        if tensor is not None:
            flat = tensor.contiguous().reshape(-1)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(view_bytes(flat))
    return digest.hexdigest()


def digest_of_weights(weights: Weights) -> str:
    """Return the name of random weights, or a digest of a model folder's files, independent of where it lies."""
    if isinstance(weights, FolderWeights):
        return _digest_of_files(sorted(weights.folder.glob("*.safetensors")))
    if isinstance(weights, CheckpointWeights):
        return _digest_of_files(list(weights.files))
    if isinstance(weights, StateWeights):
        return _digest_of_files(sorted(path for path in weights.folder.rglob("*") if path.is_file()))
    return weights.describe()


def _digest_of_files(paths: list[Path]) -> str:
    """Digest the names, the sizes and evenly spaced blocks of files.

    Training changes every tensor, and reading whole files would take minutes.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in range(0, size, min(max(size // BLOCKS_PER_FILE, BLOCK_BYTES), MOST_BYTES_BETWEEN)):
                file.seek(start)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
