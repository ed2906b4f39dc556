"""Keep where a rank is, also in shared memory, where it outlives whatever ends the process.

    /dev/shm/capture-<user>-<folder>-rank<r>-<process>/position      one page: a struct, then a JSON object
    /dev/shm/capture-<user>-<folder>-rank<r>-<process>/stacks.txt    what faulthandler writes at a crash

Moving on is a store into mapped memory: no call of the system.
"""

import faulthandler
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from capture.black_box.flight_recorder import POSITION_FILE, STACKS_FILE, SharedFolder
from capture.record.observer import TRAINING_PHASES, Recording, TrainingPhase

PAGE_BYTES = 4096
# forward, place, when it was reached, rank, world size, was_told, has_stacks, last_backward
_MOVING = struct.Struct("<qqdqqqqq")
_NUMBER_OF = {place: number for number, place in enumerate(TRAINING_PHASES)}
_TRACE_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # where NCCL's flight recorder dumps
_enabled: "list[PositionPage]" = []  # the one that faulthandler writes for


class PositionPage:
    """A page in shared memory with this process's position. Any thread may write it.

    was_told  an incident in this pass says already why the process ends
    """

    def __init__(self) -> None:
        self.was_told = False
        self._page: mmap.mmap | None = None
        self._stacks: IO[bytes] | None = None

    def open(self, shared: SharedFolder, recording: Recording) -> None:
        """Keep the position in shared memory from here on, and have faulthandler write there unless the job uses that.

        Raises OSError.
        """
        facts = {
            "opened": recording.opened,
            "main_thread": threading.main_thread().ident,
            "trace_file": next((os.environ[name] for name in _TRACE_FILES if name in os.environ), None),
        }
        path = shared.directory / POSITION_FILE
        path.write_bytes((bytes(_MOVING.size) + json.dumps(facts).encode()).ljust(PAGE_BYTES, b" "))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), PAGE_BYTES)
        if not faulthandler.is_enabled():
            self._stacks = (shared.directory / STACKS_FILE).open("wb")
            faulthandler.enable(self._stacks)
            _enabled.append(self)
        self.write(recording)

    def write(self, recording: Recording) -> None:
        """Write where `recording` is. Without shared memory there is no page, and nothing to do."""
        if self._page is not None:
            at = recording.position
            moving = (at.forward, _NUMBER_OF[at.place], time.time(), recording.rank, recording.world_size)
            _MOVING.pack_into(self._page, 0, *moving, self.was_told, self._stacks is not None, at.last_backward)

    def close(self) -> None:
        """Let go of the file and of faulthandler. A second call does nothing."""
        if self in _enabled:
            faulthandler.disable()
            _enabled.remove(self)
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LastPosition:
    """Where a process that is gone was last.

    was_told     an incident in the same pass says why the process ends
    has_stacks   faulthandler wrote beside it, and not where the job had it write
    time         when it came there (ISO 8601, UTC)
    opened       when its recording began
    main_thread  its number in faulthandler's text
    trace_file   beginning of the name of NCCL's dump, if the job had set it
    """

    rank: int
    world_size: int
    was_told: bool
    has_stacks: bool
    forward: int | None
    last_backward: int | None
    place: TrainingPhase
    time: str
    opened: str
    main_thread: int | None
    trace_file: str | None


def read_position(directory: Path) -> LastPosition | None:
    """Read the position that a dead process left; None if there is none, or it is damaged."""
    try:
        data = (directory / POSITION_FILE).read_bytes()
        forward, number, seconds, rank, world_size, was_told, has_stacks, last_backward = _MOVING.unpack_from(data)
        facts: Mapping[str, Any] = json.loads(data[_MOVING.size :])
        return LastPosition(
            rank=rank,
            world_size=world_size,
            was_told=bool(was_told),
            has_stacks=bool(has_stacks),
            forward=forward if forward >= 0 else None,
            last_backward=last_backward if last_backward >= 0 else None,
            place=TRAINING_PHASES[number],
            time=datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds"),
            opened=str(facts["opened"]),
            main_thread=facts["main_thread"],
            trace_file=facts["trace_file"],
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error):
        return None


def _let_go_in_child() -> None:
    """Stop faulthandler in a child, such as a data loader: its crash is not this process's."""
    if _enabled:
        faulthandler.disable()
        _enabled.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
