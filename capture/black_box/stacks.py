"""Write every thread's Python stack, and tell from stacks where in a pass a rank is.

A stack is text in faulthandler's format, so one reader reads both:

    Thread 0x00007f0e3c1d2740 [MainThread] (most recent call first):
      File "train.py", line 27 in compute_loss
      File "torch/nn/modules/module.py", line 1787 in _call_impl

Files of libraries keep their folder (`torch/nn/...`, `python3.11/threading.py`), those of the job are names alone.
"""

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from capture.record.observer import TrainingPhase

# The innermost frames of a thread that are written.
MAX_FRAMES = 100
# The file and the function of our signal handler, whose frame lies on top of those that the signal interrupted.
_HANDLER_FILE, _HANDLER_FUNCTION = "capture/black_box/signal_handlers.py", "_handle_signal"
_FRAME_LINE = re.compile(r'^\s*File "([^"\n]*)", line (\d+|\?\?\?),? in (.+?)\s*$', re.MULTILINE)
_THREAD_LINE = re.compile(
    r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[([^\]\n]*)\])? \(most recent call first\):", re.MULTILINE
)
_MAIN_THREAD = "MainThread"


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One line of a stack: `train.py`, 27, `compute_loss`."""

    file: str
    line: str
    function: str

    @property
    def is_of_library(self) -> bool:
        return "/" in self.file or self.file.startswith("<")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def format_all_stacks() -> str:
    """Write the stacks of all threads, the main thread's last. Paths are those of the host."""
    # threading.enumerate would take a lock that an interrupted thread may hold.
    threads: Any = getattr(threading, "_active", {})
    names = {ident: thread.name for ident, thread in list(threads.items())}
    main_ident, current_ident = threading.main_thread().ident, threading.get_ident()
    names[main_ident] = _MAIN_THREAD
    frames = sys._current_frames()
    # The current thread is the one that writes the stacks: its stack tells nothing, unless it is the main thread.
    idents = [ident for ident in frames if ident != current_ident or ident == main_ident]
    return "\n\n".join(
        f"Thread 0x{ident:016x} [{names.get(ident, '?')}] (most recent call first):\n"
        + "\n".join(_format_frames(frames[ident]))
        for ident in sorted(idents, key=lambda ident: ident == main_ident)
    )


def _format_frames(innermost: FrameType) -> Iterator[str]:
    """Write a line for each frame of a thread, from the innermost out, without those of our signal handler."""
    frames: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        code = frame.f_code
        if code.co_name == _HANDLER_FUNCTION and code.co_filename.endswith(_HANDLER_FILE):
            frames.clear()
        else:
            frames.append(frame)
        frame = frame.f_back
    for frame in frames[:MAX_FRAMES]:
        yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'


def mark_main_thread(text: str, ident: int | None) -> str:
    """Mark the main thread in faulthandler's text."""
    if ident is None:
        return text
    return re.sub(
        rf"^((?:Current thread|Thread) 0x0*{ident:x})(?= \()", rf"\1 [{_MAIN_THREAD}]", text, flags=re.MULTILINE
    )


def find_main_stack(stacks: str) -> list[StackFrame]:
    """Return the main thread's frames, the innermost first; of the last thread if none is marked as the main one."""
    thread_lines = list(_THREAD_LINE.finditer(stacks))
    if not thread_lines:
        return []
    ends = [line.start() for line in thread_lines[1:]] + [len(stacks)]
    numbers = (number for number, line in enumerate(thread_lines) if line[2] == _MAIN_THREAD)
    main_number = next(numbers, len(thread_lines) - 1)
    return _parse_frames(stacks[thread_lines[main_number].end() : ends[main_number]])


def parse_traceback(traceback: str) -> list[StackFrame]:
    """Return the frames of an exception's traceback, the innermost first."""
    return _parse_frames(traceback)[::-1]


def _parse_frames(text: str) -> list[StackFrame]:
    return [StackFrame(*match.groups()) for match in _FRAME_LINE.finditer(text)]


def correct_phase(phase: TrainingPhase, frames: Sequence[StackFrame]) -> TrainingPhase:
    """Correct the phase that the hooks saw last by the main thread's stack: no hook sees where a backward ends."""
    if phase in ("before any forward", "in forward"):
        return phase
    if any(frame.function == "_engine_run_backward" for frame in frames):
        return "in backward"
    if any("torch/optim/" in frame.file for frame in frames):
        return "in the optimizer's step"
    if phase == "in backward" and frames:
        return "after backward"
    return phase
