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

MAX_FRAMES = 100  # of a thread, the innermost
_OWN_HANDLER = "capture/black_box/signal_handlers.py", "_handle"  # on top of what the signal interrupted
_FRAME = re.compile(r'^\s*File "([^"\n]*)", line (\d+|\?\?\?),? in (.+?)\s*$', re.MULTILINE)
_HEAD = re.compile(
    r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[([^\]\n]*)\])? \(most recent call first\):", re.MULTILINE
)
_MAIN = "MainThread"


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
    threads: Any = getattr(threading, "_active", {})  # enumerate would take a lock that an interrupted thread may hold
    names = {ident: thread.name for ident, thread in list(threads.items())}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    own = threading.get_ident()
    order = sorted((ident for ident in frames if ident != own or ident == main), key=lambda ident: ident == main)
    return "\n\n".join(
        f"Thread 0x{ident:016x} [{_MAIN if ident == main else names.get(ident, '?')}] (most recent call first):\n"
        + "\n".join(_lines(frames[ident]))
        for ident in order
    )


def _lines(innermost: FrameType) -> Iterator[str]:
    frames: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        file, function = _OWN_HANDLER
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
            frames.clear()
        else:
            frames.append(frame)
        frame = frame.f_back
    for one in frames[:MAX_FRAMES]:
        yield f'  File "{one.f_code.co_filename}", line {one.f_lineno} in {one.f_code.co_name}'


def mark_main_thread(text: str, ident: int | None) -> str:
    """Mark the main thread in faulthandler's text."""
    if ident is None:
        return text
    return re.sub(rf"^((?:Current thread|Thread) 0x0*{ident:x})(?= \()", rf"\1 [{_MAIN}]", text, flags=re.MULTILINE)


def find_main_stack(stacks: str) -> list[StackFrame]:
    """Return the main thread's frames, the innermost first; of the last thread if none is marked as the main one."""
    heads = list(_HEAD.finditer(stacks))
    if not heads:
        return []
    ends = [head.start() for head in heads[1:]] + [len(stacks)]
    chosen = next((number for number, head in enumerate(heads) if head[2] == _MAIN), len(heads) - 1)
    return _frames(stacks[heads[chosen].end() : ends[chosen]])


def parse_traceback(traceback: str) -> list[StackFrame]:
    """Return the frames of an exception's traceback, the innermost first."""
    return _frames(traceback)[::-1]


def _frames(text: str) -> list[StackFrame]:
    return [StackFrame(*match.groups()) for match in _FRAME.finditer(text)]


def correct_phase(place: TrainingPhase, frames: Sequence[StackFrame]) -> TrainingPhase:
    """Correct what the hooks saw last by the main thread's stack, which alone shows where a backward ends."""
    if place in ("before any forward", "in forward"):
        return place
    if any(frame.function == "_engine_run_backward" for frame in frames):
        return "in backward"
    if any(frame.file.startswith("torch/optim/") or "torch/optim/" in frame.file for frame in frames):
        return "in the optimizer's step"
    if place == "in backward" and frames:
        return "after backward"
    return place
