"""Report signals and uncaught exceptions, which may end the process, and pass them on to the handlers before ours.

Python runs a signal's handler only once the main thread is back in the interpreter. A thread that waits in a collective
for a peer that is gone never comes back. So the signal's number also goes through a pipe (`signal.set_wakeup_fd`) to a
thread of this module. That thread reports the signal whatever the main thread does, and ends the process where the
signal's default action would have.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Protocol

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1)
# How long a signal waits for the disk.
MAX_SIGNAL_SECONDS = 10.0
# How long the main thread has to handle a signal, before the thread that reads the pipe ends the process.
HEAD_START_SECONDS = 2.0


class SignalReport:
    """One signal, which two threads may report: the one that reads the pipe, and the main thread if that is too slow.

    A listener writes it once. Its writer's thread decides, since either report may come late: the other thread may hold
    a lock that the report needs.
    """

    def __init__(self) -> None:
        # Set once the main thread no longer waits for the thread that reads the pipe.
        self.is_late = False
        self._written_by: list[object] = []

    def claim(self, listener: object) -> bool:
        """Tell a listener whether it is the first time that it writes this signal. For its writer's thread to call."""
        if any(other is listener for other in self._written_by):
            return False
        self._written_by.append(listener)
        return True


class IncidentListener(Protocol):
    """Gets signals and uncaught exceptions. Its methods do not raise."""

    def on_signal(self, number: int, report: SignalReport) -> None: ...

    def on_exception(self, error: BaseException, where: str) -> None: ...

    def flush(self, *, max_seconds: float) -> bool: ...


class _Handlers:
    """The signal handlers and exception hooks of this process, installed while there is a listener.

    previous  the handlers before ours, by the signal's number
    wakeup    both ends of the pipe, while it is in use
    reports   of signals that came through the pipe and are being reported
    reported  set while a signal has been reported to the listeners, but Python's handler has not run for it
    handled   set once Python's handler has run for a signal
    """

    def __init__(self) -> None:
        self.listeners: tuple[IncidentListener, ...] = ()
        self.process_id = os.getpid()
        self.previous: dict[int, Any] = {}
        self.previous_excepthook: Any = None
        self.previous_thread_excepthook: Any = None
        self.wakeup: tuple[int, int] | None = None
        self.reports: dict[int, SignalReport] = {}
        self.reported = {number: threading.Event() for number in SIGNALS}
        self.handled = {number: threading.Event() for number in SIGNALS}

    def install(self) -> None:
        self.previous_excepthook, sys.excepthook = sys.excepthook, _handle_exception
        self.previous_thread_excepthook, threading.excepthook = threading.excepthook, _handle_thread_exception
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            previous = signal.getsignal(number)
            # None is a handler written in C, which could not be called from ours.
            if previous is not None and previous != signal.SIG_IGN:
                self.previous[number] = signal.signal(number, _handle_signal)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        # Somebody else, such as asyncio, may have a pipe of their own here. Theirs stays.
        if (other := signal.set_wakeup_fd(writing, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(other)
            os.close(reading)
            os.close(writing)
            return
        self.wakeup = reading, writing
        threading.Thread(target=_read_signals, args=(reading,), name="capture-signals", daemon=True).start()

    def uninstall(self) -> None:
        """Restore what was there before.

        A handler that somebody has put on top of ours stays, and calls ours, which from then on only passes on.
        """
        if sys.excepthook is _handle_exception:
            sys.excepthook = self.previous_excepthook
        if threading.excepthook is _handle_thread_exception:
            threading.excepthook = self.previous_thread_excepthook
        if threading.current_thread() is not threading.main_thread():
            return
        for number in [number for number in self.previous if signal.getsignal(number) is _handle_signal]:
            signal.signal(number, self.previous.pop(number))
        if self.wakeup is not None:
            _, writing = self.wakeup
            self.wakeup = None
            if (current := signal.set_wakeup_fd(-1)) != writing:
                signal.set_wakeup_fd(current)
            # The reading thread sees the end of the pipe, ends, and closes its own end.
            os.close(writing)

    def has_wakeup_pipe(self) -> bool:
        """Tell whether signals still go through our pipe: the job may have put another one in its place."""
        if self.wakeup is None:
            return False
        # Python tells the current descriptor only when another one is set.
        current = signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)
        if current != self.wakeup[1]:
            signal.set_wakeup_fd(current)
        return current == self.wakeup[1]


_handlers = _Handlers()
_lock = threading.RLock()


def add_listener(listener: IncidentListener) -> bool:
    """Add a listener. Returns whether it gets signals too: it does if the first one was added in the main thread."""
    with _lock:
        if not _handlers.listeners:
            _handlers.install()
        _handlers.listeners = (*_handlers.listeners, listener)
        return bool(_handlers.previous)


def remove_listener(listener: IncidentListener) -> None:
    with _lock:
        remaining = tuple(other for other in _handlers.listeners if other is not listener)
        if _handlers.listeners and not remaining:
            _handlers.uninstall()
        _handlers.listeners = remaining


def _report_signal(number: int, report: SignalReport) -> None:
    for listener in _handlers.listeners:
        listener.on_signal(number, report)


def _flush_listeners() -> None:
    for listener in _handlers.listeners:
        listener.flush(max_seconds=MAX_SIGNAL_SECONDS)


def _handle_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal in the main thread: wait until it is reported and written, and pass it on.

    SIGUSR1 does not end the job, so it does not wait for the disk.
    """
    if os.getpid() == _handlers.process_id and _handlers.listeners:
        reported = _handlers.reported[signal.Signals(number)]
        _handlers.handled[signal.Signals(number)].set()
        # The thread that reads the pipe reports the signal; without the pipe, or if it takes too long, this one does.
        if not _handlers.has_wakeup_pipe():
            _report_signal(number, SignalReport())
        elif not reported.wait(MAX_SIGNAL_SECONDS):
            report = _handlers.reports.setdefault(number, SignalReport())
            report.is_late = True
            _report_signal(number, report)
        reported.clear()
        if number != signal.SIGUSR1:
            _flush_listeners()
    previous = _handlers.previous.get(number, signal.SIG_DFL)
    if callable(previous):
        previous(number, frame)
    elif number != signal.SIGUSR1:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _read_signals(reading: int) -> None:
    """Handle each signal whose number comes through the pipe, until the pipe is closed."""
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number in _handlers.previous:
                _handle_signal_in_thread(number)
    os.close(reading)


def _handle_signal_in_thread(number: int) -> None:
    """Report a signal, and end the process if the main thread does not come to it."""
    handled = _handlers.handled[signal.Signals(number)]
    report = _handlers.reports.setdefault(number, SignalReport())
    _report_signal(number, report)
    _handlers.reports.pop(number, None)
    # Set for nobody, it would let the main thread pass the next signal on before that is reported.
    if not report.is_late:
        _handlers.reported[signal.Signals(number)].set()
    if number == signal.SIGUSR1 or callable(_handlers.previous.get(number)):
        return
    _flush_listeners()
    if not handled.wait(HEAD_START_SECONDS):
        # The main thread is not in the interpreter, so this thread does what the signal's default action would. Python
        # sets handlers in the main thread alone, so it restores the default by C's `signal`.
        ctypes.CDLL(None).signal(number, 0)
        os.kill(os.getpid(), number)


def _handle_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _report_exception(error, "main thread")
    _handlers.previous_excepthook(kind, error, traceback)


def _handle_thread_exception(args: Any) -> None:
    if args.exc_value is not None:
        _report_exception(args.exc_value, "another thread")
    _handlers.previous_thread_excepthook(args)


def _report_exception(error: BaseException, where: str) -> None:
    if os.getpid() == _handlers.process_id:
        for listener in _handlers.listeners:
            listener.on_exception(error, where)


def _uninstall_in_child() -> None:
    """Restore the handlers in a forked child: its signals must not go through the pipe of its parent."""
    global _lock
    # A thread of the parent may have held the lock at the fork, and is not there to release it.
    _lock = threading.RLock()
    if _handlers.listeners:
        if _handlers.wakeup is not None:
            with contextlib.suppress(OSError):
                os.close(_handlers.wakeup[0])
        _handlers.uninstall()
    _handlers.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_uninstall_in_child)
