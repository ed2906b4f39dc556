"""Make a history of a pass's allocations on a CPU, from torch's profiler, and find what was resident at its peak.

A CPU's allocator has no snapshot. When the pass begins, the resident memory is that of the tensors that Python knows,
and the remainder is counted as the process. The profiler says what torch's CPU allocator gave out and took back since
then. The sum and the resident peak differ by memory that libraries take for themselves meanwhile, that was freed and
is kept, or that is given out and never touched.
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
from replay.profiling.profile_records import PHASE_PREFIX
from replay.profiling.profiler import MICROSECOND, MODULE_PREFIX, record_module_ranges
from replay.profiling.residency import ResidencyReader
from replay.profiling.snapshot_peak import Block, Peak, PythonFrame

# The name of an allocation's event in a Chrome trace.
ALLOCATION = "[memory]"
# What a range of communication allocates gets this frame, by which it is told from the rest.
COMMUNICATION_FRAME: PythonFrame = {"filename": "distributed_c10d.py", "line": 0, "name": ""}
# The names of ranges of communication begin with these.
COMMUNICATION_PREFIXES = ("FSDP::", "c10d::", "gloo:")
SECOND_NS = 1e9
# Numbers of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Smaller blocks need not go back to the system: they hardly change the peak.
SMALL_BYTES = 64 * 1024
# The address of the block that stands for all that is no tensor.
PROCESS_ADDRESS = -1


class TraceEvent(TypedDict, total=False):
    """An event of a Chrome trace, which has the keys of its kind: times are in microseconds."""

    name: str
    ts: float
    dur: float
    args: "Allocation"


# What torch says of an event that its CPU allocator gave memory out, or took it back with a negative number of bytes.
Allocation = TypedDict("Allocation", {"Device Type": int, "Addr": int, "Bytes": int})


class HostHistory(Protocol):
    """The fields of an AllocationHistory that this module fills in."""

    module_borders: list[tuple[int, str | None]]
    forward_end: int | None
    phases_end: int | None
    gradients: Mapping[int, int]
    peak: int
    gradients_before: dict[int, int]


HistoryT = TypeVar("HistoryT", bound=HostHistory)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRecording:
    """A pass that ran under the profiler."""

    error: Exception | None
    profiler: profile
    # The blocks that there were when the pass began.
    blocks_before: Sequence[Block]
    residency: ResidencyReader


def record_pass(
    run: Callable[[HistoryT], Exception | None],
    model: PreTrainedModel,
    spec: ActorSpec,
    history: HistoryT,
    resident: Callable[[], int | None],
    *,
    gives_back_at_once: bool,
) -> HostRecording:
    """Call `run`, one pass, under a profiler of allocations.

    resident            returns the bytes that the process has now
    gives_back_at_once  what is freed goes back to the system, from here on; it makes the pass slow
    """
    gc.collect()
    give_back = _make_freed_memory_return() if gives_back_at_once else lambda: None
    give_back()
    sizes_before = _list_storages()
    residency = ResidencyReader(give_back)
    with (
        residency,
        record_module_ranges(model, spec),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler,
    ):
        began = time.time()
        residency.read()
        resident_before = {
            address: residency.find_resident_bytes(address, size, began, time.time(), most=size)
            for address, size in sizes_before.items()
        }
        process_bytes = (resident() or 0) - sum(resident_before.values())
        error = run(history)
    blocks = [Block(address=at, num_bytes=size, number=None, frames=()) for at, size in resident_before.items()]
    process = Block(address=PROCESS_ADDRESS, num_bytes=max(0, process_bytes), number=None, frames=())
    return HostRecording(error=error, profiler=profiler, blocks_before=[*blocks, process], residency=residency)


def find_recorded_peak(recording: HostRecording, history: HostHistory, file: Path) -> Peak:
    """Write the profiler's trace, compressed, to `file`; return the peak in it, and complete `history`."""
    recording.profiler.export_chrome_trace(str(file))
    with gzip.open(file, "rt", encoding="utf-8") as text:
        trace = json.load(text)
    began = float(trace.get("baseTimeNanoseconds", 0)) / SECOND_NS
    return find_peak(trace["traceEvents"], recording.blocks_before, history, began=began, residency=recording.residency)


def find_peak(
    events: Iterable[TraceEvent],
    blocks_before: Sequence[Block],
    history: HostHistory,
    *,
    began: float = 0.0,
    residency: ResidencyReader | None = None,
) -> Peak:
    """Find the peak in the events of a Chrome trace, whose clock was 0 at `began`, in seconds since the epoch.

    residency  what was resident of large allocations; None: all of them

    The events are replayed in the order of their times. `live` holds the blocks in use by address, `peak` a copy of
    them at the moment of most bytes within the pass's phases.
    """
    events = sorted(events, key=lambda event: float(event.get("ts", 0)))
    changes = [event for event in events if event.get("name") == ALLOCATION and event["args"]["Device Type"] == 0]
    times = [float(event["ts"]) for event in changes if event["args"]["Bytes"] > 0]
    _complete_history(history, events, times)
    growth = max(0, history.peak - sum(block.num_bytes for block in blocks_before))
    # Gradients that neither Python nor the profiler knows lie in memory that C++ alone holds. So far they were
    # counted as the process's.
    known = {block.address for block in blocks_before} | {int(event["args"]["Addr"]) for event in changes}
    hidden_gradients = {at: size for at, size in history.gradients.items() if at not in known}
    history.gradients_before |= hidden_gradients
    live = {block.address: block for block in blocks_before}
    live |= {at: Block(address=at, num_bytes=size, number=None, frames=()) for at, size in hidden_gradients.items()}
    process = live[PROCESS_ADDRESS]
    live[PROCESS_ADDRESS] = replace(process, num_bytes=max(0, process.num_bytes - sum(hidden_gradients.values())))
    allocated = most = sum(block.num_bytes for block in live.values())
    peak, number, peak_number = dict(live), -1, -1
    communication = _NamedRanges(
        [event for event in events if str(event.get("name", "")).startswith(COMMUNICATION_PREFIXES)]
    )
    lifetimes = _find_lifetimes(changes, began)
    for event in changes:
        size, address = int(event["args"]["Bytes"]), int(event["args"]["Addr"])
        # An allocation at the address of a live block means that the block was freed before the profiler saw it.
        if (freed := live.pop(address, None)) is not None:
            allocated -= freed.num_bytes
        if size > 0:
            number += 1
            if residency is not None:
                size = residency.find_resident_bytes(address, size, *lifetimes[number], most=growth)
            frames = [COMMUNICATION_FRAME] if communication.find_innermost(float(event["ts"])) else []
            live[address] = Block(address=address, num_bytes=size, number=number, frames=frames)
            allocated += size
        if allocated > most and (history.phases_end is None or number < history.phases_end):
            most, peak, peak_number = allocated, dict(live), number
    return Peak(
        allocated_bytes=most,
        reserved_bytes=0,
        blocks=list(peak.values()),
        number=peak_number,
        num_allocations=number + 1,
    )


def _find_lifetimes(changes: Sequence[TraceEvent], began: float) -> list[tuple[float, float]]:
    """Return when each allocation was made and freed, in seconds since the epoch."""
    times: list[tuple[float, float]] = []
    live: dict[int, int] = {}
    for event in changes:
        moment, address = began + float(event["ts"]) * MICROSECOND, int(event["args"]["Addr"])
        if event["args"]["Bytes"] > 0:
            live[address] = len(times)
            times.append((moment, float("inf")))
        elif (number := live.pop(address, None)) is not None:
            times[number] = times[number][0], moment
    return times


class _NamedRanges:
    """Ranges of a Chrome trace, which may be nested: finds the innermost at a time."""

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        # From each time on, the range with this name is the innermost.
        self.borders: list[tuple[float, str | None]] = []
        # The end and the name of each range that is open.
        open_ranges: list[tuple[float, str]] = []
        spans = [
            (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
            for event in events
            if "dur" in event
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

    def find_innermost(self, time: float) -> str | None:
        place = bisect_right(self.borders, time, key=lambda border: border[0]) - 1
        return self.borders[place][1] if place >= 0 else None


def _complete_history(history: HostHistory, events: Sequence[TraceEvent], times: Sequence[float]) -> None:
    """Fill in which module ran from which allocation on, and before which allocation forward and all phases ended.

    times  when each allocation was made
    """
    modules = _NamedRanges([event for event in events if str(event.get("name", "")).startswith(MODULE_PREFIX)])
    history.module_borders = [
        (bisect_left(times, begin), name and name.removeprefix(MODULE_PREFIX)) for begin, name in modules.borders
    ]
    ends = [
        (str(event["name"]).removeprefix(PHASE_PREFIX), float(event["ts"]) + float(event["dur"]))
        for event in events
        if str(event.get("name", "")).startswith(PHASE_PREFIX) and "dur" in event
    ]
    forward = [end for name, end in ends if name == "forward"]
    history.forward_end = bisect_left(times, forward[0]) if forward else None
    history.phases_end = bisect_right(times, max(end for _, end in ends)) if ends else None


def _list_storages() -> dict[int, int]:
    """Return the bytes of each storage on the CPU that a tensor of Python's has, by address."""
    sizes: dict[int, int] = {}
    for tracked in gc.get_objects():
        if type(tracked) in (Tensor, Parameter) and tracked.device.type == "cpu" and tracked.layout is torch.strided:
            storage = tracked.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return {address: size for address, size in sizes.items() if size}


def _make_freed_memory_return() -> Callable[[], None]:
    """Have glibc, where it is the allocator, give large blocks back to the system when they are freed.

    Returns a function that gives back the smaller blocks that are free. Without this, freed memory stays resident,
    and is counted as that of the tensors that are there.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return lambda: None
    libc.mallopt(M_MMAP_THRESHOLD, SMALL_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, SMALL_BYTES)
    return partial(libc.malloc_trim, 0)
