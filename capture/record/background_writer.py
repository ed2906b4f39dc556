"""Write in a background thread what the job hands over. The job does not wait: what the queue cannot hold is dropped.

In this module an item is what is handed over: a pass, or something small, such as the outputs of a pass. The callback
`handle` deals with an item.

Only `drain` and `close` wait until what is queued has been handled, for at most `max_seconds`.

Python's GIL lets one thread run at a time. While this thread works, the job's own thread has to wait for its turn, and
each time this thread wakes up, the job pays for a change of threads. That costs most while a forward begins: a device
that has finished all earlier work stands idle until the job's thread gives it more. So this thread takes an item only
once it is ready, and the job makes all queued items ready when it calls `wake`, at the end of each forward. By then the
device has work. The job's thread goes on to the backward, or waits for the device, and needs little Python for either.
An item that is queued later becomes ready with the next call of `wake`, or after this thread has waited for that call
in vain, for at most MAX_DELAY_SECONDS.
"""

import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Generic, Literal, Protocol, TypeVar

from capture.file_format.micro_batch import CaptureError

MAX_QUEUED_BYTES = 2**30
MAX_DELAY_SECONDS = 0.2
# Items that are no passes, such as a pass's outputs or an optimizer step, are small: only their number is limited, not
# their bytes. For each pass that may wait, this many of them may wait.
_MAX_SMALL_ITEMS_PER_PASS = 4

ItemT = TypeVar("ItemT")


class _Sentinel(Enum):
    """What `_wait_for_work` returns when the deadline is reached. A type checker can tell an Enum from an item."""

    DEADLINE_REACHED = auto()


class Deadline(Protocol):
    """A deadline that the writer's thread watches while it waits.

    For example the moment by which the job's next forward has to begin (`slow_step`).
    """

    def seconds_left(self) -> float | None:
        """Return the seconds that are left, 0 once it is reached; None while there is no deadline.

        The writer's thread calls this while it holds the lock that the job's thread needs. So this must not wait.
        """


def warn(message: str) -> None:
    """Warn without raising, also in a job that turns warnings into errors."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        print(message, file=sys.stderr)


class BackgroundWriter(Generic[ItemT]):
    """Runs one daemon thread, which calls `handle` with each queued item, in order.

    At most `max_queued` passes wait, with at most `max_queued_bytes` bytes in all; a larger pass waits alone.

    num_dropped      passes dropped because the queue was full, because `handle` refused them (CaptureError) or failed,
                     because writing had stopped, or because `close` had been called. If writing stops while `handle`
                     works on a pass, that pass counts as dropped until `handle` returns, since it may never return
    failure          the exception that has stopped writing, or None
    refusal          why `handle` refused the first of the passes that it refused, or None
    flush_requested  an event, set by `drain` or an urgent item, and cleared when the queue is empty and the last item
                     has been handled. While it is set, the thread handles items without waiting for `wake`, and
                     `handle` may wait only briefly for tensors that are being copied from a device

    The thread calls these:

    * `on_idle`: after an item or `on_deadline`, unless another item is ready
    * `on_deadline`: when it waits and `deadline` is reached. It has to end or move the deadline: as long as
      `deadline.seconds_left()` returns 0, it is called again before the thread waits
    * `on_end`: as its last act. It is given True if writing has failed

    An exception from one of these callbacks, from `handle` or from `deadline` stops writing. Only a CaptureError with
    which `handle` refuses a pass does not: that pass alone is dropped.

    There is one warning for the first pass that a full queue drops, one for the first that `handle` refuses, and one
    for what stops writing. No method raises.
    """

    def __init__(
        self,
        handle: Callable[[ItemT], object],
        *,
        max_queued: int,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        on_idle: Callable[[], None] = lambda: None,
        on_end: Callable[[bool], None] = lambda failed: None,
        flush_requested: threading.Event | None = None,
        deadline: Deadline | None = None,
        on_deadline: Callable[[], None] = lambda: None,
    ) -> None:
        self.failure: Exception | None = None
        self.refusal: str | None = None
        self.flush_requested = flush_requested or threading.Event()
        self._handle = handle
        self._on_idle = on_idle
        self._on_end = on_end
        self._deadline = deadline
        self._on_deadline = on_deadline
        self._max_queued_passes = max_queued
        self._max_queued_bytes = max_queued_bytes
        # Each item with its size in bytes, and whether it is a pass. The thread may take the first `_num_ready` of
        # them. The others become ready with the next `wake`, with an urgent item, `drain` or `close`, or when the
        # thread has waited in vain.
        self._queue: deque[tuple[ItemT, int, bool]] = deque()
        self._num_ready = 0
        self._num_queued_passes = 0
        self._num_queued_bytes = 0
        self._num_dropped = 0
        # True from when the thread takes an item until it looks for the next one. So it is True during an `on_idle` in
        # between: `drain` waits for that too.
        self._has_unfinished_item = False
        # True from when the thread takes a pass until `handle` has returned or raised.
        self._is_handling_pass = False
        self._is_closing = False
        self._has_warned_of_full_queue = False
        # The lock is re-entrant. That is needed: a signal's handler may interrupt the job's thread while it holds the
        # lock, and queue an item itself. `queue_pass` takes the lock itself, not the Condition, whose functions are
        # Python's: it is called while a device may stand idle.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="capture-writer", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        with self._changed:
            return self._num_dropped + (self._is_handling_pass and self.failure is not None)

    def queue_pass(self, item: ItemT, num_bytes: int) -> bool:
        """Queue a pass, or drop it, without waiting. Returns whether it was queued."""
        with self._lock:
            # A pass larger than the queue may wait alone.
            num_bytes_then = self._num_queued_bytes + num_bytes
            has_room_for_bytes = not self._num_queued_bytes or num_bytes_then <= self._max_queued_bytes
            is_full = self._num_queued_passes >= self._max_queued_passes or not has_room_for_bytes
            if self.failure is None and not self._is_closing and not is_full:
                self._queue.append((item, num_bytes, True))
                self._num_queued_passes += 1
                self._num_queued_bytes += num_bytes
                return True
            self._num_dropped += 1
            must_warn = is_full and self.failure is None and not self._has_warned_of_full_queue
            self._has_warned_of_full_queue |= must_warn
        if must_warn:
            warn(
                f"capture: the disk is slower than the job: at most {self._max_queued_passes} passes may "
                f"wait, with at most {self._max_queued_bytes} bytes in all. New passes are dropped and counted until "
                "there is room"
            )
        return False

    def queue_small_item(self, item: ItemT, *, is_urgent: bool = False) -> None:
        """Queue an item that is no pass.

        An urgent item does not wait for `wake`; it is handled after all that was queued before it. Any other item waits
        for `wake` as a pass does, and is left out if too many are waiting. Once writing has stopped, every item is left
        out, without a count.
        """
        with self._changed:
            num_small_items = len(self._queue) - self._num_queued_passes
            has_room = num_small_items < _MAX_SMALL_ITEMS_PER_PASS * self._max_queued_passes
            if self.failure is None and (is_urgent or has_room):
                self._queue.append((item, 0, False))
                if is_urgent:
                    self.flush_requested.set()
                    self._changed.notify_all()

    def wake(self, later_item: ItemT | None = None) -> None:
        """Make ready what is queued by now, and wake the thread.

        Call this when the job's thread can do without Python for a while.

        later_item  a small item that this call queues, but does not make ready: the outputs of the forward that has
                    just ended, whose copy from the device has only begun
        """
        with self._changed:
            self._num_ready = len(self._queue)
            if later_item is not None:
                self.queue_small_item(later_item)
            if self._num_ready:
                self._changed.notify_all()

    def count_dropped_pass(self) -> None:
        """Count as dropped a pass that the caller does not queue, because writing has stopped."""
        with self._changed:
            self._num_dropped += 1

    def drain(self, *, max_seconds: float) -> bool:
        """Wait until all that is queued has been handled, and the `on_idle` after it has returned.

        Also ends when writing has failed or the thread has exited. Returns False if none of that comes within
        `max_seconds`.
        """
        drain_until = time.monotonic() + max_seconds
        with self._changed:
            if self._queue or self._has_unfinished_item:
                self.flush_requested.set()
                self._changed.notify_all()
            while (self._queue or self._has_unfinished_item) and self.failure is None and self._thread.is_alive():
                if not self._changed.wait(drain_until - time.monotonic()) and time.monotonic() >= drain_until:
                    return False
            return True

    def give_up(self, failure: Exception, num_not_queued: int = 0) -> None:
        """Stop writing for good, with one warning, and drop what is queued now and what comes later.

        num_not_queued  passes that the failure has kept out of the queue
        """
        with self._changed:
            self._num_dropped += num_not_queued + self._num_queued_passes
            self._queue.clear()
            self._num_ready = 0
            self._num_queued_passes = self._num_queued_bytes = 0
            is_first = self.failure is None
            self.failure = self.failure or failure
            self._changed.notify_all()
        if is_first:
            warn(
                f"capture stops, the job goes on: {type(failure).__name__}: {failure}. "
                "What was written before stays; passes after that are counted as dropped"
            )

    def close(self, *, max_seconds: float) -> None:
        """Handle what is queued and end the thread. What still waits in the queue after `max_seconds` is dropped."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(max_seconds)
        if self._thread.is_alive():
            self.give_up(TimeoutError(f"writing was not finished {max_seconds:g} s after the end of the recording"))

    def _run(self) -> None:
        while True:
            # An exception stops writing. After that `_wait_for_work` returns None.
            try:
                if (next_work := self._wait_for_work()) is None:
                    break
                self._handle_work(next_work)
            except Exception as error:
                self.give_up(error)
        # If `on_end` raises, the thread ends all the same. The job gets a warning, unless writing had stopped before.
        try:
            self._on_end(self.failure is not None)
        except Exception as error:
            self.give_up(error)

    def _wait_for_work(self) -> tuple[ItemT, bool] | Literal[_Sentinel.DEADLINE_REACHED] | None:
        """Wait for an item that is ready, for the deadline, or for the end: `close`, or that writing has stopped.

        Returns the item and whether it is a pass; DEADLINE_REACHED if that comes first; None at the end.
        """
        with self._changed:
            self._has_unfinished_item = False
            while not self._num_ready:
                if not self._queue:
                    # Whoever waits in `drain` waits for this moment.
                    self.flush_requested.clear()
                    self._changed.notify_all()
                    if self._is_closing or self.failure is not None:
                        return None
                elif self.flush_requested.is_set() or self._is_closing:
                    self._num_ready = len(self._queue)
                    break
                seconds_left = None if self._deadline is None else self._deadline.seconds_left()
                if seconds_left == 0:
                    return _Sentinel.DEADLINE_REACHED
                max_seconds = MAX_DELAY_SECONDS if seconds_left is None else min(seconds_left, MAX_DELAY_SECONDS)
                was_woken = self._changed.wait(max_seconds)
                if not was_woken:
                    # Timed out, perhaps early because of a deadline: handle what is queued without a `wake`.
                    self._num_ready = len(self._queue)
            item, num_bytes, is_pass = self._queue.popleft()
            self._num_ready -= 1
            self._num_queued_passes -= is_pass
            self._num_queued_bytes -= num_bytes
            self._has_unfinished_item, self._is_handling_pass = True, is_pass
            return item, is_pass

    def _handle_work(self, next_work: tuple[ItemT, bool] | Literal[_Sentinel.DEADLINE_REACHED]) -> None:
        """Handle an item, or a deadline that is reached."""
        if next_work is _Sentinel.DEADLINE_REACHED:
            self._on_deadline()
        else:
            self._handle_item(*next_work)
        if not self._num_ready:
            self._on_idle()

    def _handle_item(self, item: ItemT, is_pass: bool) -> None:
        """Handle an item, and count a pass that `handle` refuses or fails at."""
        # A pass is counted as dropped, below, unless `handle` returns without an error.
        is_dropped_pass = is_pass
        try:
            self._handle(item)
            is_dropped_pass = False
        except CaptureError as error:
            if not is_pass:
                raise
            if self.refusal is None:
                self.refusal = str(error)
                warn(
                    f"capture: a pass cannot be kept and is dropped: {error}. Further such passes are counted "
                    "without a warning"
                )
        finally:
            with self._changed:
                self._is_handling_pass = False
                self._num_dropped += is_dropped_pass
