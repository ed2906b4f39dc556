"""Track where a rank is: pass, input, phase. The main thread sets it, other threads and ranks read it.

The position is also kept in `rank<k>.position.json`, mapped into memory, so it survives whatever kills the rank.
"""

import json
import mmap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path

from actor_init.as_json import parse_json

WIDTH = 4096  # bytes of the position file; a source is a file name, of at most 255 characters


class Phase(StrEnum):
    """The phases, in the order in which a rank goes through them."""

    OPENING = "opening the actor"
    READING = "reading"
    STARTING = "waiting to start"
    FORWARD = "forward"
    WAITING = "waiting after forward"
    BACKWARD = "backward"
    STEP = "step"
    SETTLING = "waiting for the device"  # on CUDA, for all that the phases before have queued
    ENDING = "ending the pass"
    GATHERING = "gathering the records"
    LOOKING = "looking for what is not finite"
    OUT_OF_INPUTS = "out of inputs"
    SAVING = "saving"
    PROFILING = "profiling a pass"
    CLOSING = "closing"


Way = tuple[int, tuple[Phase, ...]]  # the place in an accumulation window, and the phases so far
ORDER = {phase: number for number, phase in enumerate(Phase)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """`index` counts the passes before this one; -1 before the first, all of them after the last."""

    index: int = -1
    phase: Phase = Phase.OPENING
    source: str | None = None
    rows: int = 0
    padded_tokens: int = 0
    real_tokens: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """A key that is smaller than that of a rank that is further on."""
        return self.index, ORDER[self.phase]

    def described(self) -> str:
        """Write the position as `pass 2 on a.pkl (2 rows, 40 tokens, 38 of them real), phase forward`."""
        if self.source is None:
            after = f" after {self.index} passes" if self.index >= 0 else ""
            return f"phase {self.phase}{after}"
        shape = (
            f" ({self.rows} rows, {self.padded_tokens} tokens, {self.real_tokens} of them real)" if self.rows else ""
        )
        return f"pass {self.index + 1} on {self.source}{shape}, phase {self.phase}"


FIELDS = [field.name for field in fields(Position)]


class Tracker:
    """One rank's position, kept up to date by its main thread.

    `entered` counts the collectives that this rank has entered, by process group. Passes through the same phases, and
    at the same place of an accumulation window, are alike: one that has entered more of them than any before it had
    by the end of the same phase reached one that was not there before.
    """

    def __init__(self, folder: Path, rank: int, entered: Callable[[], Mapping[str, int]] = dict) -> None:
        self.position = Position()
        self._entered = entered
        self._at_begin: Counter[str] = Counter()
        self._way: Way = (0, ())
        self._so_far: dict[Way, Counter[str]] = {}  # collectives of this pass, by the end of each of its phases
        self._most: dict[Way, Counter[str]] = {}  # and of the passes before
        self.num_borders = 0
        self.num_parts_done = 0  # within phases
        self._path = position_file(folder, rank)
        self._path.write_bytes(b" " * WIDTH)
        with self._path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), WIDTH)  # a store, no call of the system: this is inside the clock
        self._move(self.position)

    def at(self, phase: Phase) -> None:
        self._count()
        self._move(replace(self.position, phase=phase))

    def goes_on(self) -> None:
        """Report that a part of this phase is done. Long work without collectives has to call this."""
        self.num_parts_done += 1

    def num_unforeseen(self) -> int:
        """Count the collectives of this pass beyond those of any pass like it. 0 in the first one."""
        if (most := self._most.get(self._way)) is None:
            return 0
        return (Counter(self._entered()) - self._at_begin - most).total()

    def begins(self, index: int, source: str, *, place_in_window: int = 0) -> None:
        self._count()
        for way, so_far in self._so_far.items():
            self._most[way] = self._most.get(way, Counter()) | so_far
        self._so_far = {}
        self._way = place_in_window, ()
        self._at_begin = Counter(self._entered())
        self._move(Position(index=index, phase=Phase.READING, source=source))

    def has_read(self, rows: int, padded_tokens: int, real_tokens: int) -> None:
        """Set the shapes of the input that was read; the rank now waits for the others to read theirs."""
        self.position = replace(self.position, rows=rows, padded_tokens=padded_tokens, real_tokens=real_tokens)
        self.at(Phase.STARTING)

    def has_passed(self, num_passes: int, phase: Phase) -> None:
        """Set a phase that comes after all passes."""
        self._move(Position(index=num_passes, phase=phase))

    def close(self) -> None:
        """Remove the file, which is of use only where a run broke off."""
        self._shared.close()
        self._path.unlink(missing_ok=True)

    def _count(self) -> None:
        self._so_far[self._way] = Counter(self._entered()) - self._at_begin

    def _move(self, position: Position) -> None:
        self.position = position
        self._way = self._way[0], (*self._way[1], position.phase)
        self.num_borders += 1
        self._shared[:] = json.dumps({name: getattr(position, name) for name in FIELDS}).encode().ljust(WIDTH)[:WIDTH]


def position_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.position.json"


def last_position(folder: Path, rank: int) -> Position | None:
    """Read a rank's last position from its file; None if that is on another node's own disk."""
    path = position_file(folder, rank)
    return parse_json(Position, path.read_bytes(), source=str(path)) if path.exists() else None
