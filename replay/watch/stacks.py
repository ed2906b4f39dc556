"""Collect what a rank can report while its main thread hangs: stacks, collectives, NCCL's flight recorder."""

import faulthandler
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
import torch.distributed as dist

COLLECTIVE_CODE = ("distributed_c10d.py", "_functional_collectives.py", "c10d_logger.py", "_fsdp_collectives.py")
OPERATOR_CODE = (("torch", "_ops.py"), ("torch", "_compile.py"), ("_dynamo", "eval_frame.py"))  # below a collective
NUM_INNERMOST = 6  # frames in which a wait for the others shows; a whole model may run below torch.distributed's hooks
SLACK = timedelta(minutes=5)


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stack.txt"


class StackFile:
    """`rank<k>.stack.txt`: every thread's stack, also of a crash in native code and of a Python that is held.

    A watchdog in C writes the stacks and ends the process if `still_here` is not called for `limit` seconds: native
    code that keeps Python's lock stops every Python thread, so nobody else could.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = stack_file(folder, rank)
        self._file: IO[str] = self._path.open("w")
        self._enabled = not faulthandler.is_enabled()
        if self._enabled:
            faulthandler.enable(self._file)

    def still_here(self, limit: float) -> None:
        faulthandler.dump_traceback_later(limit, exit=True, file=self._file)

    def write(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback(self._file)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._enabled:
            faulthandler.disable()
        self._file.close()
        if self._path.is_file() and not self._path.stat().st_size:  # the folder of a refused run is gone
            self._path.unlink(missing_ok=True)


def was_held(folder: Path, rank: int) -> bool:
    """Tell whether that rank's watchdog in C ended it."""
    path = stack_file(folder, rank)
    return path.is_file() and path.read_text(errors="replace").startswith("Timeout (")


def aborted_in_collective(folder: Path, rank: int) -> bool:
    """Tell whether native code aborted that rank in a collective, as gloo does where sizes of data do not match."""
    path = stack_file(folder, rank)
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
        except Exception as error:  # torch's own matter, and no reason to keep the others waiting
            print(f"replay: rank {rank} has no dump of NCCL's flight recorder: {error}", file=sys.stderr, flush=True)


def collectives_entered() -> dict[str, int]:
    """Count the collectives that this rank has entered, finished or not, by process group of several members."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_names)  # torch's stubs lack the method
    return {g.group_name: g._get_sequence_number_for_group() for g in groups if g.size() > 1}


def outlast(timeout: float) -> None:
    """Raise the limit of collectives above `timeout`, so that a hang is diagnosed first: gloo gives up after 30 min."""
    for group in list(dist.distributed_c10d._world.pg_names):
        if group.size() > 1:
            limit = max(timedelta(seconds=timeout) + SLACK, dist.distributed_c10d.default_pg_timeout)
            dist.distributed_c10d._set_pg_timeout(limit, group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    line: str  # the innermost of the main thread
    in_collective: bool  # any thread but the watch
    waits_for_device: bool  # the main thread, for what it has queued: on CUDA collectives are waited for there


def standing(watch_thread: int) -> Standing:
    frames = sys._current_frames()
    main = threading.main_thread().ident
    assert main is not None
    in_collective = any(_in_collective(frame) for ident, frame in frames.items() if ident != watch_thread)
    innermost = frames[main].f_code
    return Standing(
        line=_standing_at(frames[main]),
        in_collective=in_collective,
        waits_for_device=innermost.co_name == "synchronize" and "/torch/" in innermost.co_filename,
    )


def raised_in_collective(error: BaseException) -> bool:
    """Tell whether a collective itself raised `error`, and not a hook or an optimizer that it called.

    A collective ends in C++, below torch's own call of an operator at most.
    """
    names = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    while names and (names[-1].parent.name, names[-1].name) in OPERATOR_CODE:
        names.pop()
    return bool(names) and names[-1].name in COLLECTIVE_CODE


def _standing_at(innermost: FrameType) -> str:
    """Write `python3.11/threading.py:327 in wait, below mine/loader.py:12 in pull`, and whether it compiles."""
    frames = list(_outwards(innermost))
    library = _library(innermost)
    caller = next((f for f in frames if _library(f) != library), innermost)
    compiles = any(f.f_code.co_filename.endswith("torch/_dynamo/convert_frame.py") for f in frames)
    return _line(innermost) + f", below {_line(caller)}" * (caller is not innermost) + ", compiling" * compiles


def _library(frame: FrameType) -> str:
    """Name the library of a frame: all of torch is one, any other folder is one by itself."""
    path = frame.f_code.co_filename
    return "torch" if "/torch/" in path else str(Path(path).parent)


def _line(frame: FrameType) -> str:
    name = Path(frame.f_code.co_filename)
    return f"{name.parent.name}/{name.name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _in_collective(frame: FrameType) -> bool:
    innermost = [Path(f.f_code.co_filename).name for f, _ in zip(_outwards(frame), range(NUM_INNERMOST), strict=False)]
    return any(name in COLLECTIVE_CODE for name in innermost)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
