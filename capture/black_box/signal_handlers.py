"""Listen to signals and uncaught exceptions, which may end the process, and pass them on to earlier handlers.

Python runs a signal's handler only once the main thread is back in the interpreter, and a thread that waits in a
collective for a peer that is gone never is. So the signal's number also goes through a pipe
(`signal.set_wakeup_fd`) to a thread of this module, which acts on it whatever the main thread does, and ends the
process where the signal's default action would have.
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
MAX_SIGNAL_SECONDS = 10.0  # that a signal waits for the disk
HEAD_START_SECONDS = 2.0  # for the main thread to handle a signal itself


class IncidentListener(Protocol):
    """Is told of signals and exceptions. Its methods do not raise."""

    def hear_signal(self, number: int) -> None: ...

    def hear_exception(self, error: BaseException, where: str) -> None: ...

    def flush(self, *, max_seconds: float) -> bool: ...


class _Handlers:
    """The signal handlers and exception hooks of this process while somebody listens."""

    def __init__(self) -> None:
        self.listeners: tuple[IncidentListener, ...] = ()
        self.process = os.getpid()
        self.previous: dict[int, Any] = {}
        self.previous_excepthook: Any = None
        self.previous_thread_excepthook: Any = None
        self.wakeup: tuple[int, int] | None = None
        self.heard = {number: threading.Event() for number in SIGNALS}
        self.handled = {number: threading.Event() for number in SIGNALS}

    def install(self) -> None:
        self.previous_excepthook, sys.excepthook = sys.excepthook, _excepthook
        self.previous_thread_excepthook, threading.excepthook = threading.excepthook, _thread_excepthook
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            previous = signal.getsignal(number)
            if previous is not None and previous != signal.SIG_IGN:  # None: C code's, which cannot be called from here
                self.previous[number] = signal.signal(number, _handle)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        if (others := signal.set_wakeup_fd(writing, warn_on_full_buffer=False)) != -1:  # such as asyncio's
            signal.set_wakeup_fd(others)
            os.close(reading)
            os.close(writing)
            return
        self.wakeup = reading, writing
        threading.Thread(target=_read_signals, args=(reading,), name="capture-signals", daemon=True).start()

    def uninstall(self) -> None:
        """Restore what was there before.

        A handler that somebody has put on top of ours stays and calls ours, which from then on only passes on.
        """
        if sys.excepthook is _excepthook:
            sys.excepthook = self.previous_excepthook
        if threading.excepthook is _thread_excepthook:
            threading.excepthook = self.previous_thread_excepthook
        if threading.current_thread() is not threading.main_thread():
            return
        for number in [number for number in self.previous if signal.getsignal(number) is _handle]:
            signal.signal(number, self.previous.pop(number))
        if self.wakeup is not None:
            _, writing = self.wakeup
            self.wakeup = None
            if (current := signal.set_wakeup_fd(-1)) != writing:
                signal.set_wakeup_fd(current)
            os.close(writing)  # ends the thread, which closes the other end

    def pipe_is_ours(self) -> bool:
        if self.wakeup is None:
            return False
        current = signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)
        if current != self.wakeup[1]:
            signal.set_wakeup_fd(current)
        return current == self.wakeup[1]


_handlers = _Handlers()
_lock = threading.RLock()


def add_listener(listener: IncidentListener) -> bool:
    """Add a listener. Returns whether it hears signals too: it does if the first one was added in the main thread."""
    with _lock:
        if not _handlers.listeners:
            _handlers.install()
        _handlers.listeners = (*_handlers.listeners, listener)
        return bool(_handlers.previous)


def remove_listener(listener: IncidentListener) -> None:
    with _lock:
        rest = tuple(other for other in _handlers.listeners if other is not listener)
        if _handlers.listeners and not rest:
            _handlers.uninstall()
        _handlers.listeners = rest


def _tell(number: int) -> None:
    for listener in _handlers.listeners:
        listener.hear_signal(number)


def _wait() -> None:
    for listener in _handlers.listeners:
        listener.flush(max_seconds=MAX_SIGNAL_SECONDS)


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() == _handlers.process and _handlers.listeners:
        _handlers.handled[signal.Signals(number)].set()
        if not (_handlers.pipe_is_ours() and _handlers.heard[signal.Signals(number)].wait(MAX_SIGNAL_SECONDS)):
            _tell(number)
        _handlers.heard[signal.Signals(number)].clear()
        if number != signal.SIGUSR1:
            _wait()
    previous = _handlers.previous.get(number, signal.SIG_DFL)
    if callable(previous):
        previous(number, frame)
    elif number != signal.SIGUSR1:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _read_signals(reading: int) -> None:
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number in _handlers.previous:
                _act_on(number)
    os.close(reading)


def _act_on(number: int) -> None:
    handled = _handlers.handled[signal.Signals(number)]
    _tell(number)
    _handlers.heard[signal.Signals(number)].set()
    if number == signal.SIGUSR1 or callable(_handlers.previous.get(number)):
        return
    _wait()
    if not handled.wait(HEAD_START_SECONDS):  # the main thread is not in the interpreter: do what the default would
        ctypes.CDLL(None).signal(number, 0)
        os.kill(os.getpid(), number)


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _hear(error, "main thread")
    _handlers.previous_excepthook(kind, error, traceback)


def _thread_excepthook(args: Any) -> None:
    if args.exc_value is not None:
        _hear(args.exc_value, "another thread")
    _handlers.previous_thread_excepthook(args)


def _hear(error: BaseException, where: str) -> None:
    if os.getpid() == _handlers.process:
        for listener in _handlers.listeners:
            listener.hear_exception(error, where)


def _forget_in_child() -> None:
    """Restore a child's own handlers: its signals must not go through the pipe that it shares with its parent."""
    global _lock
    _lock = threading.RLock()
    if _handlers.listeners:
        if _handlers.wakeup is not None:
            with contextlib.suppress(OSError):
                os.close(_handlers.wakeup[0])
        _handlers.uninstall()
    _handlers.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget_in_child)
