"""A signal is written once, whichever threads report it."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from capture.black_box import signal_handlers
from capture.black_box.signal_handlers import SignalReport, add_listener, remove_listener


class SlowListener:
    """Holds up the thread that reads the pipe until the main thread has reported the signal itself."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.num_reports = 0
        self.main_has_reported = threading.Event()
        self.pipe_has_reported = threading.Event()

    def on_signal(self, number: int, report: SignalReport) -> None:
        self.num_reports += 1
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main:
            assert self.main_has_reported.wait(60)
        if report.claim(self):
            self.written.append(number)
        (self.main_has_reported if is_main else self.pipe_has_reported).set()

    def on_exception(self, error: BaseException, where: str) -> None: ...

    def flush(self, *, max_seconds: float) -> bool:
        return True


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowListener]:
    monkeypatch.setattr(signal_handlers, "MAX_SIGNAL_SECONDS", 0.01)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    listener = SlowListener()
    add_listener(listener)
    yield listener
    remove_listener(listener)
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_both_threads_report_is_written_once(listener: SlowListener) -> None:
    for number_of_signals in (1, 2):
        listener.main_has_reported.clear()
        listener.pipe_has_reported.clear()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.main_has_reported.wait(60)
        assert listener.pipe_has_reported.wait(60)
        assert listener.num_reports == 2 * number_of_signals
        assert listener.written == [signal.SIGUSR1] * number_of_signals
