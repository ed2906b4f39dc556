"""Notice what a pass does for the first time in this process: compiling, autotuning, loading.

    first_uses = FirstUses(device)
    first_uses.begin(cudnn_calls)
    ...  # the pass
    first_uses.end()  # ["Triton kernel", "GPU code"]

Each is noticed by a counter, read before and after the pass, outside its clock. What no counter shows (heuristics that
cuBLAS and cuDNN work out, a cache of the job's own) is noticed by running a pass again; see pass_again.py.
"""

import ctypes
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from replay.runlog.records import FirstUse, PassRecord


class FirstUses:
    """Compare counters before and after each pass."""

    def __init__(self, device: torch.device) -> None:
        self._counters: dict[FirstUse, Callable[[], int]] = {
            FirstUse.COMPILED: _nanoseconds_compiling,
            FirstUse.TRITON: lambda: _triton.num_kernels,
            FirstUse.AUTOTUNED: lambda: _triton.num_benchmarks,
            FirstUse.LIBRARY: _num_libraries,
            FirstUse.IMPORT: lambda: len(sys.modules),
        }
        if device.type == "cuda" and torch.cuda.get_allocator_backend() == "native":
            self._counters[FirstUse.RETRY] = lambda: _allocator(device, "num_alloc_retries")
            self._counters[FirstUse.GPU_CODE] = lambda: _bytes_outside_allocator(device)
        self._before: dict[FirstUse, int] = {}
        self._planned: set[Hashable] = set()
        self._calls: set[Hashable] = set()

    def begin(self, cudnn_calls: Iterable[Hashable] = ()) -> None:
        """Read the counters before a pass.

        cudnn_calls  kinds of calls of cuDNN's attention in it; cuDNN has no counter, and plans each kind once
        """
        self._calls = set(cudnn_calls)
        _triton.watch()
        self._before = {use: counter() for use, counter in self._counters.items()}

    def end(self) -> list[str]:
        """Return what was used for the first time since `begin`."""
        after = {use: counter() for use, counter in self._counters.items()}
        if after[FirstUse.COMPILED] < self._before[FirstUse.COMPILED]:
            self._before[FirstUse.COMPILED] = 0  # dynamo was reset, and its clock with it
        uses = {use for use in after if after[use] > self._before[use]}
        if self._calls - self._planned:
            uses.add(FirstUse.PLAN)
        self._planned |= self._calls
        return [use.value for use in FirstUse if use in uses]


def _nanoseconds_compiling() -> int:
    """Return the time in dynamo, inductor and its autotuning; nested parts count more than once."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(sum(utils.cumulative_time_spent_ns.values()))


class _Library(ctypes.Structure):
    """Begin of glibc's and musl's `struct dl_phdr_info`."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("num_headers", ctypes.c_uint16),
        ("num_loaded", ctypes.c_ulonglong),  # libraries that the process has loaded so far
    )


_OnLibrary = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
_iterate = getattr(ctypes.CDLL(None), "dl_iterate_phdr", None)  # macOS has none


def _num_libraries() -> int:
    """Count the shared libraries that the process has loaded; 0 where the system does not say."""
    if _iterate is None:
        return 0
    counts: list[int] = []

    def on_library(library: Any, _size: int, _data: Any) -> int:
        counts.append(library.contents.num_loaded)
        return 1  # every library has the same count

    _iterate(_OnLibrary(on_library), None)
    return counts[0]


def _allocator(device: torch.device, counter: str) -> int:
    return int(torch.cuda.memory_stats_as_nested_dict(device).get(counter, 0))


def _bytes_outside_allocator(device: torch.device) -> int:
    """Return the device's memory in use that torch's allocator does not hold: kernels' code, libraries' workspaces."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


class _TritonWatch:
    """Count the kernels that Triton compiles or loads, and the configurations that its autotuner tries."""

    def __init__(self) -> None:
        self.num_kernels = 0
        self.num_benchmarks = 0
        self._is_watching = False

    def watch(self) -> None:
        """Start counting as soon as something has imported Triton; that import is a first use of its own."""
        if self._is_watching or "triton.runtime.autotuner" not in sys.modules:
            return
        self._is_watching = True
        knobs = getattr(sys.modules.get("triton.knobs"), "runtime", None)
        owner, hook = (knobs, "jit_post_compile_hook") if knobs is not None else (_jit_function(), "compiled_hook")
        if hasattr(owner, hook):
            setattr(owner, hook, self._counting_kernels(getattr(owner, hook)))
        on_load: Any = getattr(knobs, "kernel_load_end_hook", None)
        if hasattr(on_load, "add"):  # a chain since Triton 3.5
            on_load.add(self._counting_kernels(None))
        autotuner = sys.modules["triton.runtime.autotuner"].Autotuner
        if hasattr(autotuner, "_bench"):  # nothing public tells that kernels already compiled are timed again
            autotuner._bench = self._counting_benchmarks(autotuner._bench)

    def _counting_kernels(self, earlier: Callable[..., Any] | None) -> Callable[..., Any]:
        def on_kernel(*arguments: Any, **named: Any) -> Any:
            self.num_kernels += 1
            return None if earlier is None else earlier(*arguments, **named)

        return on_kernel

    def _counting_benchmarks(self, benchmark: Callable[..., Any]) -> Callable[..., Any]:
        def bench(*arguments: Any, **named: Any) -> Any:
            self.num_benchmarks += 1
            return benchmark(*arguments, **named)

        return bench


def _jit_function() -> Any:
    """Return Triton's class of kernels, which had the hooks before 3.4."""
    return getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)


_triton = _TritonWatch()


# Find passes that were slow only the first time, by running them again.
#
# Counters do not show every first use: heuristics that cuBLAS or cuDNN work out for a shape, caches of the job's own
# code. They hold up the host, and the device waits for it. So a pass is run again, outside the clock, if on CUDA the
# device waited for the host and the pass took far longer than passes like it. If it is as slow again, it counts: it is
# slow.

FACTOR = 1.5  # slower than expected, or than the second run
WAITED = 0.8  # of a phase's seconds on the device, in which the host was still launching it


@dataclass(kw_only=True, slots=True)
class Expectations:
    """What passes took that count, by which phases they had. The same on every rank, given the records of all ranks."""

    _known: dict[bool, list[tuple[int, float]]] = field(default_factory=dict)  # fed tokens, seconds

    def is_far_off(self, ranks: Sequence[PassRecord]) -> bool:
        """Did the host hold up the device in a pass that would count, and that took far longer than expected?"""
        if not _would_count(ranks) or not any(map(_host_held_up, ranks)):
            return False
        expected = self._expected("backward" in ranks[0].cost.phases, ranks[0].input.fed_tokens)
        return expected is None or _seconds(ranks) > FACTOR * expected

    def learn(self, ranks: Sequence[PassRecord], seconds_again: float = math.inf) -> None:
        """Expect of later passes what this one took, or its second run, if it is one that counts."""
        if _would_count(ranks):
            known = self._known.setdefault("backward" in ranks[0].cost.phases, [])
            known.append((ranks[0].input.fed_tokens, min(seconds_again, _seconds(ranks))))

    def _expected(self, has_backward: bool, fed_tokens: int) -> float | None:
        """Return the most that a pass of so many tokens should take: more tokens, as much longer."""
        known = self._known.get(has_backward, [])
        return max((seconds * max(1.0, fed_tokens / tokens) for tokens, seconds in known if tokens), default=None)


def _would_count(ranks: Sequence[PassRecord]) -> bool:
    return not any(
        r.error is not None or r.warmup or r.traced or r.compilation.new_graphs or r.first_uses for r in ranks
    )


def _seconds(ranks: Sequence[PassRecord]) -> float:
    """Return the seconds of a pass without those of its step, which is not run again."""
    return max(sum(cost.seconds for name, cost in record.cost.phases.items() if name != "step") for record in ranks)


def _host_held_up(record: PassRecord) -> bool:
    phases = [cost for name, cost in record.cost.phases.items() if name != "step"]
    return any(cost.host_seconds is not None and cost.host_seconds >= WAITED * cost.seconds for cost in phases)


def with_second_run(record: PassRecord, seconds: Sequence[float], ranks: Sequence[PassRecord]) -> PassRecord:
    """Return a rank's `record` with its second run, marked if the pass was slow only once.

    seconds  of the second run, on each rank
    """
    record = replace(record, cost=replace(record.cost, seconds_again=seconds[record.rank]))
    if _seconds(ranks) > FACTOR * max(seconds):
        return replace(record, first_uses=[*record.first_uses, FirstUse.ONCE.value])
    return record
