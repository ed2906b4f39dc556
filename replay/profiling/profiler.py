"""Run one pass under torch.profiler and summarize it: time by kind of work, the longest kernels, a timeline."""

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
from replay.profiling.profile_records import (
    PHASE_PREFIX,
    Interval,
    LongKernel,
    RankProfile,
    Work,
    classify_work,
    divide_seconds,
    measure_hidden_seconds,
)

# The name of the range under which a module's forward is recorded begins with the first; that of the mark where the
# backward of its output begins, with the second.
MODULE_PREFIX = "module: "
BACKWARD_PREFIX = "backward of module: "
BACKWARD_FUNCTION = "autograd::engine::evaluate_function"
NUM_LONGEST = 10
# On lower levels torch 2.13 writes a line on stderr whenever a profile begins or ends.
KINETO_LEVEL = "6"
MICROSECOND = 1e-6

# Kineto reads the level when the first profile begins.
os.environ.setdefault("KINETO_LOG_LEVEL", KINETO_LEVEL)


def profile_pass(
    run: Callable[[], bool], model: PreTrainedModel, spec: ActorSpec, device: torch.device, timeline: Path
) -> RankProfile | None:
    """Call `run`, one pass, under torch.profiler, and write a Chrome trace, compressed, to `timeline`.

    `run` returns whether the pass succeeded. If it did not, no trace is written and None is returned.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with record_module_ranges(model, spec), profile(activities=activities, acc_events=True) as profiler:
        has_succeeded = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if not has_succeeded:
        return None
    profiler.export_chrome_trace(str(timeline))
    return summarize_events(list(profiler.events() or []), is_cuda=device.type == "cuda", timeline=timeline.name)


def record_module_ranges(model: PreTrainedModel, spec: ActorSpec) -> AbstractContextManager[None]:
    """Record a range for each forward of the modules that a trace would tell apart."""
    open_ranges: list[Any] = []

    def begins(name: str) -> None:
        module_range = record_function(MODULE_PREFIX + name)
        module_range.__enter__()
        open_ranges.append(module_range)

    def ends(name: str, output: Any) -> None:
        def mark(_: Any) -> None:
            with record_function(BACKWARD_PREFIX + name):
                pass

        open_ranges.pop().__exit__(None, None, None)
        for tensor in find_result_tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(mark)

    return watch_modules(model, spec.compile, begins, ends)


def summarize_events(events: Sequence[FunctionEvent], *, is_cuda: bool, timeline: str) -> RankProfile:
    """Summarise the events of a profile: kernels on CUDA; torch's operators and gloo's collectives on a CPU."""
    phases = [event for event in events if event.name.startswith(PHASE_PREFIX) and _is_on_host(event)]
    begin = min(event.time_range.start for event in phases) * MICROSECOND
    list_work = _list_kernels if is_cuda else _list_operators
    intervals = sorted(interval for event in events for interval in list_work(event) if interval.begin >= begin)
    end = max(event.time_range.end for event in phases) * MICROSECOND
    # The device works on when the host has left the last phase.
    end = max([end, *(interval.end for interval in intervals)]) if is_cuda else end
    return RankProfile(
        seconds=end - begin,
        seconds_by_work={work.value: seconds for work, seconds in divide_seconds(intervals, begin, end).items()},
        hidden_communication_seconds=measure_hidden_seconds(intervals),
        longest=_find_longest(events, is_cuda=is_cuda),
        collective_seconds=[
            interval.end - interval.begin for interval in intervals if interval.work is Work.COMMUNICATION
        ],
        timeline=timeline,
    )


def _is_on_host(event: FunctionEvent) -> bool:
    return bool(event.device_type.name == "CPU")


def _list_kernels(event: FunctionEvent) -> Iterator[Interval]:
    """Yield the interval of a kernel or copy on the device; ranges that were named on the host are none."""
    if not _is_on_host(event) and not getattr(event, "is_user_annotation", False):
        span = event.time_range
        yield Interval(span.start * MICROSECOND, span.end * MICROSECOND, classify_work(event.name))


def _list_operators(event: FunctionEvent) -> Iterator[Interval]:
    """Yield when an operator of torch ran and none that it had called, or when a collective ran."""
    work = classify_work(event.name)
    if not event.name.startswith("aten::") and work is not Work.COMMUNICATION:
        return
    begin = event.time_range.start
    for child in sorted(event.cpu_children, key=lambda child: child.time_range.start):
        if child.time_range.start > begin:
            yield Interval(begin * MICROSECOND, child.time_range.start * MICROSECOND, work)
        begin = max(begin, child.time_range.end)
    if event.time_range.end > begin:
        yield Interval(begin * MICROSECOND, event.time_range.end * MICROSECOND, work)


def _find_longest(events: Sequence[FunctionEvent], *, is_cuda: bool) -> list[LongKernel]:
    modules = ModuleFinder(events)
    launches: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    for event in events:
        if is_cuda:
            launched = [(kernel.name, kernel.duration) for kernel in event.kernels]
        else:
            launched = [(event.name, event.self_cpu_time_total)] if event.name.startswith("aten::") else []
        for name, microseconds in launched:
            launches[name, modules.find(event)].append(microseconds * MICROSECOND)
    rows = [
        LongKernel(name=name, module=module, count=len(seconds), seconds=sum(seconds))
        for (name, module), seconds in launches.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)[:NUM_LONGEST]


class ModuleFinder:
    """Finds which module an event belongs to: the one whose forward launched it, or in backward that of its operation.

    Operations have a number that forward and backward share. Where one lacks it, as compiled ones do, it belongs to the
    module whose output's backward began last.
    """

    def __init__(self, events: Sequence[FunctionEvent]) -> None:
        self._by_number: dict[int, str] = {}
        # By thread, the time at which the backward of each module began.
        self._marks: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for event in events:
            if event.sequence_nr >= 0 and not event.fwd_thread and (module := _find_running_module(event)):
                self._by_number[event.sequence_nr] = module
            if event.name.startswith(BACKWARD_PREFIX) and _is_on_host(event):
                self._marks[event.thread].append((event.time_range.start, event.name.removeprefix(BACKWARD_PREFIX)))
        for marks in self._marks.values():
            marks.sort()

    def find(self, event: FunctionEvent) -> str | None:
        if module := _find_running_module(event):
            return module
        ancestors = _with_parents(event)
        operation = next((ancestor for ancestor in ancestors if ancestor.name.startswith(BACKWARD_FUNCTION)), None)
        if operation is None:
            return None
        if operation.sequence_nr in self._by_number:
            return self._by_number[operation.sequence_nr]
        marks = self._marks[event.thread]
        place = bisect_right(marks, event.time_range.start, key=lambda mark: mark[0]) - 1
        return marks[place][1] if place >= 0 else None


def _find_running_module(event: FunctionEvent) -> str | None:
    """Return the module whose forward was running, if one was."""
    names = (ancestor.name for ancestor in _with_parents(event))
    return next((name.removeprefix(MODULE_PREFIX) for name in names if name.startswith(MODULE_PREFIX)), None)


def _with_parents(event: FunctionEvent) -> Iterator[FunctionEvent]:
    ancestor: FunctionEvent | None = event
    while ancestor is not None:
        yield ancestor
        ancestor = ancestor.cpu_parent
