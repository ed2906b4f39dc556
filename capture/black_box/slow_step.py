"""Notice a step that takes many times the median, or more than so many seconds, also one that never ends."""

import time
from collections import deque
from statistics import median

_NUM_REMEMBERED = 64
_MIN_REMEMBERED = 8  # steps before a median means something: the first ones compile and allocate


class StepWatch:
    """Times steps, each from one forward to the next, and compares them with the median, or with a limit in seconds.

    A median needs eight steps; a limit holds from the first one.

    `begin` belongs to the job's thread, the rest to the writer's. There is no lock: a signal's handler may stop the
    job's thread anywhere and wait for the writer's.
    """

    def __init__(self, factor: float | None = None, *, max_seconds: float | None = None) -> None:
        self._factor = factor
        self._max_seconds = max_seconds
        self._seconds: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._running: tuple[int, float, float | None] | None = None  # forward, when it began, how long it may take
        self._late: deque[tuple[int, float, float]] = deque()
        self._told: int | None = None

    def begin(self, forward: int) -> bool:
        """Begin a step. Returns whether `take` has something: the step before this one was too slow."""
        now = time.monotonic()
        if self._running is not None:
            before, began, limit = self._running
            if limit is not None and now - began > limit:
                self._late.append((before, now - began, limit))
            self._seconds.append(now - began)
        self._running = forward, now, self._limit()
        return bool(self._late)

    def _limit(self) -> float | None:
        if self._max_seconds is not None:
            return self._max_seconds
        if self._factor is None or len(self._seconds) < _MIN_REMEMBERED:
            return None
        return self._factor * median(self._seconds)

    def seconds_left(self) -> float | None:
        """Return how long the running step may still take; None if there is no limit yet, or it was reported."""
        running = self._running
        if running is None or running[2] is None or running[0] == self._told:
            return None
        return max(0.0, running[1] + running[2] - time.monotonic())

    def take(self) -> tuple[int, str] | None:
        """Return the forward that began a slow step, and a message; each step once."""
        if (running := self._running) is not None and running[2] is not None:
            seconds = time.monotonic() - running[1]
            if seconds >= running[2]:
                self._late.append((running[0], seconds, running[2]))
        while self._late:
            forward, seconds, limit = self._late.popleft()
            if forward != self._told:
                self._told = forward
                of = "the limit is" if self._factor is None else f"{self._factor:g} times the median are"
                return forward, f"{seconds:.3g} s and more; {of} {limit:.3g} s"
        return None
