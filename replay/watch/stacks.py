"""Collect what a rank can report while its main thread hangs: stacks, collectives, NCCL's flight recorder."""

import faulthandler
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
import torch.distributed as dist

COLLECTIVE_CODE = ("distributed_c10d.py", "_functional_collectives.py", "c10d_logger.py", "_fsdp_collectives.py")
# Frames of torch that may be below a collective, where it calls an operator.
OPERATOR_CODE = (("torch", "_ops.py"), ("torch", "_compile.py"), ("_dynamo", "eval_frame.py"))
# A rank is in a collective if the collective's code is among so many innermost frames. Frames farther out tell nothing,
# since a hook of torch.distributed may run a whole model.
NUM_INNERMOST = 6
# How much later than the watch a collective gives up.
TIMEOUT_MARGIN = timedelta(minutes=5)


def stack_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stack.txt"


class StackFile:
    """`rank<k>.stack.txt`: every thread's stack, also after a crash in native code, or while native code holds Python.

    A watchdog in C writes the stacks and ends the process if `reset_watchdog` is not called for `limit` seconds: native
    code that keeps Python's lock stops every Python thread, so that no Python code could do it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = stack_path(folder, rank)
        self._file: IO[str] = self._path.open("w")
        self._enabled = not faulthandler.is_enabled()
        if self._enabled:
            faulthandler.enable(self._file)

    def reset_watchdog(self, limit: float) -> None:
        faulthandler.dump_traceback_later(limit, exit=True, file=self._file)

    def write(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback(self._file)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._enabled:
            faulthandler.disable()
        self._file.close()
        # A refused run has removed its folder.
        if self._path.is_file() and not self._path.stat().st_size:
            self._path.unlink(missing_ok=True)


def has_watchdog_fired(folder: Path, rank: int) -> bool:
    """Tell whether that rank's watchdog in C ended it."""
    path = stack_path(folder, rank)
    return path.is_file() and path.read_text(errors="replace").startswith("Timeout (")


def has_aborted_in_collective(folder: Path, rank: int) -> bool:
    """Tell whether native code aborted that rank in a collective, as gloo does where sizes of data do not match."""
    path = stack_path(folder, rank)
    text = path.read_text(errors="replace") if path.is_file() else ""
    threads = [
        block.splitlines()[1 : NUM_INNERMOST + 1] for block in text.split("\n\n") if "recent call first" in block
    ]
    inside = any(f'/{name}"' in line for lines in threads for line in lines for name in COLLECTIVE_CODE)
    return text.startswith("Fatal Python error: Aborted") and inside


def write_flight_recorder(folder: Path, rank: int, device: torch.device) -> None:
    """Dump NCCL's last collectives for torch's `torchfrtrace`. Does nothing on a CPU."""
    if device.type == "cuda":
        try:
            trace = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
            (folder / f"rank{rank}.nccl_trace.pkl").write_bytes(trace)
        except Exception as error:
            # The function is private to torch and may change. The other ranks wait, so the shutdown goes on without it.
            print(f"replay: rank {rank} has no dump of NCCL's flight recorder: {error}", file=sys.stderr, flush=True)


def count_collectives() -> dict[str, int]:
    """Count the collectives that this rank has entered, finished or not, by process group of several members."""
    # Any, since torch's stubs lack _get_sequence_number_for_group.
    groups: list[Any] = list(dist.distributed_c10d._world.pg_names)
    return {group.group_name: group._get_sequence_number_for_group() for group in groups if group.size() > 1}


def extend_collective_timeouts(
    timeout: float,
    groups: Iterable[Any] | None = None,
    set_limit: Callable[[timedelta, Any], None] = dist.distributed_c10d._set_pg_timeout,
) -> None:
    """Raise the time limit of collectives above `timeout` seconds, so that the watch diagnoses a hang first.

    By default gloo gives up after 30 minutes.

    groups     None: all process groups of this process
    set_limit  sets the limit of one of them
    """
    limit = max(timedelta(seconds=timeout) + TIMEOUT_MARGIN, dist.distributed_c10d.default_pg_timeout)
    for group in list(dist.distributed_c10d._world.pg_names) if groups is None else groups:
        if group.size() > 1:
            set_limit(limit, group)


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadStates:
    """Where the threads of this process are.

    line              the innermost line of the main thread
    in_collective     any thread but the watch's is in a collective
    waits_for_device  the main thread waits for what it has queued: on CUDA a rank waits for collectives there
    is_compiling      the main thread is in torch.compile
    """

    line: str
    in_collective: bool
    waits_for_device: bool
    is_compiling: bool


def observe_threads(watch_thread: int) -> ThreadStates:
    frames = sys._current_frames()
    main = threading.main_thread().ident
    assert main is not None
    in_collective = any(_is_in_collective(frame) for ident, frame in frames.items() if ident != watch_thread)
    innermost = frames[main].f_code
    return ThreadStates(
        line=_describe_stack(frames[main]),
        in_collective=in_collective,
        waits_for_device=innermost.co_name == "synchronize" and "/torch/" in innermost.co_filename,
        is_compiling=_is_compiling(frames[main]),
    )


def is_raised_in_collective(error: BaseException) -> bool:
    """Tell whether a collective itself raised `error`, and not a hook or an optimizer that it called.

    A collective ends in C++, below torch's own call of an operator at most.
    """
    names = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    while names and (names[-1].parent.name, names[-1].name) in OPERATOR_CODE:
        names.pop()
    return bool(names) and names[-1].name in COLLECTIVE_CODE


def _describe_stack(innermost: FrameType) -> str:
    """Write `python3.11/threading.py:327 in wait, below mine/loader.py:12 in pull`, and whether it compiles."""
    frames = list(_walk_outwards(innermost))
    library = _name_library(innermost)
    caller = next((frame for frame in frames if _name_library(frame) != library), innermost)
    text = _format_frame(innermost)
    if caller is not innermost:
        text += f", below {_format_frame(caller)}"
    return text + (", compiling" if _is_compiling(innermost) else "")


def _is_compiling(innermost: FrameType) -> bool:
    frames = _walk_outwards(innermost)
    return any(frame.f_code.co_filename.endswith("torch/_dynamo/convert_frame.py") for frame in frames)


def _name_library(frame: FrameType) -> str:
    """Name the library of a frame: all of torch is one library, and so is each other folder."""
    path = frame.f_code.co_filename
    return "torch" if "/torch/" in path else str(Path(path).parent)


def _format_frame(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_in_collective(frame: FrameType) -> bool:
    innermost = itertools.islice(_walk_outwards(frame), NUM_INNERMOST)
    return any(Path(frame.f_code.co_filename).name in COLLECTIVE_CODE for frame in innermost)


def _walk_outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
