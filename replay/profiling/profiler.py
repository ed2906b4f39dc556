"""Run one pass under torch.profiler and keep what it says: time by kind of work, the longest kernels, a timeline."""

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedModel

from actor_init.spec import ActorSpec
from actor_init.tracing import find_result_tensors, watch_modules
from replay.profiling.shares import (
    PHASE,
    Interval,
    LongKernel,
    RankProfile,
    Work,
    hidden_seconds,
    seconds_by_work,
    work_of,
)

MODULE = "module: "  # begins the name of a range that a module's forward is recorded under
OF_BACKWARD = "backward of module: "  # marks where the backward of what a module returned begins
BACKWARD = "autograd::engine::evaluate_function"
NUM_LONGEST = 10
KINETO_LEVEL = "6"  # below it torch 2.13 writes a line on stderr whenever a profile begins or ends
MICROSECOND = 1e-6


os.environ.setdefault("KINETO_LOG_LEVEL", KINETO_LEVEL)  # kineto reads it when the first profile begins


def profiled(
    run: Callable[[], bool], model: PreTrainedModel, spec: ActorSpec, device: torch.device, timeline: Path
) -> RankProfile | None:
    """Call `run`, one pass, under torch.profiler, and write a Chrome trace, compressed, to `timeline`.

    `run` returns if the pass succeeded; None and no trace if it did not.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with named_modules(model, spec), profile(activities=activities, acc_events=True) as recorded:
        has_succeeded = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if not has_succeeded:
        return None
    recorded.export_chrome_trace(str(timeline))
    return summarised(list(recorded.events() or []), is_cuda=device.type == "cuda", timeline=timeline.name)


def named_modules(model: PreTrainedModel, spec: ActorSpec) -> AbstractContextManager[None]:
    """Record a range for each forward of the modules that a trace would tell apart."""
    open_ranges: list[Any] = []

    def begins(name: str) -> None:
        one = record_function(MODULE + name)
        one.__enter__()
        open_ranges.append(one)

    def ends(name: str, output: Any) -> None:
        def mark(_: Any) -> None:
            with record_function(OF_BACKWARD + name):
                pass

        open_ranges.pop().__exit__(None, None, None)
        for tensor in find_result_tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(mark)

    return watch_modules(model, spec.compile, begins, ends)


def summarised(events: Sequence[FunctionEvent], *, is_cuda: bool, timeline: str) -> RankProfile:
    """Summarise the events of a profile: kernels on CUDA; torch's operators and gloo's collectives on a CPU."""
    phases = [one for one in events if one.name.startswith(PHASE) and _is_on_host(one)]
    begin = min(one.time_range.start for one in phases) * MICROSECOND
    found = sorted(one for event in events for one in (_kernels(event) if is_cuda else _operators(event)))
    intervals = [one for one in found if one.begin >= begin]
    end = max(one.time_range.end for one in phases) * MICROSECOND
    end = max([end, *(one.end for one in intervals)]) if is_cuda else end
    return RankProfile(
        seconds=end - begin,
        seconds_by_work={work.value: seconds for work, seconds in seconds_by_work(intervals, begin, end).items()},
        hidden_communication_seconds=hidden_seconds(intervals),
        longest=_longest(events, is_cuda=is_cuda),
        collective_seconds=[one.end - one.begin for one in intervals if one.work is Work.COMMUNICATION],
        timeline=timeline,
    )


def _is_on_host(event: FunctionEvent) -> bool:
    return bool(event.device_type.name == "CPU")


def _kernels(event: FunctionEvent) -> Iterator[Interval]:
    """Yield the interval of a kernel or copy on the device; ranges that were named on the host are none."""
    if not _is_on_host(event) and not getattr(event, "is_user_annotation", False):
        span = event.time_range
        yield Interval(span.start * MICROSECOND, span.end * MICROSECOND, work_of(event.name))


def _operators(event: FunctionEvent) -> Iterator[Interval]:
    """Yield when an operator of torch ran and none that it had called, or when a collective ran."""
    work = work_of(event.name)
    if not event.name.startswith("aten::") and work is not Work.COMMUNICATION:
        return
    begin = event.time_range.start
    for child in sorted(event.cpu_children, key=lambda child: child.time_range.start):
        if child.time_range.start > begin:
            yield Interval(begin * MICROSECOND, child.time_range.start * MICROSECOND, work)
        begin = max(begin, child.time_range.end)
    if event.time_range.end > begin:
        yield Interval(begin * MICROSECOND, event.time_range.end * MICROSECOND, work)


def _longest(events: Sequence[FunctionEvent], *, is_cuda: bool) -> list[LongKernel]:
    modules = Modules(events)
    launches: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    for event in events:
        if is_cuda:
            ran = [(kernel.name, kernel.duration) for kernel in event.kernels]
        else:
            ran = [(event.name, event.self_cpu_time_total)] if event.name.startswith("aten::") else []
        for name, microseconds in ran:
            launches[name, modules.of(event)].append(microseconds * MICROSECOND)
    rows = [
        LongKernel(name=name, module=module, count=len(seconds), seconds=sum(seconds))
        for (name, module), seconds in launches.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)[:NUM_LONGEST]


class Modules:
    """Tell which module an event belongs to: one whose forward launched it, or in backward that of the same operation.

    Operations have a number that forward and backward share. Where one lacks it, as compiled ones do, it belongs to the
    module whose output's backward began last.
    """

    def __init__(self, events: Sequence[FunctionEvent]) -> None:
        self._by_number: dict[int, str] = {}
        self._marks: dict[int, list[tuple[float, str]]] = defaultdict(list)  # by thread: when which backward began
        for event in events:
            if event.sequence_nr >= 0 and not event.fwd_thread and (module := _running(event)):
                self._by_number[event.sequence_nr] = module
            if event.name.startswith(OF_BACKWARD) and _is_on_host(event):
                self._marks[event.thread].append((event.time_range.start, event.name.removeprefix(OF_BACKWARD)))
        for marks in self._marks.values():
            marks.sort()

    def of(self, event: FunctionEvent) -> str | None:
        if module := _running(event):
            return module
        operation = next((one for one in _with_parents(event) if one.name.startswith(BACKWARD)), None)
        if operation is None:
            return None
        if operation.sequence_nr in self._by_number:
            return self._by_number[operation.sequence_nr]
        marks = self._marks[event.thread]
        place = bisect_right(marks, event.time_range.start, key=lambda mark: mark[0]) - 1
        return marks[place][1] if place >= 0 else None


def _running(event: FunctionEvent) -> str | None:
    """Return the module whose forward was running, if one was."""
    names = (one.name for one in _with_parents(event))
    return next((name.removeprefix(MODULE) for name in names if name.startswith(MODULE)), None)


def _with_parents(event: FunctionEvent) -> Iterator[FunctionEvent]:
    above: FunctionEvent | None = event
    while above is not None:
        yield above
        above = above.cpu_parent
