"""Handle in a background thread what the job hands over. The job never waits: what does not fit is dropped.

The thread takes the interpreter from the job's thread while it works, and each waking of it costs the job a change of
threads. While a pass begins, a device that has done all before stands idle for as long. So the thread sleeps until it
is roused, as it is at the end of each forward: then the device has work, and the job's thread goes on to the backward
or to a wait for the device, which need no interpreter. What comes after that waits for the end of the next forward, or
for MAX_DELAY_SECONDS.
"""

import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from capture.file_format.micro_batch import CaptureError

MAX_QUEUED_BYTES = 2**30
_MAX_REMARKS_A_PASS = 4  # what may wait beside the passes
MAX_DELAY_SECONDS = 0.2  # that something waits for `rouse`

Item = TypeVar("Item")


class Deadline(Protocol):
    """A time limit that the thread keeps an eye on while nothing is handed over."""

    def seconds_left(self) -> float | None: ...


def warn(message: str) -> None:
    """Warn without raising, also in a job that turns warnings into errors."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        print(message, file=sys.stderr)


class BackgroundWriter(Generic[Item]):
    """Runs one daemon thread with a queue of at most `max_queued` passes and `max_queued_bytes` bytes.

    num_dropped  passes lost: the queue was full, `handle` refused the item (CaptureError), or writing stopped
    failure      why writing stopped: whatever else `handle` raised
    refusal      why `handle` refused the first pass that it refused
    is_urgent    set while something waits for the queue to be empty

    The thread calls `rest` when it has handled what it was roused for, `when_late` once `deadline` has no seconds left,
    and `finish` at its end, with whether it failed.
    The first failure of each kind is one warning; nothing is raised.
    """

    def __init__(
        self,
        handle: Callable[[Item], object],
        *,
        max_queued: int,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        rest: Callable[[], None] = lambda: None,
        finish: Callable[[bool], None] = lambda failed: None,
        is_urgent: threading.Event | None = None,
        deadline: Deadline | None = None,
        when_late: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_dropped = 0
        self.failure: Exception | None = None
        self.refusal: str | None = None
        self.is_urgent = is_urgent or threading.Event()
        self._handle = handle
        self._rest = rest
        self._finish = finish
        self._deadline = deadline
        self._when_late = when_late
        self._max_queued = max_queued
        self._max_queued_bytes = max_queued_bytes
        self._queue: deque[tuple[Item, int, bool]] = deque()
        self._num_ready = 0  # the first ones in the queue, which the thread may take now
        self._num_queued = 0
        self._num_queued_bytes = 0
        self._is_busy = False
        self._is_closing = False
        self._has_warned_of_full_queue = False
        self._changed = threading.Condition()  # re-entrant: a signal's handler may come in between
        self._thread = threading.Thread(target=self._run, name="capture-writer", daemon=True)
        self._thread.start()

    def offer(self, item: Item, num_bytes: int) -> bool:
        """Queue a pass, or drop it, without waiting. Returns whether it was queued."""
        with self._changed:
            is_full = (
                self._num_queued >= self._max_queued or self._num_queued_bytes + num_bytes > self._max_queued_bytes
            )
            if self.failure is None and not self._is_closing and not is_full:
                self._queue.append((item, num_bytes, True))
                self._num_queued += 1
                self._num_queued_bytes += num_bytes
                return True
            self.num_dropped += 1
            must_warn = is_full and self.failure is None and not self._has_warned_of_full_queue
            self._has_warned_of_full_queue |= must_warn
        if must_warn:
            warn(
                f"capture: the disk is slower than the job: {self._max_queued} passes or {self._max_queued_bytes} "
                "bytes are waiting. New passes are dropped and counted until there is room"
            )
        return False

    def tell(self, item: Item, *, is_urgent: bool = False) -> None:
        """Queue something other than a pass. What is not urgent waits for `rouse`, and is left out if the disk is far
        behind."""
        with self._changed:
            num_remarks = len(self._queue) - self._num_queued
            if self.failure is None and (is_urgent or num_remarks < _MAX_REMARKS_A_PASS * self._max_queued):
                self._queue.append((item, 0, False))
                if is_urgent:
                    self.is_urgent.set()
                    self._changed.notify_all()

    def rouse(self, then: Item | None = None) -> None:
        """Have the thread handle what is queued by now: the job's thread can do without the interpreter for a while.

        then  is queued behind that, as `tell` would
        """
        with self._changed:
            self._num_ready = len(self._queue)
            if then is not None:
                self.tell(then)
            if self._num_ready:
                self._changed.notify_all()

    def drop(self) -> None:
        """Count a pass that was not offered, because writing has stopped."""
        with self._changed:
            self.num_dropped += 1

    def drain(self, *, max_seconds: float) -> bool:
        """Wait until all that was handed over before is done. Returns False if it took longer."""
        deadline = time.monotonic() + max_seconds
        with self._changed:
            if self._queue or self._is_busy:
                self.is_urgent.set()
                self._changed.notify_all()
            while (self._queue or self._is_busy) and self.failure is None and self._thread.is_alive():
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    return False
            return True

    def stop(self, failure: Exception, num_lost: int = 0) -> None:
        """Give up for good, with one warning: what is queued, and what is still offered, is dropped."""
        with self._changed:
            self.num_dropped += num_lost + self._num_queued
            self._queue.clear()
            self._num_ready = 0
            self._num_queued = self._num_queued_bytes = 0
            is_first = self.failure is None
            self.failure = self.failure or failure
            self._changed.notify_all()
        if is_first:
            warn(
                f"capture stops, the job goes on: {type(failure).__name__}: {failure}. "
                "What was written before stays; passes after that are counted as dropped"
            )

    def close(self, *, max_seconds: float) -> None:
        """Handle what is queued and end the thread. After `max_seconds` the rest is given up."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(max_seconds)
        if self._thread.is_alive():
            self.stop(TimeoutError(f"writing was not finished {max_seconds:g} s after the end of the recording"))

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            self._do(*taken)
        try:
            self._finish(self.failure is not None)
        except Exception as error:  # no exception may reach the job
            self.stop(error)

    def _next(self) -> tuple[Item | None, bool] | None:
        """Wait for an item. Returns it and whether it is a pass; no item: the deadline has passed; None: the end."""
        with self._changed:
            self._is_busy = False
            while not self._num_ready:
                if not self._queue:
                    self.is_urgent.clear()
                    self._changed.notify_all()
                    if self._is_closing or self.failure is not None:
                        return None
                elif self.is_urgent.is_set() or self._is_closing:
                    self._num_ready = len(self._queue)
                    break
                seconds_left = None if self._deadline is None else self._deadline.seconds_left()
                if seconds_left == 0:
                    return None, False
                lull = MAX_DELAY_SECONDS if seconds_left is None else min(seconds_left, MAX_DELAY_SECONDS)
                if not self._changed.wait(lull):
                    self._num_ready = max(self._num_ready, len(self._queue))
            item, num_bytes, is_pass = self._queue.popleft()
            self._num_ready -= 1
            self._num_queued -= is_pass
            self._num_queued_bytes -= num_bytes
            self._is_busy = True
            return item, is_pass

    def _do(self, item: Item | None, is_pass: bool) -> None:
        try:
            if item is None:
                self._when_late()
            else:
                self._handle(item)
            if not self._num_ready:
                self._rest()
        except CaptureError as error:
            with self._changed:
                self.num_dropped += is_pass
            if is_pass and self.refusal is None:
                self.refusal = str(error)
                warn(f"capture: a pass that could not be replayed is dropped: {error}. Others like it are counted only")
        except Exception as error:  # no exception may reach the job
            self.stop(error, num_lost=int(is_pass))
