"""Keep a state every few steps, and go on from the latest as the run that was begun.

PATH/step-000010/state.json, ...   as --save-state writes it
                 rank<k>.jsonl     the passes so far; the log of a run that goes on begins with them

A folder is written under another name and renamed: what has a name is whole. The last KEPT_STATES are kept.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from actor_init.saving.huggingface import check_folder, create_whole_folder
from actor_init.saving.state_file import STATE_FILE, SavedState
from actor_init.spec import UsageError
from actor_init.world import World
from capture.facts import Setting
from replay.options.spec import NUM_KEPT_STATES, StateSpec
from replay.resolution.selection import Selection
from replay.runlog.reader import read_lines
from replay.runlog.records import PassRecord

PREFIX = "step-"


def name_state_folder(num_steps: int) -> str:
    return f"{PREFIX}{num_steps:06d}"


def name_passes_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


class StateStore(Protocol):
    """Where the states of a run are kept. All ranks must call its methods, but `check`, which is for rank 0."""

    @property
    def has_folder(self) -> bool:
        """Are the states below --save-state, for --load-state to find?"""

    def check(self) -> None:
        """Raise UsageError unless states can be kept here. Under --resume, clear up what a killed run left."""

    def find_latest(self, world: World) -> Path | None:
        """Return the folder of the latest whole state, or None if there is none."""

    def keep(self, num_steps: int, write: Callable[[Path], None], world: World) -> None:
        """Keep what `write` writes into a folder on each rank: one for all ranks, or one for each.

        Raises what writing raises; then the state is not there.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderStateStore:
    """The states below a folder that all ranks share."""

    folder: Path
    is_resumed: bool
    has_folder = True

    @classmethod
    def from_spec(cls, spec: StateSpec) -> Self | None:
        """Return where --save-every keeps its states; None without it."""
        if spec.save_every is None:
            return None
        assert spec.save_state is not None
        return cls(folder=spec.save_state, is_resumed=spec.resume)

    def check(self) -> None:
        setting = Setting("save_state", self.folder)
        if not self.is_resumed:
            if find_whole_states(self.folder):
                other = setting.with_value(f"{self.folder}-2")
                raise UsageError(setting, "holds the states of a run", f"Try: {Setting('resume', True)}, or {other}")
            check_folder(self.folder, "save_state")
            try:
                self.folder.mkdir(exist_ok=True)
            except OSError as error:
                raise UsageError(setting, f": {error.strerror}", "Give a folder where you may write") from None
            return
        check_folder(self.folder / "any", "save_state")
        if (self.folder / STATE_FILE).is_file():
            why = f"is one state, not those of {Setting('save_every')}"
            raise UsageError(setting, why, f"Try: {Setting('load_state', self.folder)}")
        for unfinished in self.folder.glob(f".{PREFIX}*.unfinished-*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def find_latest(self, world: World) -> Path | None:
        folders = find_whole_states(self.folder) if world.rank == 0 else []
        latest: Path | None = world.broadcast_from_rank0(folders[-1] if folders else None)
        return latest

    def keep(self, num_steps: int, write: Callable[[Path], None], world: World) -> None:
        with create_whole_folder(self.folder / name_state_folder(num_steps), world) as unfinished:
            write(unfinished)
        if world.rank == 0:
            for old_folder in find_whole_states(self.folder)[:-NUM_KEPT_STATES]:
                shutil.rmtree(old_folder, ignore_errors=True)


def find_whole_states(folder: Path) -> list[Path]:
    """Return the folders of the states below `folder`, the latest last."""
    return sorted(path.parent for path in folder.glob(f"{PREFIX}*/{STATE_FILE}"))


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierPasses:
    """What the run had done when its latest state was saved; nothing, if this is its beginning.

    folder      of the state
    num_passes  on each rank
    records     of all ranks
    """

    folder: Path | None = None
    num_steps: int = 0
    num_passes: int = 0
    records: Sequence[PassRecord] = ()

    @classmethod
    def read(cls, folder: Path, selection: Selection, world: World) -> Self:
        """Read the passes before the state in `folder`.

        Raises UsageError, on this rank alone, if they were of another number of ranks, or on other inputs.
        """
        state = SavedState.read(folder)
        num_ranks, num_tp, num_ring = world.world_size, world.mesh["tp"].size(), world.mesh["ring"].size()
        if (state.world_size, state.tp, state.ring) != (num_ranks, num_tp, num_ring):
            resume, tp, ring = Setting("resume"), Setting("tp"), Setting("ring")
            saved = f"{state.world_size} ranks with {tp.with_value(state.tp)} {ring.with_value(state.ring)}"
            present = f"{num_ranks} with {tp.with_value(num_tp)} {ring.with_value(num_ring)}"
            why = f": {folder} was saved by {saved}, and here are {present}"
            new_run = f"{Setting('load_state', folder)} {Setting('skip_inputs', state.num_inputs)}"
            raise UsageError(resume, why, f"Try: as there; or {new_run}, a run of its own")
        records = [
            record
            for rank in range(world.world_size)
            for record in read_lines(name_passes_file(folder, rank), "replay")
        ]
        earlier_names = [record.source for record in records if record.rank == world.rank]
        names = [path.name for path in selection.inputs]
        # There may be fewer inputs now than passes then.
        names += ["none"] * len(earlier_names)
        for number, (earlier_name, name) in enumerate(zip(earlier_names, names, strict=False), start=1):
            if earlier_name != name:
                why = f": pass {number} in {folder} was on {earlier_name}, and here it is on {name}"
                raise UsageError(Setting("resume"), why, "Try: the inputs and options of the run that was begun")
        num_steps = sum(record.result.grad_norm is not None for record in records if record.rank == world.rank)
        return cls(folder=folder, num_steps=num_steps, num_passes=len(earlier_names), records=records)
