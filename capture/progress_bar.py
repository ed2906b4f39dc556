"""Show progress and time left in one terminal line that overwrites itself.

`rich.live` is not used: its refresh thread would disturb measurements.
"""

import shutil
import sys
import time
from collections.abc import Callable
from typing import IO

BAR_WIDTH = 20


class ProgressBar:
    """Shows progress on a terminal; prints nothing if `file`, stdout by default, is none."""

    def __init__(self, file: IO[str] | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = sys.stdout if file is None else file
        self._is_terminal = self._file.isatty()
        self._clock = clock
        self._began = clock()

    def show(self, num_done: int, num_all: int, text: str = "") -> None:
        """Show how much is done, and how long the remaining part may take."""
        seconds = self._clock() - self._began
        filled = BAR_WIDTH * num_done // max(num_all, 1)
        time_left = ""
        if 0 < num_done < num_all:
            time_left = f", {_format_duration(seconds / num_done * (num_all - num_done))} left"
        self._overwrite(f"{'#' * filled:.<{BAR_WIDTH}} {num_done:,} of {num_all:,}{time_left}  {text}".rstrip())

    def clear(self) -> None:
        self._overwrite("")

    def _overwrite(self, line: str) -> None:
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._file.write(line[:width].ljust(width) + "\r")
            self._file.flush()


def _format_duration(seconds: float) -> str:
    """Format seconds as `12 s`, `3 min` or `1 h 20 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
