"""Find how much of a large allocation is resident: one that was given out and never written to takes no memory.

    with ResidencyReader(before_reading) as residency:
        ...
    residency.find_resident_bytes(address, num_bytes, begin, end, most)

glibc gives each allocation of at least LEAST_MAPPED_BYTES a mapping of its own, and Linux says how much of a mapping is
resident. A thread reads that again and again. On other systems nothing is read, and everything counts as resident.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

LEAST_MAPPED_BYTES = 32 * 2**20
# The time between two readings.
TICK_SECONDS = 0.02
KIBIBYTE = 1024


class MemoryMapping(NamedTuple):
    """A large mapping of the process at one time."""

    time: float  # seconds since the epoch
    begin: int
    end: int
    resident_bytes: int


class ResidencyReader:
    """Reads this process's large mappings, in a thread, while it is entered."""

    def __init__(self, before_reading: Callable[[], None], smaps: Path = Path("/proc/self/smaps")) -> None:
        """`before_reading` is called before each reading, in the thread."""
        self._before_reading = before_reading
        self._smaps = smaps
        self._readings: list[MemoryMapping] = []
        self._end_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replay-touched", daemon=True)

    def __enter__(self) -> Self:
        if self._smaps.exists():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_event.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        # The last reading comes after the end was told.
        is_ending = False
        while not is_ending:
            is_ending = self._end_event.wait(TICK_SECONDS)
            self._before_reading()
            self.read()

    def read(self) -> None:
        """Read once more, at once."""
        if self._smaps.exists():
            self._readings += parse_mappings(self._smaps.read_text(), time.time())

    def find_resident_bytes(self, address: int, num_bytes: int, begin: float, end: float, most: int) -> int:
        """Return how many bytes of an allocation were resident at most between two times.

        most  what it can have been at most; taken if it lived too short a time to be seen
        """
        if num_bytes < LEAST_MAPPED_BYTES:
            return num_bytes
        readings = [
            mapping
            for mapping in self._readings
            if begin <= mapping.time <= end and mapping.begin <= address < mapping.end
        ]
        return min(num_bytes, max((mapping.resident_bytes for mapping in readings), default=most))


def parse_mappings(smaps: str, time: float) -> list[MemoryMapping]:
    """Return the mappings of at least MAPPED bytes in the text of /proc/<pid>/smaps."""
    mappings: list[MemoryMapping] = []
    begin = end = 0
    for line in smaps.splitlines():
        if line.startswith("Rss:"):
            if end - begin >= LEAST_MAPPED_BYTES:
                mappings.append(MemoryMapping(time, begin, end, int(line.split()[1]) * KIBIBYTE))
        # A mapping begins with its addresses, `7f32-7f35 rw-p ...`. All other lines are names with a value.
        elif not line[0].isupper():
            begin, end = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
    return mappings
