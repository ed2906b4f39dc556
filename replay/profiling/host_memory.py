"""Make a history of a pass's allocations on a CPU, from torch's profiler, and say what was resident at its peak.

The process's resident memory has no allocator's snapshot. At the pass's begin it is: the tensors that Python knows, and
the rest, which is the process. What torch's CPU allocator gave out and took back since then, the profiler says. Memory
that libraries take for themselves meanwhile, that was freed and is kept, or that is given out and never touched, is
what the sum and the resident peak differ by.
"""

import ctypes
import gc
import gzip
import json
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from actor_init.spec import ActorSpec
from replay.profiling.memory_peak import Block, Frame, Peak
from replay.profiling.profiler import MICROSECOND, MODULE, named_modules
from replay.profiling.shares import PHASE
from replay.profiling.touched import Touched

ALLOCATION = "[memory]"  # in a Chrome trace
COMMUNICATION: Frame = {
    "filename": "distributed_c10d.py",
    "line": 0,
    "name": "",
}  # the frame of what such a range allocates
COMMUNICATING = ("FSDP::", "c10d::", "gloo:")  # begin the names of ranges
SECOND_NS = 1e9
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
SMALL = 64 * 1024  # bytes; what is smaller does not matter
PROCESS = -1  # the address of what is no tensor


class TraceEvent(TypedDict, total=False):
    """An event of a Chrome trace, which has the keys of its kind: times are in microseconds."""

    name: str
    ts: float
    dur: float
    args: "Allocation"


# What torch says of an event that its CPU allocator gave memory out, or took it back with a negative number of bytes.
Allocation = TypedDict("Allocation", {"Device Type": int, "Addr": int, "Bytes": int})


class HostHistory(Protocol):
    """What is filled in here of a History."""

    begins: list[tuple[int, str | None]]
    forward_end: int | None
    phases_end: int | None
    gradients: Mapping[int, int]
    peak: int
    gradients_before: dict[int, int]


HistoryT = TypeVar("HistoryT", bound=HostHistory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A pass that ran under the profiler."""

    error: Exception | None
    recorded: profile
    before: Sequence[Block]  # that there were when it began
    touched: Touched


def recorded(
    run: Callable[[HistoryT], Exception | None],
    model: PreTrainedModel,
    spec: ActorSpec,
    history: HistoryT,
    resident: Callable[[], int | None],
    *,
    gives_back_at_once: bool,
) -> Recorded:
    """Call `run`, one pass, under a profiler of allocations.

    resident            returns the bytes that the process has now
    gives_back_at_once  what is freed goes back to the system, from here on; it makes the pass slow
    """
    gc.collect()
    give_back = _gives_back() if gives_back_at_once else lambda: None
    give_back()
    before = _tensors_now()
    touched = Touched(give_back)
    with (
        touched,
        named_modules(model, spec),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as events,
    ):
        began = time.time()
        touched.now()
        before = {at: touched.bytes_of(at, size, began, time.time(), most=size) for at, size in before.items()}
        rest = (resident() or 0) - sum(before.values())
        error = run(history)
    blocks = [Block(address=at, num_bytes=size, number=None, frames=()) for at, size in before.items()]
    process = Block(address=PROCESS, num_bytes=max(0, rest), number=None, frames=())
    return Recorded(error=error, recorded=events, before=[*blocks, process], touched=touched)


def peak_of(one: Recorded, history: HostHistory, file: Path) -> Peak:
    """Write the profiler's trace, compressed, to `file`; return the peak in it, and complete `history`."""
    one.recorded.export_chrome_trace(str(file))
    with gzip.open(file, "rt", encoding="utf-8") as text:
        trace = json.load(text)
    began = float(trace.get("baseTimeNanoseconds", 0)) / SECOND_NS
    return peak_in(trace["traceEvents"], one.before, history, began=began, touched=one.touched)


def peak_in(
    events: Iterable[TraceEvent],
    before: Sequence[Block],
    history: HostHistory,
    *,
    began: float = 0.0,
    touched: Touched | None = None,
) -> Peak:
    """Find the peak in the events of a Chrome trace, whose clock was 0 at `began`, in seconds since the epoch.

    touched  what was resident of large allocations; None: all of them
    """
    events = sorted(events, key=lambda event: float(event.get("ts", 0)))
    changes = [event for event in events if event.get("name") == ALLOCATION and event["args"]["Device Type"] == 0]
    times = [float(event["ts"]) for event in changes if event["args"]["Bytes"] > 0]
    _complete(history, events, times)
    growth = max(0, history.peak - sum(block.num_bytes for block in before))
    unseen = {block.address for block in before} | {int(event["args"]["Addr"]) for event in changes}
    inside = {at: size for at, size in history.gradients.items() if at not in unseen}  # of what C++ alone holds
    history.gradients_before |= inside
    live = {block.address: block for block in before}
    live |= {at: Block(address=at, num_bytes=size, number=None, frames=()) for at, size in inside.items()}
    process = live[PROCESS]
    live[PROCESS] = replace(process, num_bytes=max(0, process.num_bytes - sum(inside.values())))
    allocated = most = sum(block.num_bytes for block in live.values())
    peak, number, last = dict(live), -1, -1
    communicating = _Ranges([event for event in events if str(event.get("name", "")).startswith(COMMUNICATING)])
    lifetimes = _lifetimes(changes, began)
    for event in changes:
        size, address = int(event["args"]["Bytes"]), int(event["args"]["Addr"])
        if (freed := live.pop(address, None)) is not None:  # also where a block of before was freed unseen
            allocated -= freed.num_bytes
        if size > 0:
            number += 1
            if touched is not None:
                size = touched.bytes_of(address, size, *lifetimes[number], most=growth)
            frames = [COMMUNICATION] if communicating.at(float(event["ts"])) else []
            live[address] = Block(address=address, num_bytes=size, number=number, frames=frames)
            allocated += size
        if allocated > most and (history.phases_end is None or number < history.phases_end):
            most, peak, last = allocated, dict(live), number
    return Peak(
        allocated_bytes=most,
        reserved_bytes=0,
        blocks=list(peak.values()),
        number=last,
        num_allocations=number + 1,
    )


def _lifetimes(changes: Sequence[TraceEvent], began: float) -> list[tuple[float, float]]:
    """Return when each allocation was made and freed, in seconds since the epoch."""
    times: list[tuple[float, float]] = []
    live: dict[int, int] = {}
    for event in changes:
        at, address = began + float(event["ts"]) * MICROSECOND, int(event["args"]["Addr"])
        if event["args"]["Bytes"] > 0:
            live[address] = len(times)
            times.append((at, float("inf")))
        elif (number := live.pop(address, None)) is not None:
            times[number] = times[number][0], at
    return times


class _Ranges:
    """Ranges of a Chrome trace, which may hold each other: tells the innermost at a time."""

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        self.borders: list[tuple[float, str | None]] = []  # from when on which is the innermost
        open_ranges: list[tuple[float, str]] = []  # their ends and names
        spans = [
            (float(one["ts"]), float(one["ts"]) + float(one["dur"]), str(one["name"])) for one in events if "dur" in one
        ]
        for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
            self._close(open_ranges, begin)
            open_ranges.append((end, name))
            self.borders.append((begin, name))
        self._close(open_ranges, float("inf"))

    def _close(self, open_ranges: list[tuple[float, str]], until: float) -> None:
        while open_ranges and open_ranges[-1][0] <= until:
            end, _ = open_ranges.pop()
            self.borders.append((end, open_ranges[-1][1] if open_ranges else None))

    def at(self, time: float) -> str | None:
        place = bisect_right(self.borders, time, key=lambda one: one[0]) - 1
        return self.borders[place][1] if place >= 0 else None


def _complete(history: HostHistory, events: Sequence[TraceEvent], times: Sequence[float]) -> None:
    """Note which module ran from which allocation on, and where forward and all phases ended, given when each was."""
    modules = _Ranges([event for event in events if str(event.get("name", "")).startswith(MODULE)])
    history.begins = [(bisect_left(times, at), name and name.removeprefix(MODULE)) for at, name in modules.borders]
    ends = [
        (str(event["name"]).removeprefix(PHASE), float(event["ts"]) + float(event["dur"]))
        for event in events
        if str(event.get("name", "")).startswith(PHASE) and "dur" in event
    ]
    forward = [end for name, end in ends if name == "forward"]
    history.forward_end = bisect_left(times, forward[0]) if forward else None
    history.phases_end = bisect_right(times, max(end for _, end in ends)) if ends else None


def _tensors_now() -> dict[int, int]:
    """Return the bytes of each storage on the CPU that a tensor of Python's has, by address."""
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, Parameter) and one.device.type == "cpu" and one.layout is torch.strided:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return {address: size for address, size in found.items() if size}


def _gives_back() -> Callable[[], None]:
    """Let glibc, where it is the allocator, give large blocks back; return a function that gives the rest back.

    Else what is freed stays resident and is taken for the tensors' that are there.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return lambda: None
    libc.mallopt(M_MMAP_THRESHOLD, SMALL)
    libc.mallopt(M_TRIM_THRESHOLD, SMALL)
    return partial(libc.malloc_trim, 0)
