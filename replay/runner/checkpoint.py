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
from actor_init.world import World, compute_on_rank0, try_on_all_ranks
from capture.facts import Setting
from capture.file_format.micro_batch import MicroBatch
from capture.file_format.tensor_codec import view_bytes
from replay.options.option_parsing import format_error_with_flags, spell_setting
from replay.options.resolved import ResolvedReplay
from replay.options.spec import StateSpec
from replay.output.text import Pairs, format_gibibytes, join_lines, pluralise
from replay.processes.child_job import ChildJob
from replay.runlog.writer import list_versions
from replay.runner.state_store import StateStore, find_whole_states, name_passes_file


class SavingError(RuntimeError):
    """Raised if what --save-model or --save-state asks for could not be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateWeights:
    """Placeholder weights until --load-state fills them: NaN, so that a parameter missing from the state shows up."""

    folder: Path
    num_steps: int

    def describe(self) -> str:
        return f"from the state in {self.folder}, after {pluralise(self.num_steps, 'step')}"

    def has_tensor(self, name: str) -> bool:
        return False

    @torch.no_grad()
    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = ignore_progress) -> bool:
        parameter.fill_(torch.nan)
        return True

    def sample(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        return None


# The first torch whose `torch.load` runs no code from a file.
SAFE_LOAD_VERSION = "2.10.0"


def load_state_weights(spec: ResolvedReplay, source: ModelSource, world: World, folder: Path | None) -> ModelSource:
    """Return `source` with the weights of the state in `folder`, if any.

    All ranks must call this. Raises UsageError on all of them if one cannot load the weights.
    """
    if folder is None:
        return source

    def read_state() -> SavedState:
        state = SavedState.read(folder)
        state.check(folder, spec.actor, source, world)
        return state

    state = try_on_all_ranks(world, read_state)
    return replace(source, weights=StateWeights(folder=folder, num_steps=state.num_steps))


def find_state_to_load(spec: StateSpec, *, torch_version: str = torch.__version__) -> Path | None:
    """Return the folder of --load-state; if it holds the states of --save-every, that of the latest.

    Raises UsageError for a torch whose `torch.load`, which the libraries read a state with, runs code from a file. The
    states that --resume finds are the run's own.

    torch_version  of the installed torch
    """
    folder = spec.load_state
    if folder is not None and TorchVersion(torch_version) < SAFE_LOAD_VERSION:
        why = (
            f"needs torch {SAFE_LOAD_VERSION} or later, and {torch_version} is installed: its torch.load can run "
            "code from a file (CVE-2025-32434, CVE-2026-24747)"
        )
        advice = f"Try: {Setting('model')} with what {Setting('save_model')} wrote"
        raise UsageError(Setting("load_state", folder), why, advice)
    if folder is None or (folder / STATE_FILE).is_file():
        return folder
    return next(reversed(find_whole_states(folder)), folder)


def refuse_folders(spec: StateSpec, world: World, states: StateStore | None) -> None:
    """Raise UsageError, on all ranks, for a folder that cannot be written, before the run begins."""

    def check_folders() -> None:
        if states is not None:
            states.check()
        for name, folder in _list_folders_to_save(spec).items():
            if states is None or folder != spec.save_state:
                check_folder(folder, name)

    compute_on_rank0(world, check_folders)


@dataclass(kw_only=True, slots=True)
class Saver:
    """Saves what a run asks for: a state every few steps, and what is left at its end.

    All ranks must call its methods. They raise SavingError; the other ranks may then wait for this one.

    log_folder       of the run
    states           where those of --save-every are kept; None without it
    num_steps        that the run has taken so far
    num_steps_saved  that it had taken when the latest state was saved
    """

    spec: ResolvedReplay
    source: ModelSource
    world: World
    log_folder: Path
    states: StateStore | None
    num_steps: int
    num_steps_saved: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_steps_saved = self.num_steps

    def is_due(self, *, latest_pass_has_stepped: bool) -> bool:
        """Count a step, if the latest pass ended with one, and tell whether a state is to be kept now."""
        self.num_steps += latest_pass_has_stepped
        every = self.spec.state.save_every
        return every is not None and latest_pass_has_stepped and self.num_steps % every == 0

    def save_state(self, backend: Backend, num_inputs: int) -> None:
        """Save a state after `num_inputs` inputs of each data rank, with the log so far."""
        states = self.states
        assert states is not None

        def write(folder: Path) -> None:
            self._write_state(backend, folder, self.spec.inputs.skip_inputs + num_inputs)
            with name_passes_file(self.log_folder, self.world.rank).open("rb") as log:
                name_passes_file(folder, self.world.rank).write_bytes(b"".join(islice(log, num_inputs)))

        with _wrap_saving_errors(f"{self.spec.state.save_state}, the state after {pluralise(self.num_steps, 'step')},"):
            states.keep(self.num_steps, write, self.world)
        self.num_steps_saved = self.num_steps

    def save_at_end(self, backend: Backend, num_inputs_completed: int, num_passes: int) -> Pairs:
        """Write what was asked for and return the lines that report it.

        An incomplete last accumulation window changed no weights, so its inputs count as not replayed.

        num_inputs_completed  inputs of each data rank up to the latest pass that left no window open
        num_passes            passes of each data rank
        """
        spec = self.spec
        lines: Pairs = []
        if spec.state.save_every is not None and self.num_steps > self.num_steps_saved:
            self.save_state(backend, num_inputs_completed)
        if (folder := spec.state.save_model) is not None:
            with _wrap_saving_errors(str(folder)), create_whole_folder(folder, self.world) as unfinished:
                backend.save_model(unfinished)
            lines.append(
                ("saved", f"model in {folder}: {spec.actor.dtype}, {format_gibibytes(_count_bytes(folder))} GiB")
            )
        if (folder := spec.state.save_state) is None:
            return lines
        num_inputs = spec.inputs.skip_inputs + num_inputs_completed
        progress = backend.progress()
        if self.states is None:
            with _wrap_saving_errors(str(folder)), create_whole_folder(folder, self.world) as unfinished:
                self._write_state(backend, unfinished, num_inputs)
            what = "state"
        else:
            what = f"states, every {pluralise(spec.state.save_every or 1, 'step')},"
        steps = pluralise(progress.num_steps, "step")
        lines.append(("saved", f"{what} in {folder}: {steps}, the next with learning rate {progress.learning_rate:g}"))
        if num_passes > num_inputs_completed:
            num_unsaved = pluralise(num_passes - num_inputs_completed, "pass")
            lines.append(("not saved", f"the last {num_unsaved}: their accumulation window was cut short"))
        if self.states is None or self.states.has_folder:
            lines.append(("go on", _format_go_on_line(spec, folder, num_inputs, self.world)))
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
                versions=list_versions(),
            )
            state.write(folder)


@contextmanager
def _wrap_saving_errors(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise SavingError(
            f"{what} could not be saved and does not exist: {join_lines(format_error_with_flags(error))}"
        ) from error


def describe_unsaved(spec: StateSpec) -> Pairs:
    """Return the lines that report what a failed or interrupted run did not save."""
    unsaved = {
        name: folder
        for name, folder in _list_folders_to_save(spec).items()
        if not (folder.is_dir() and _count_bytes(folder))
    }
    return [
        ("not saved", f"{spell_setting(Setting(name, folder))}: the run did not succeed")
        for name, folder in unsaved.items()
    ]


def _list_folders_to_save(spec: StateSpec) -> dict[str, Path]:
    """Return the folders to save into, by the settings that name them."""
    folders = {"save_model": spec.save_model, "save_state": spec.save_state}
    return {name: folder for name, folder in folders.items() if folder is not None}


def _count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _format_go_on_line(resolved: ResolvedReplay, folder: Path, num_inputs: int, world: World) -> str:
    spec = resolved.to_spec()
    inputs = replace(spec.inputs, skip_inputs=num_inputs)
    job = ChildJob(spec=replace(spec, inputs=inputs, state=StateSpec(load_state=folder)))
    return job.repeat_line(num_processes=world.world_size)


# A digest of weights reads blocks of BLOCK_BYTES, at least MIN_BLOCKS_PER_FILE of them, at distances of at most
# MAX_BLOCK_DISTANCE bytes.
BLOCK_BYTES = 2**12
MIN_BLOCKS_PER_FILE = 64
MAX_BLOCK_DISTANCE = 2**22


def digest_inputs(batch: MicroBatch) -> str:
    """Return a digest of every tensor in a capture, independent of its file name, to compare the inputs of two runs."""
    tensors: dict[str, Tensor | None] = {
        "sequences": batch.sequences_BS,
        "attention_mask": batch.attention_mask_BS,
        "action_mask": batch.action_mask_BA,
        "labels": batch.labels_BS,
        **dict(sorted(batch.extra_tensors.items())),
    }
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors.items():
        if tensor is not None:
            flat = tensor.contiguous().reshape(-1)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(view_bytes(flat))
    return digest.hexdigest()


def digest_weights(weights: Weights) -> str:
    """Return a digest of the files that weights are read from, wherever they lie; without files the weights' name."""
    if isinstance(weights, FolderWeights):
        return _digest_files(sorted(weights.folder.glob("*.safetensors")))
    if isinstance(weights, CheckpointWeights):
        return _digest_files(list(weights.files))
    if isinstance(weights, StateWeights):
        return _digest_files(sorted(path for path in weights.folder.rglob("*") if path.is_file()))
    return weights.describe()


def _digest_files(paths: list[Path]) -> str:
    """Digest the names, the sizes and evenly spaced blocks of files.

    Training changes every tensor, and reading whole files would take minutes.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        distance = min(max(size // MIN_BLOCKS_PER_FILE, BLOCK_BYTES), MAX_BLOCK_DISTANCE)
        with path.open("rb") as file:
            for start in range(0, size, distance):
                file.seek(start)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
