"""See how much of a large allocation is resident: one that was given out and never written to takes no memory.

    with Touched(before_each) as touched:
        ...
    touched.bytes_of(address, num_bytes, begin, end, most)

glibc maps what is at least MAPPED bytes by itself, and Linux says how much of each mapping is resident. A thread reads
that again and again. Elsewhere nothing is read, and everything counts as touched.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

MAPPED = 32 * 2**20
TICK_SECONDS = 0.02  # between two readings
KIBIBYTE = 1024


class Mapping(NamedTuple):
    """A large mapping of the process at one time."""

    time: float  # seconds since the epoch
    begin: int
    end: int
    resident_bytes: int


class Touched:
    """Reads this process's large mappings, in a thread, while it is entered."""

    def __init__(self, before_each: Callable[[], None], smaps: Path = Path("/proc/self/smaps")) -> None:
        """`before_each` is called before each reading, in the thread."""
        self._before_each = before_each
        self._smaps = smaps
        self._seen: list[Mapping] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replay-touched", daemon=True)

    def __enter__(self) -> Self:
        if self._smaps.exists():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        ends = False
        while not ends:  # and once more at the end
            ends = self._ends.wait(TICK_SECONDS)
            self._before_each()
            self.now()

    def now(self) -> None:
        """Read once more, at once."""
        if self._smaps.exists():
            self._seen += mappings_in(self._smaps.read_text(), time.time())

    def bytes_of(self, address: int, num_bytes: int, begin: float, end: float, most: int) -> int:
        """Return how many bytes of an allocation were resident at most between two times.

        most  what it can have been at most; taken if it lived too short a time to be seen
        """
        if num_bytes < MAPPED:
            return num_bytes
        seen = [one for one in self._seen if begin <= one.time <= end and one.begin <= address < one.end]
        return min(num_bytes, max((one.resident_bytes for one in seen), default=most))


def mappings_in(smaps: str, at: float) -> list[Mapping]:
    """Return the mappings of at least MAPPED bytes in the text of /proc/<pid>/smaps."""
    found: list[Mapping] = []
    begin = end = 0
    for line in smaps.splitlines():
        if line.startswith("Rss:"):
            if end - begin >= MAPPED:
                found.append(Mapping(at, begin, end, int(line.split()[1]) * KIBIBYTE))
        elif not line[0].isupper():  # `7f32-7f35 rw-p ...`; all other lines are names with a value
            begin, end = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
    return found
