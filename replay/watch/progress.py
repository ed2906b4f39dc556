"""Track where a rank is: pass, input, phase. The main thread sets it, other threads and ranks read it.

The position is also written to `rank<k>.position.json`, which is mapped into memory: what was stored there survives
whatever kills the rank.
"""

import json
import mmap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path

from actor_init.as_json import parse_json

# The position file has this many bytes. The longest part of a position is a file name of at most 255 characters.
FILE_BYTES = 4096


class RankPhase(StrEnum):
    """The phases of a rank: those that a record has the costs of, and what lies before, between and after them.

    They are in the order in which a rank goes through them.

    In DEVICE_SYNC a rank on CUDA waits for all that the phases before have queued on the device.
    """

    OPENING = "opening the actor"
    READING = "reading"
    STARTING = "waiting to start"
    FORWARD = "forward"
    WAITING_FOR_RANKS = "waiting after forward"
    BACKWARD = "backward"
    STEP = "step"
    DEVICE_SYNC = "waiting for the device"
    PASS_END = "ending the pass"
    GATHERING = "gathering the records"
    SEARCHING_NON_FINITE = "looking for what is not finite"
    RERUNNING = "running a slow pass again"
    OUT_OF_INPUTS = "out of inputs"
    SAVING = "saving"
    PROFILING = "profiling a pass"
    CLOSING = "closing"


# The phases that a pass has gone through, after its position in the accumulation window. Passes with the same path are
# expected to enter the same collectives.
PhasePath = tuple[int, tuple[RankPhase, ...]]
ORDER = {phase: number for number, phase in enumerate(RankPhase)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPosition:
    """Where a rank is.

    index   the number of passes before this one; -1 before the first pass, and the number of all after the last
    source  the name of the input file; None outside of passes
    """

    index: int = -1
    phase: RankPhase = RankPhase.OPENING
    source: str | None = None
    rows: int = 0
    padded_tokens: int = 0
    real_tokens: int = 0

    @property
    def sort_key(self) -> tuple[int, int]:
        """A key that is smaller than that of a position which is reached later."""
        return self.index, ORDER[self.phase]

    def describe(self) -> str:
        """Write the position as `pass 2 on a.pkl (2 rows, 40 tokens, 38 of them real), phase forward`."""
        if self.source is None:
            after = f" after {self.index} passes" if self.index >= 0 else ""
            return f"phase {self.phase}{after}"
        shape = (
            f" ({self.rows} rows, {self.padded_tokens} tokens, {self.real_tokens} of them real)" if self.rows else ""
        )
        return f"pass {self.index + 1} on {self.source}{shape}, phase {self.phase}"


FIELDS = [field.name for field in fields(RankPosition)]


class Tracker:
    """One rank's position, kept up to date by its main thread.

    The tracker also knows how many collectives earlier passes had entered when they were in the same phase. A pass with
    the same path of phases that has entered more is in a collective that no pass before had: other ranks may not know
    it, and so this rank may wait in it for ever.

    num_phase_changes  how often a phase began: an unchanged number means that the rank stands still
    num_parts_done     parts of work that were reported within phases

    count_collectives  counts the collectives that this rank has entered, by process group
    """

    def __init__(self, folder: Path, rank: int, count_collectives: Callable[[], Mapping[str, int]] = dict) -> None:
        self.position = RankPosition()
        self.num_phase_changes = 0
        self.num_parts_done = 0
        self._count_collectives = count_collectives
        self._counts_at_begin: Counter[str] = Counter()
        self._phase_path: PhasePath = (0, ())
        # How many collectives this pass had entered by the end of each phase, and the largest of these numbers in
        # earlier passes.
        self._counts: dict[PhasePath, Counter[str]] = {}
        self._highest_counts: dict[PhasePath, Counter[str]] = {}
        self._file_path = position_path(folder, rank)
        self._file_path.write_bytes(b" " * FILE_BYTES)
        with self._file_path.open("r+b") as file:
            # Phases change while the clock of a pass runs: storing to mapped memory needs no system call.
            self._mapped = mmap.mmap(file.fileno(), FILE_BYTES)
        self._move(self.position)

    def enter_phase(self, phase: RankPhase) -> None:
        self._note_counts()
        self._move(replace(self.position, phase=phase))

    def report_progress(self) -> None:
        """Report that a part of this phase is done. Long work without collectives has to call this."""
        self.num_parts_done += 1

    def count_new_collectives(self) -> int:
        """Count the collectives of this pass beyond those of any earlier pass with the same path; 0 without one."""
        if (highest := self._highest_counts.get(self._phase_path)) is None:
            return 0
        return (Counter(self._count_collectives()) - self._counts_at_begin - highest).total()

    def begin_pass(self, index: int, source: str, *, index_in_window: int = 0) -> None:
        self._note_counts()
        for path, counts in self._counts.items():
            self._highest_counts[path] = self._highest_counts.get(path, Counter()) | counts
        self._counts = {}
        self._phase_path = index_in_window, ()
        self._counts_at_begin = Counter(self._count_collectives())
        self._move(RankPosition(index=index, phase=RankPhase.READING, source=source))

    def set_shapes(self, rows: int, padded_tokens: int, real_tokens: int) -> None:
        """Set the shapes of the input that was read; the rank now waits for the others to read theirs."""
        self.position = replace(self.position, rows=rows, padded_tokens=padded_tokens, real_tokens=real_tokens)
        self.enter_phase(RankPhase.STARTING)

    def enter_phase_after_passes(self, num_passes: int, phase: RankPhase) -> None:
        """Enter a phase that comes after all passes."""
        self._move(RankPosition(index=num_passes, phase=phase))

    def close(self) -> None:
        """Remove the file, which is of use only where a run broke off."""
        self._mapped.close()
        self._file_path.unlink(missing_ok=True)

    def _note_counts(self) -> None:
        self._counts[self._phase_path] = Counter(self._count_collectives()) - self._counts_at_begin

    def _move(self, position: RankPosition) -> None:
        self.position = position
        index_in_window, phases = self._phase_path
        self._phase_path = index_in_window, (*phases, position.phase)
        self.num_phase_changes += 1
        text = json.dumps({name: getattr(position, name) for name in FIELDS})
        self._mapped[:] = text.encode().ljust(FILE_BYTES)[:FILE_BYTES]


def position_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.position.json"


def read_last_position(folder: Path, rank: int) -> RankPosition | None:
    """Read a rank's last position from its file; None if that is on another node's own disk."""
    path = position_path(folder, rank)
    return parse_json(RankPosition, path.read_bytes(), source=str(path)) if path.exists() else None
