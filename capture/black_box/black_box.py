"""Write what a recording holds, and what happened, when the job fails, hangs, slows down or dies."""

import math
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
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
from capture.black_box.signal_handlers import SignalReport, add_listener, remove_listener
from capture.file_format.capture_file import EncodedCall
from capture.file_format.manifest import format_stamp
from capture.file_format.tensor_codec import Output
from capture.record.background_writer import warn
from capture.record.observer import Recording, RecordingObserver
from capture.record.retention import RetentionSettings

_NUM_STEPS_REMEMBERED = 64
# The first steps compile and allocate: a median of fewer steps than this says nothing.
_MIN_STEPS_FOR_MEDIAN = 8
# A job that goes on after each incident would fill the disk.
MAX_INCIDENTS_PER_KIND = 8
MAX_SIGNALS_PER_KIND = 64
# Outputs that must be finite, and what an incident calls them.
_CHECKED_OUTPUTS = {"loss": "loss", "noted_loss": "loss", "grad_norm": "grad_norm"}


@dataclass(frozen=True, slots=True)
class _RunningStep:
    """A step that has begun, with the seconds that it may take; None without a limit."""

    forward: int
    began: float
    max_seconds: float | None


class SlowStepWatch:
    """Times steps, each from one forward to the next, and compares them with the median, or with a limit in seconds.

    A median needs eight steps; a limit holds from the first one.

    has_limit  False: no step is slow, and none needs to be timed

    `begin_step` belongs to the job's thread and `seconds_left` to the writer's; both call `pop_slow_step`. There is no
    lock: a signal's handler may stop the job's thread anywhere, and wait for the writer's.
    """

    def __init__(
        self,
        factor: float | None = None,
        *,
        max_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._factor = factor
        self._max_seconds = max_seconds
        self.has_limit = factor is not None or max_seconds is not None
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS_REMEMBERED)
        self._running: _RunningStep | None = None
        # Steps that took too long and have ended: the forward, the seconds that it took and those that it had.
        self._slow_steps: deque[tuple[int, float, float]] = deque()
        self._reported_forward: int | None = None

    def begin_step(self, forward: int) -> bool:
        """Begin a step. Returns whether `pop_slow_step` has something: the step before this one was too slow."""
        now = self._clock()
        if (previous := self._running) is not None:
            seconds = now - previous.began
            if previous.max_seconds is not None and seconds > previous.max_seconds:
                self._slow_steps.append((previous.forward, seconds, previous.max_seconds))
            self._seconds.append(seconds)
        self._running = _RunningStep(forward, now, self._choose_limit())
        return bool(self._slow_steps)

    def _choose_limit(self) -> float | None:
        if self._max_seconds is not None:
            return self._max_seconds
        if self._factor is None or len(self._seconds) < _MIN_STEPS_FOR_MEDIAN:
            return None
        return self._factor * median(self._seconds)

    def seconds_left(self) -> float | None:
        """Return how long the running step may still take; None if there is no limit yet, or it was reported."""
        running = self._running
        if running is None or running.max_seconds is None or running.forward == self._reported_forward:
            return None
        return max(0.0, running.began + running.max_seconds - self._clock())

    def pop_slow_step(self) -> tuple[int, str] | None:
        """Return the forward that began a slow step, and a message. Each step is returned once."""
        if (running := self._running) is not None and running.max_seconds is not None:
            seconds = self._clock() - running.began
            if seconds >= running.max_seconds:
                self._slow_steps.append((running.forward, seconds, running.max_seconds))
        while True:
            # The job's thread and the writer's both come here, and the other may take the last step meanwhile.
            try:
                forward, seconds, limit = self._slow_steps.popleft()
            except IndexError:
                return None
            if forward != self._reported_forward:
                self._reported_forward = forward
                limit_name = "the limit is" if self._factor is None else f"{self._factor:g} times the median are"
                return forward, f"{seconds:.3g} s and more; {limit_name} {limit:.3g} s"


class BlackBox(RecordingObserver):
    """Watches one recording.

    The recording's position and the flight recorder's passes are kept in shared memory too, where they outlive the
    process. An incident (an exception, a signal, a number that is not finite, a slow step) writes the passes that are
    held.

    handles_signals  False where the recording was opened outside the main thread: Python handles signals only there
    """

    def __init__(self, folder: Path, retention: RetentionSettings) -> None:
        self.handles_signals = False
        self._folder = folder
        self._retention = retention
        self._step_watch = SlowStepWatch(retention.slow_step, max_seconds=retention.slow_seconds)
        self._position_page = PositionPage()
        self._shared: SharedFolder | None = None
        self._spool: Spool | None = None
        # Passes that are not in the spool yet, or not as they are now, by number of the forward.
        self._unspooled: dict[int, EncodedCall] = {}
        self._uses_spool = retention.flight_recorder is not None and flight_recorder.SHARED_MEMORY.is_dir()
        self._incidents: list[Incident] = []
        self._num_by_kind: Counter[tuple[str, str]] = Counter()
        self._num_other_incidents = 0
        self._num_not_copied = 0
        # The forward and the name of the latest number that was reported as not finite.
        self._last_not_finite: tuple[int, str] | None = None

    # The job's thread calls these.

    def on_open(self, recording: Recording) -> None:
        self._recording = recording
        if flight_recorder.SHARED_MEMORY.is_dir():
            with suppress(OSError):
                self._shared = SharedFolder(self._folder, recording.rank)
                self._position_page.open(self._shared, recording)

    def on_attach(self) -> None:
        self.handles_signals = add_listener(self)

    def on_position_change(self) -> None:
        position = self._recording.position
        begins_pass = position.phase == "in forward"
        if begins_pass:
            self._position_page.was_reported = False
        self._position_page.write(self._recording)
        if begins_pass and self._step_watch.has_limit and self._step_watch.begin_step(position.forward):
            self.on_deadline()

    def on_error(self, error: BaseException, where: str) -> None:
        self.on_exception(error, where)

    def on_close(self) -> None:
        self._position_page.close()
        remove_listener(self)

    # The signal handlers and exception hooks call these, in any thread.

    def on_signal(self, number: int, report: SignalReport) -> None:
        self._report(make_incident("signal", signal.Signals(number).name, self._forward), report)

    def on_exception(self, error: BaseException, where: str) -> None:
        is_ordinary = isinstance(error, SystemExit) or (isinstance(error, KeyboardInterrupt) and self.handles_signals)
        if not is_ordinary and is_first_report(id(self), error):
            self._report(describe_exception(error, where, self._forward))

    def flush(self, *, max_seconds: float) -> bool:
        return self._recording.flush(max_seconds=max_seconds)

    def _report(self, incident: Incident, report: SignalReport | None = None) -> None:
        """Have the writer's thread write an incident that happens now; `report` is that of a signal."""
        # Reading stacks and collectives may fail. An incident without them is better than none.
        with suppress(Exception):
            incident = add_position(incident, self._recording)
        self._position_page.was_reported = incident.ends_job
        self._position_page.write(self._recording)
        self._recording.run_in_writer(partial(self._write, incident, report))

    @property
    def _forward(self) -> int | None:
        forward = self._recording.position.forward
        return forward if forward >= 0 else None

    # The writer's thread calls these. The job's thread calls `on_deadline` too, when a step that was slow has ended.

    def seconds_left(self) -> float | None:
        return self._step_watch.seconds_left()

    def on_deadline(self) -> None:
        while (slow_step := self._step_watch.pop_slow_step()) is not None:
            forward, message = slow_step
            self._report(make_incident("slow step", "step", forward, message))

    def on_new_rank_folder(self) -> None:
        salvage(self._folder, self._retention)

    def on_hold(self, encoded: EncodedCall) -> None:
        if self._uses_spool:
            self._unspooled[encoded.step] = encoded

    def on_release(self, encoded: EncodedCall) -> None:
        self._unspooled.pop(encoded.step, None)
        try:
            if self._spool is not None:
                self._spool.remove(encoded)
        except OSError as error:
            self._give_up_spool(error)

    def on_idle(self) -> None:
        """Put the passes that came or changed since the last time into shared memory."""
        while self._unspooled and self._uses_spool:
            encoded = self._unspooled.pop(next(iter(self._unspooled)))
            try:
                if self._shared is None:
                    self._shared = SharedFolder(self._folder, self._recording.rank_and_folder[0])
                if self._spool is None:
                    self._spool = Spool(self._shared)
                self._spool.put(encoded)
            except OSError as error:
                self._give_up_spool(error)

    def on_outputs(self, forward: int, outputs: Mapping[str, Output]) -> None:
        for output_name, name in _CHECKED_OUTPUTS.items():
            value, key = outputs.get(output_name), (forward, output_name)
            if isinstance(value, float) and not math.isfinite(value) and key != self._last_not_finite:
                self._last_not_finite = key
                self._write(make_incident("not finite", name, forward, f"{name} is {value}"))

    def on_lost_copy(self) -> None:
        self._num_not_copied += 1

    def on_end(self, failed: bool) -> None:
        """End the black box. The passes in shared memory are deleted: no incident asked for them."""
        try:
            if not failed:
                self._write_incidents()
        finally:
            if self._shared is not None:
                self._shared.close()

    def _write(self, incident: Incident, report: SignalReport | None = None) -> None:
        """Write the passes that are held, and the incident beside them."""
        if report is not None and not report.claim(self):
            return
        kind = incident.what, incident.where
        self._num_by_kind[kind] += 1
        if self._num_by_kind[kind] > (MAX_SIGNALS_PER_KIND if incident.is_signal else MAX_INCIDENTS_PER_KIND):
            self._num_other_incidents += 1
            return
        names = [path.name for path in self._recording.write_held()]
        self._incidents.append(replace(incident, files=names, num_not_copied=self._num_not_copied))
        self._num_not_copied = 0
        self._write_incidents()
        self._recording.commit()

    def _write_incidents(self) -> None:
        if self._incidents:
            rank, rank_folder = self._recording.rank_and_folder
            write_incidents(
                rank_folder,
                self._incidents,
                num_others=self._num_other_incidents,
                rank=rank,
                stamp=format_stamp(self._recording.opened),
            )

    def _give_up_spool(self, error: OSError) -> None:
        if self._spool is not None:
            self._spool.close()
        self._spool, self._uses_spool = None, False
        self._unspooled.clear()
        warn(
            f"capture: a flight recorder that outlives SIGKILL needs {flight_recorder.SHARED_MEMORY}: {error}. "
            "The flight recorder is in this process's memory alone"
        )
