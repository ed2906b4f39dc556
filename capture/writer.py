"""Writes in the background what the job hands over, and never makes the job wait: what does not fit is dropped."""

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from capture.micro_batch import CaptureError

MAX_QUEUED_BYTES = 2**30

Item = TypeVar("Item")


def warn(message: str) -> None:
    """A warning that does not raise where the job turns warnings into errors."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        print(message, file=sys.stderr)


class BackgroundWriter(Generic[Item]):
    """One daemon thread, a queue of at most `max_queued` items and `max_queued_bytes` bytes.

    num_written  items that `write` took
    num_dropped  items that it did not: the queue was full, `write` refused the item (CaptureError), or writing stopped
    failure      why writing stopped: whatever else `write` raised

    The first of each kind of trouble is one warning; nothing is raised.
    """

    def __init__(
        self, write: Callable[[Item], object], *, max_queued: int, max_queued_bytes: int = MAX_QUEUED_BYTES
    ) -> None:
        self.num_written = 0
        self.num_dropped = 0
        self.failure: Exception | None = None
        self._write = write
        self._max_queued = max_queued
        self._max_queued_bytes = max_queued_bytes
        self._queue: deque[tuple[Item, int]] = deque()
        self._num_queued_bytes = 0
        self._is_closing = False
        self._has_warned_of_full_queue = False
        self._has_warned_of_refusal = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="capture-writer", daemon=True)
        self._thread.start()

    def offer(self, item: Item, num_bytes: int) -> None:
        """Queues the item or drops it, at once."""
        with self._changed:
            is_full = (
                len(self._queue) >= self._max_queued or self._num_queued_bytes + num_bytes > self._max_queued_bytes
            )
            if self.failure is None and not self._is_closing and not is_full:
                self._queue.append((item, num_bytes))
                self._num_queued_bytes += num_bytes
                self._changed.notify()
                return
            self.num_dropped += 1
            must_warn = is_full and self.failure is None and not self._has_warned_of_full_queue
            self._has_warned_of_full_queue |= must_warn
        if must_warn:
            warn(
                f"capture: the disk is slower than the job: {self._max_queued} passes or {self._max_queued_bytes} "
                "bytes are waiting. New passes are dropped and counted until there is room"
            )

    def drop(self) -> None:
        """Counts an item that was not worth offering, because writing has stopped."""
        with self._changed:
            self.num_dropped += 1

    def stop(self, failure: Exception, num_lost: int = 0) -> None:
        """Gives up for good: what is queued, and what is still offered, is dropped. Warns once."""
        with self._changed:
            self.num_dropped += num_lost + len(self._queue)
            self._queue.clear()
            self._num_queued_bytes = 0
            is_first = self.failure is None
            self.failure = self.failure or failure
            self._changed.notify()
        if is_first:
            warn(
                f"capture stops, the job goes on: {type(failure).__name__}: {failure}. "
                f"{self.num_written} passes were written; those after them are counted as dropped"
            )

    def close(self, *, max_seconds: float) -> None:
        """Writes what is queued and ends the thread. A disk that takes longer than `max_seconds` is given up."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max_seconds)
        if self._thread.is_alive():
            self.stop(TimeoutError(f"writing was not finished {max_seconds:g} s after the end of the recording"))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing or self.failure)
                if not self._queue:
                    return
                item, num_bytes = self._queue.popleft()
                self._num_queued_bytes -= num_bytes
            self._write_one(item)

    def _write_one(self, item: Item) -> None:
        try:
            self._write(item)
        except CaptureError as error:
            with self._changed:
                self.num_dropped += 1
            if not self._has_warned_of_refusal:
                self._has_warned_of_refusal = True
                warn(f"capture: a pass that could not be replayed is dropped: {error}. Others like it are counted only")
        except Exception as error:  # whatever it is, it is not the job's
            self.stop(error, num_lost=1)
        else:
            with self._changed:
                self.num_written += 1
