"""Turn SIGTERM into a message to a thread: in a collective the main thread runs no Python signal handler."""

import signal
import socket
import threading
from typing import Any


class Terminations:
    """While open, SIGTERM does not end the process but writes its number to `bell`. For the main thread only."""

    def __init__(self, bell: socket.socket) -> None:
        self._before: tuple[Any, int] | None = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.signal(signal.SIGTERM, lambda *_: None)
            self._before = handler, signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        if self._before is not None:
            handler, wakeup = self._before
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGTERM, handler)
