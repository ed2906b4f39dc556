"""Keep the position of a rank in shared memory, where it outlives whatever ends the process.

    /dev/shm/capture-<user>-<folder>-rank<r>-<process>/position      one page: a struct, then a JSON object
    /dev/shm/capture-<user>-<folder>-rank<r>-<process>/stacks.txt    what faulthandler writes at a crash

A change of position is a store into mapped memory, without a system call.
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
# The forward, the number of the phase, when this was written, rank, world size, was_reported, has_stacks,
# last_backward.
_POSITION = struct.Struct("<qqdqqqqq")
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(TRAINING_PHASES)}
# Environment variables that say where NCCL's flight recorder writes its dump.
_TRACE_FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# The page whose stacks file faulthandler writes to; at most one.
_pages_with_faulthandler: "list[PositionPage]" = []


class PositionPage:
    """A page in shared memory with this process's position. Any thread may write it.

    was_reported  an incident in this pass says already why the process ends
    """

    def __init__(self) -> None:
        self.was_reported = False
        self._page: mmap.mmap | None = None
        self._stacks: IO[bytes] | None = None

    def open(self, shared: SharedFolder, recording: Recording) -> None:
        """Make the page, and have faulthandler write beside it, unless the job uses that itself. Raises OSError."""
        facts = {
            "opened": recording.opened,
            "main_thread": threading.main_thread().ident,
            "trace_file": next((os.environ[name] for name in _TRACE_FILE_VARIABLES if name in os.environ), None),
        }
        path = shared.directory / POSITION_FILE
        path.write_bytes((bytes(_POSITION.size) + json.dumps(facts).encode()).ljust(PAGE_BYTES, b" "))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), PAGE_BYTES)
        if not faulthandler.is_enabled():
            self._stacks = (shared.directory / STACKS_FILE).open("wb")
            faulthandler.enable(self._stacks)
            _pages_with_faulthandler.append(self)
        self.write(recording)

    def write(self, recording: Recording) -> None:
        """Write where `recording` is. Without shared memory there is no page, and nothing to do."""
        if self._page is not None:
            position, has_stacks = recording.position, self._stacks is not None
            _POSITION.pack_into(
                self._page,
                0,
                position.forward,
                _PHASE_NUMBERS[position.phase],
                time.time(),
                recording.rank,
                recording.world_size,
                self.was_reported,
                has_stacks,
                position.last_backward,
            )

    def close(self) -> None:
        """Let go of the file and of faulthandler. A second call does nothing."""
        if self in _pages_with_faulthandler:
            faulthandler.disable()
            _pages_with_faulthandler.remove(self)
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LastPosition:
    """Where a process that is gone was last.

    was_reported an incident in the same pass says why the process ends
    has_stacks   faulthandler wrote beside it, and not where the job had it write
    time         when it entered the phase (ISO 8601, UTC)
    opened       when its recording began
    main_thread  the main thread's number in faulthandler's text
    trace_file   beginning of the path of NCCL's dump, if the job had set it
    """

    rank: int
    world_size: int
    was_reported: bool
    has_stacks: bool
    forward: int | None
    last_backward: int | None
    phase: TrainingPhase
    time: str
    opened: str
    main_thread: int | None
    trace_file: str | None


def read_position(directory: Path) -> LastPosition | None:
    """Read the position that a dead process left; None if there is none, or it is damaged."""
    try:
        data = (directory / POSITION_FILE).read_bytes()
        forward, number, seconds, rank, world_size, was_reported, has_stacks, last_backward = _POSITION.unpack_from(
            data
        )
        facts: Mapping[str, Any] = json.loads(data[_POSITION.size :])
        return LastPosition(
            rank=rank,
            world_size=world_size,
            was_reported=bool(was_reported),
            has_stacks=bool(has_stacks),
            forward=forward if forward >= 0 else None,
            last_backward=last_backward if last_backward >= 0 else None,
            phase=TRAINING_PHASES[number],
            time=datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds"),
            opened=str(facts["opened"]),
            main_thread=facts["main_thread"],
            trace_file=facts["trace_file"],
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error):
        return None


def _disable_in_child() -> None:
    """Stop faulthandler in a forked child, such as a data loader, whose crash is not this process's."""
    if _pages_with_faulthandler:
        faulthandler.disable()
        _pages_with_faulthandler.clear()


os.register_at_fork(after_in_child=_disable_in_child)
