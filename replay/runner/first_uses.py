"""Notice what a pass does for the first time in this process: compiling, autotuning, loading.

    first_uses = FirstUses(device)
    first_uses.begin(cudnn_calls)
    ...  # the pass
    first_uses.end()  # ["Triton kernel", "GPU code"]

Each is noticed by a counter, read before and after the pass, outside its clock. What no counter shows (heuristics that
cuBLAS and cuDNN work out for a shape, caches of the job's own code) holds up the host, and the device waits for it. So
on CUDA a pass is run again, outside the clock, if the device waited for the host and the pass took far longer than
passes like it. If it is as slow again, the pass counts: it is always that slow.
"""

import ctypes
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from actor_init.world import World
from replay.runlog.records import FirstUse, PassRecord, PhaseCost


class FirstUses:
    """Compare counters before and after each pass."""

    def __init__(self, device: torch.device, triton: "TritonWatch | None" = None) -> None:
        """Set up the counters.

        triton  None: the one watch of this process
        """
        self._triton = _triton if triton is None else triton
        self._counters: dict[FirstUse, Callable[[], int]] = {
            FirstUse.COMPILED: _read_compiling_nanoseconds,
            FirstUse.TRITON: lambda: self._triton.num_kernels,
            FirstUse.AUTOTUNED: lambda: self._triton.num_benchmarks,
            FirstUse.LIBRARY: _count_libraries,
            FirstUse.IMPORT: lambda: len(sys.modules),
        }
        if device.type == "cuda" and torch.cuda.get_allocator_backend() == "native":
            self._counters[FirstUse.RETRY] = lambda: _read_allocator_count(device, "num_alloc_retries")
            self._counters[FirstUse.GPU_CODE] = lambda: _read_bytes_outside_allocator(device)
        self._counts_before: dict[FirstUse, int] = {}
        self._planned_calls: set[Hashable] = set()
        self._calls: set[Hashable] = set()

    def begin(self, cudnn_calls: Iterable[Hashable] = ()) -> None:
        """Read the counters before a pass.

        cudnn_calls  kinds of calls of cuDNN's attention in it; cuDNN has no counter, and plans each kind once
        """
        self._calls = set(cudnn_calls)
        self._triton.watch()
        self._counts_before = {use: counter() for use, counter in self._counters.items()}

    def end(self) -> list[str]:
        """Return what was used for the first time since `begin`."""
        counts_after = {use: counter() for use, counter in self._counters.items()}
        if counts_after[FirstUse.COMPILED] < self._counts_before[FirstUse.COMPILED]:
            # Dynamo was reset during the pass, and its clock with it.
            self._counts_before[FirstUse.COMPILED] = 0
        uses = {use for use in counts_after if counts_after[use] > self._counts_before[use]}
        if self._calls - self._planned_calls:
            uses.add(FirstUse.PLAN)
        self._planned_calls |= self._calls
        return [use.value for use in FirstUse if use in uses]


def _read_compiling_nanoseconds() -> int:
    """Return the time in dynamo, inductor and its autotuning; nested parts count more than once."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(sum(utils.cumulative_time_spent_ns.values()))


class _Library(ctypes.Structure):
    """The first fields of glibc's and musl's `struct dl_phdr_info`. `num_loaded` counts all libraries loaded so far."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("num_headers", ctypes.c_uint16),
        ("num_loaded", ctypes.c_ulonglong),
    )


_LibraryCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
# macOS has no such function.
_iterate_libraries = getattr(ctypes.CDLL(None), "dl_iterate_phdr", None)


def _count_libraries() -> int:
    """Count the shared libraries that the process has loaded; 0 where the system does not say."""
    if _iterate_libraries is None:
        return 0
    counts: list[int] = []

    def on_library(library: Any, _size: int, _data: Any) -> int:
        counts.append(library.contents.num_loaded)
        # Every library tells the same count, so the first is enough: a result other than 0 ends the iteration.
        return 1

    _iterate_libraries(_LibraryCallback(on_library), None)
    return counts[0]


def _read_allocator_count(device: torch.device, counter: str) -> int:
    return int(torch.cuda.memory_stats_as_nested_dict(device).get(counter, 0))


def _read_bytes_outside_allocator(device: torch.device) -> int:
    """Return the device's memory in use that torch's allocator does not hold: kernels' code, libraries' workspaces."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


class TritonWatch:
    """Count the kernels that Triton compiles or loads, and the configurations that its autotuner tries."""

    def __init__(self, modules: Mapping[str, Any] = sys.modules) -> None:
        """Count nothing before `watch`.

        modules  where Triton is once something has imported it
        """
        self._modules = modules
        self.num_kernels = 0
        self.num_benchmarks = 0
        self._is_watching = False

    def watch(self) -> None:
        """Start counting as soon as something has imported Triton; that import is a first use of its own."""
        if self._is_watching or "triton.runtime.autotuner" not in self._modules:
            return
        self._is_watching = True
        knobs = getattr(self._modules.get("triton.knobs"), "runtime", None)
        # Before 3.4 Triton's class of kernels had the hooks.
        jit_function = getattr(self._modules.get("triton.runtime.jit"), "JITFunction", None)
        owner, hook = (knobs, "jit_post_compile_hook") if knobs is not None else (jit_function, "compiled_hook")
        if hasattr(owner, hook):
            # Someone else's hook may be there already: it is called after the count.
            setattr(owner, hook, self._count_kernels_before(getattr(owner, hook)))
        # Since Triton 3.5 this hook is a chain, to which each user adds a function.
        load_hooks: Any = getattr(knobs, "kernel_load_end_hook", None)
        if hasattr(load_hooks, "add"):
            load_hooks.add(self._count_kernels_before(None))
        # Nothing public tells that the autotuner times kernels which are compiled already, so its method is wrapped.
        autotuner = self._modules["triton.runtime.autotuner"].Autotuner
        if hasattr(autotuner, "_bench"):
            autotuner._bench = self._count_benchmarks_before(autotuner._bench)

    def _count_kernels_before(self, next_hook: Callable[..., Any] | None) -> Callable[..., Any]:
        def on_kernel(*arguments: Any, **keywords: Any) -> Any:
            self.num_kernels += 1
            return None if next_hook is None else next_hook(*arguments, **keywords)

        return on_kernel

    def _count_benchmarks_before(self, benchmark: Callable[..., Any]) -> Callable[..., Any]:
        def bench(*arguments: Any, **keywords: Any) -> Any:
            self.num_benchmarks += 1
            return benchmark(*arguments, **keywords)

        return bench


_triton = TritonWatch()


# A pass is far slower than expected, or than its second run, if it takes this many times as long.
SLOW_FACTOR = 1.5
# The device waited for the host if the host was still launching a phase for this share of its seconds on the device.
LAUNCHING_SHARE = 0.8


@dataclass(kw_only=True, slots=True)
class ExpectedTimes:
    """How long passes should take, from those that counted. The same on every rank, given the records of all ranks.

    _known_times  tokens fed and seconds, of passes without a backward and of those with one
    """

    _known_times: dict[bool, list[tuple[int, float]]] = field(default_factory=dict)

    def is_unexpectedly_slow(self, rank_records: Sequence[PassRecord]) -> bool:
        """Did the host hold up the device in a pass that would count, and that took far longer than expected?"""
        if not _would_count(rank_records) or not any(map(_was_held_up_by_host, rank_records)):
            return False
        expected = self.expect_seconds(_has_backward(rank_records), rank_records[0].input.fed_tokens)
        return expected is None or _find_slowest_seconds(rank_records) > SLOW_FACTOR * expected

    def learn(self, rank_records: Sequence[PassRecord], second_run_seconds: float = math.inf) -> None:
        """Expect of later passes what this one took, or its second run if that was faster, if the pass counts."""
        if _would_count(rank_records):
            known_times = self._known_times.setdefault(_has_backward(rank_records), [])
            seconds = min(second_run_seconds, _find_slowest_seconds(rank_records))
            known_times.append((rank_records[0].input.fed_tokens, seconds))

    def learn_second_run(
        self, record: PassRecord, seconds: float, rank_records: Sequence[PassRecord], world: World
    ) -> PassRecord:
        """Learn from a pass that ran twice. Return this rank's `record` of it with the second run.

        All ranks must call this: they expect of later passes what the second run took on the slowest of them.

        seconds       of the second run on this rank
        rank_records  the records of all ranks from the first run
        """
        rank_seconds = world.gather(seconds)
        self.learn(rank_records, max(rank_seconds))
        return record_second_run(record, rank_seconds, rank_records)

    def expect_seconds(self, has_backward: bool, fed_tokens: int) -> float | None:
        """Return the most seconds that a pass of so many tokens should take: with more tokens, as much longer."""
        known_times = self._known_times.get(has_backward, [])
        return max((seconds * max(1.0, fed_tokens / tokens) for tokens, seconds in known_times if tokens), default=None)


def _has_backward(rank_records: Sequence[PassRecord]) -> bool:
    return "backward" in rank_records[0].cost.phases


def _would_count(rank_records: Sequence[PassRecord]) -> bool:
    return not any(
        record.error is not None or record.warmup or record.traced or record.compilation.new_graphs or record.first_uses
        for record in rank_records
    )


def _find_slowest_seconds(rank_records: Sequence[PassRecord]) -> float:
    """Return the seconds of a pass on its slowest rank, without those of its step, which is not run again."""
    return max(sum(cost.seconds for cost in _list_repeatable_phases(record)) for record in rank_records)


def _was_held_up_by_host(record: PassRecord) -> bool:
    return any(
        cost.host_seconds is not None and cost.host_seconds >= LAUNCHING_SHARE * cost.seconds
        for cost in _list_repeatable_phases(record)
    )


def _list_repeatable_phases(record: PassRecord) -> list[PhaseCost]:
    return [cost for name, cost in record.cost.phases.items() if name != "step"]


def record_second_run(
    record: PassRecord, second_run_seconds: Sequence[float], rank_records: Sequence[PassRecord]
) -> PassRecord:
    """Return a rank's `record` with its second run, marked if the pass was slow only once.

    second_run_seconds  by rank
    rank_records        the records of all ranks from the first run
    """
    record = replace(record, cost=replace(record.cost, seconds_again=second_run_seconds[record.rank]))
    if _find_slowest_seconds(rank_records) > SLOW_FACTOR * max(second_run_seconds):
        return replace(record, first_uses=[*record.first_uses, FirstUse.ONCE.value])
    return record
