"""Load model state before the first pass, save it after the last, and report both.

saved      state in runs/a: 3 steps, the next with learning rate 0.0003
go on      torchrun --nproc-per-node 2 replay --step --skip-inputs 3 --max-inputs 3 --load-state runs/a
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from actor_init.backends.protocol import Backend
from actor_init.model import ModelSource
from actor_init.saving.huggingface import check_folder, whole_folder
from actor_init.saving.state_file import SavedState
from actor_init.spec import UsageError
from actor_init.weights import OnProgress, unheard
from actor_init.world import World
from replay.option_parsing import command_line
from replay.report.text import Pairs, counted, gibibytes, one_line
from replay.runlog.writer import versions
from replay.spec import RunSpec, StateSpec


class SavingError(RuntimeError):
    """Raised if what --save-model or --save-state asks for could not be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateWeights:
    """Placeholder weights until --load-state fills them: NaN, so that a parameter missing from the state shows up."""

    folder: Path
    num_steps: int

    def describe(self) -> str:
        return f"from the state in {self.folder}, after {counted(self.num_steps, 'step')}"

    def holds(self, name: str) -> bool:
        return False

    @torch.no_grad()
    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = unheard) -> bool:
        parameter.fill_(torch.nan)
        return True

    def sample(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        return None


def loaded_source(spec: RunSpec, source: ModelSource, world: World) -> ModelSource:
    """Return `source` with the weights of --load-state, if given. Raises UsageError if they cannot be loaded here."""
    folder = spec.state.load_state
    if folder is None:
        return source
    state = SavedState.read(folder)
    state.check(folder, spec.actor, source, world)
    return replace(source, weights=StateWeights(folder=folder, num_steps=state.num_steps))


def refuse_folders(spec: StateSpec, world: World) -> None:
    """Raise UsageError, on all ranks, for a folder that cannot be written, before the run begins."""
    problem = None
    if world.rank == 0:
        try:
            for option, folder in _wanted(spec).items():
                check_folder(folder, option)
        except UsageError as error:
            problem = str(error)
    if problem := world.from_first(problem):
        raise UsageError(problem)


def save(
    spec: RunSpec, source: ModelSource, world: World, backend: Backend, num_settled: int, num_passes: int
) -> Pairs:
    """Write what was asked for and return the lines that report it. All ranks must call this.

    An incomplete last accumulation window changed no weights, so its inputs count as not replayed. Raises SavingError;
    the other ranks may then wait for this one.
    """
    lines: Pairs = []
    try:
        if (folder := spec.state.save_model) is not None:
            with whole_folder(folder, world) as unfinished:
                backend.save_model(unfinished)
            lines.append(("saved", f"model in {folder}: {spec.actor.dtype}, {gibibytes(_size(folder))} GiB"))
        if (folder := spec.state.save_state) is not None:
            num_inputs = spec.inputs.skip_inputs + num_settled
            progress = backend.progress()
            with whole_folder(folder, world) as unfinished:
                backend.save_state(unfinished)
                if world.rank == 0:
                    SavedState.of(
                        spec.actor, source, world, progress, num_inputs=num_inputs, versions=versions()
                    ).write(unfinished)
            steps = counted(progress.num_steps, "step")
            lines.append(
                ("saved", f"state in {folder}: {steps}, the next with learning rate {progress.learning_rate:g}")
            )
            if num_passes > num_settled:
                open_window = counted(num_passes - num_settled, "pass")
                lines.append(("not saved", f"the last {open_window}: their accumulation window was cut short"))
            lines.append(("go on", _go_on(spec, folder, num_inputs, world)))
    except Exception as error:
        raise SavingError(f"{folder} could not be saved and does not exist: {one_line(str(error))}") from error
    return lines


def not_saved(spec: StateSpec) -> Pairs:
    """Return the lines that report what a failed or interrupted run did not save."""
    missing = {option: folder for option, folder in _wanted(spec).items() if not (folder.is_dir() and _size(folder))}
    return [("not saved", f"{option} {folder}: the run did not succeed") for option, folder in missing.items()]


def _wanted(spec: StateSpec) -> dict[str, Path]:
    folders = {"--save-model": spec.save_model, "--save-state": spec.save_state}
    return {option: folder for option, folder in folders.items() if folder is not None}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _go_on(spec: RunSpec, folder: Path, num_inputs: int, world: World) -> str:
    inputs = replace(spec.inputs, skip_inputs=num_inputs)
    command = command_line(replace(spec, inputs=inputs, state=StateSpec(load_state=folder)))
    launcher = [] if world.world_size == 1 else ["torchrun", "--nproc-per-node", str(world.world_size)]
    return shlex.join([*launcher, "replay", *command])
