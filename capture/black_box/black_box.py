"""Write what a recording holds, and what happened, when the job fails, hangs, slows down or dies."""

import math
import signal
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from capture.black_box import flight_recorder
from capture.black_box.flight_recorder import SharedFolder, Spool
from capture.black_box.incidents import (
    Incident,
    add_position,
    describe_exception,
    is_first_report,
    make_incident,
    write_incidents,
)
from capture.black_box.position_page import PositionPage
from capture.black_box.salvage import salvage
from capture.black_box.signal_handlers import add_listener, remove_listener
from capture.file_format.capture_file import EncodedCall
from capture.file_format.manifest import format_stamp
from capture.file_format.tensor_codec import Output
from capture.record.background_writer import warn
from capture.record.observer import Observer, Recording
from capture.record.retention import RetentionSettings

_NUM_REMEMBERED = 64
_MIN_REMEMBERED = 8  # steps before a median means something: the first ones compile and allocate
MAX_INCIDENTS_OF_A_KIND = 8  # a job that goes on after each would fill the disk
MAX_SIGNALS_OF_A_KIND = 64
_CHECKED = {"loss": "loss", "noted_loss": "loss", "grad_norm": "grad_norm"}


class SlowStepWatch:
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


class BlackBox(Observer):
    """Watches one recording.

    Its position, and the flight recorder's passes, are in shared memory too, where they outlive the process. An
    incident (an exception, a signal, a number that is not finite, a slow step) writes the passes that are held.

    hears_signals  False where the recording was opened outside the main thread: Python handles signals in that alone
    """

    def __init__(self, folder: Path, keep: RetentionSettings) -> None:
        self.hears_signals = False
        self._folder = folder
        self._keep = keep
        self._watch = SlowStepWatch(keep.slow_step, max_seconds=keep.slow_seconds)
        self._page = PositionPage()
        self._shared: SharedFolder | None = None
        self._spool: Spool | None = None
        self._to_spool: dict[int, EncodedCall] = {}  # by number of the forward: it is not there as it is now
        self._wants_spool = keep.flight_recorder is not None and flight_recorder.SHARED_MEMORY.is_dir()
        self._incidents: list[Incident] = []
        self._num_by_kind: Counter[tuple[str, str]] = Counter()
        self._num_other_incidents = 0
        self._num_not_copied = 0
        self._not_finite: tuple[int, str] | None = None  # the latest that was told

    # in the job's thread

    def on_open(self, recording: Recording) -> None:
        self._recording = recording
        if flight_recorder.SHARED_MEMORY.is_dir():
            with suppress(OSError):
                self._shared = SharedFolder(self._folder, recording.rank)
                self._page.open(self._shared, recording)

    def on_attach(self) -> None:
        self.hears_signals = add_listener(self)

    def on_move(self) -> None:
        position = self._recording.position
        begins = position.place == "in forward"
        if begins:
            self._page.was_told = False
        self._page.write(self._recording)
        if begins and self._watch.begin(position.forward):
            self.on_deadline()

    def on_error(self, error: BaseException, where: str) -> None:
        self.hear_exception(error, where)

    def on_close(self) -> None:
        self._page.close()
        remove_listener(self)

    # in the thread that a signal or an exception comes to

    def hear_signal(self, number: int) -> None:
        self._tell(make_incident("signal", signal.Signals(number).name, self._forward))

    def hear_exception(self, error: BaseException, where: str) -> None:
        is_ordinary = isinstance(error, SystemExit) or (isinstance(error, KeyboardInterrupt) and self.hears_signals)
        if not is_ordinary and is_first_report(id(self), error):
            self._tell(describe_exception(error, where, self._forward))

    def flush(self, *, max_seconds: float) -> bool:
        return self._recording.flush(max_seconds=max_seconds)

    def _tell(self, happened: Incident) -> None:
        with suppress(Exception):  # an incident without its stacks is better than none
            happened = add_position(happened, self._recording)
        self._page.was_told = happened.ends_job
        self._page.write(self._recording)
        self._recording.do_in_writer(partial(self._write, happened))

    @property
    def _forward(self) -> int | None:
        forward = self._recording.position.forward
        return forward if forward >= 0 else None

    # in the writer's thread

    def seconds_left(self) -> float | None:
        return self._watch.seconds_left()

    def on_deadline(self) -> None:
        while (late := self._watch.take()) is not None:
            self._tell(make_incident("slow step", "step", late[0], late[1]))

    def on_settle(self) -> None:
        salvage(self._folder, self._keep)

    def on_hold(self, encoded: EncodedCall) -> None:
        if self._wants_spool:
            self._to_spool[encoded.step] = encoded

    def on_release(self, encoded: EncodedCall) -> None:
        self._to_spool.pop(encoded.step, None)
        try:
            if self._spool is not None:
                self._spool.remove(encoded)
        except OSError as error:
            self._do_without_spool(error)

    def on_idle(self) -> None:
        """Put what came since the last time into shared memory."""
        while self._to_spool and self._wants_spool:
            encoded = self._to_spool.pop(next(iter(self._to_spool)))
            try:
                if self._shared is None:
                    self._shared = SharedFolder(self._folder, self._recording.place[0])
                if self._spool is None:
                    self._spool = Spool(self._shared)
                self._spool.put(encoded)
            except OSError as error:
                self._do_without_spool(error)

    def on_numbers(self, forward: int, numbers: Mapping[str, Output]) -> None:
        for kept_as, name in _CHECKED.items():
            value = numbers.get(kept_as)
            if isinstance(value, float) and not math.isfinite(value) and (forward, kept_as) != self._not_finite:
                self._not_finite = forward, kept_as
                self._write(make_incident("not finite", name, forward, f"{name} is {value}"))

    def on_lost_copy(self) -> None:
        self._num_not_copied += 1

    def on_end(self, failed: bool) -> None:
        """End the black box. The flight recorder's passes are gone with it: no incident asked for them."""
        try:
            if not failed:
                self._write_incidents()
        finally:
            if self._shared is not None:
                self._shared.close()

    def _write(self, happened: Incident) -> None:
        """Write the passes that are held, and the incident beside them."""
        kind = happened.what, happened.where
        self._num_by_kind[kind] += 1
        if self._num_by_kind[kind] > (MAX_SIGNALS_OF_A_KIND if happened.is_signal else MAX_INCIDENTS_OF_A_KIND):
            self._num_other_incidents += 1
            return
        names = [path.name for path in self._recording.write_held()]
        self._incidents.append(replace(happened, files=names, num_not_copied=self._num_not_copied))
        self._num_not_copied = 0
        self._write_incidents()
        self._recording.commit()

    def _write_incidents(self) -> None:
        if self._incidents:
            rank, home = self._recording.place
            write_incidents(
                home,
                self._incidents,
                num_others=self._num_other_incidents,
                rank=rank,
                stamp=format_stamp(self._recording.opened),
            )

    def _do_without_spool(self, error: OSError) -> None:
        if self._spool is not None:
            self._spool.close()
        self._spool, self._wants_spool = None, False
        self._to_spool.clear()
        warn(
            f"capture: a flight recorder that outlives SIGKILL needs {flight_recorder.SHARED_MEMORY}: {error}. "
            "The flight recorder is in this process's memory alone"
        )
