"""Measure seconds and memory peaks of the phases of a pass, on CUDA and on a CPU. The only caller of `synchronize`.

    meter = Meter.for_device(device)
    meter.start_pass()
    with meter.measure("forward"):
        ...
    costs, seconds = meter.end_pass()  # {"forward": PhaseCost(...)}

On CUDA a phase's seconds are measured between two events on the stream, so a phase is charged for its own kernels even
if the host runs ahead; the host waits for the device before and after the pass. On a CPU they are wall time.
"""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.profiler import record_function

from replay.profiling.profile_records import PHASE_PREFIX
from replay.runlog.records import PhaseCost


class MemoryCounts(NamedTuple):
    allocated_bytes: int | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None


class Instrument(Protocol):
    """Clock and memory counters of one device.

    memory_kind      what the byte counts are of
    is_asynchronous  the device works on its queue while the host runs ahead
    """

    memory_kind: str
    is_asynchronous: bool

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""

    def mark(self) -> Any:
        """Return a point on the device's timeline, without waiting for the device."""

    def measure_seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks. Call it after `synchronize`."""

    def reset_peak(self) -> None:
        """Begin to count the memory peak anew."""

    def read_memory(self) -> MemoryCounts:
        """Return the memory in use now, and the peak since the reset."""


class CudaInstrument:
    memory_kind = "cuda allocator"
    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def measure_seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def read_memory(self) -> MemoryCounts:
        # One call for all numbers: each of torch's getters for a single number reads and flattens the whole tree.
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return MemoryCounts(allocated["current"], allocated["peak"], reserved["peak"])


class HostInstrument:
    """Measure the process's resident set: the peak of a phase if Linux can reset it, else the peak since the start."""

    is_asynchronous = False

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self.clear_refs = proc / "clear_refs"
        self.status = proc / "status"
        try:
            self.clear_refs.write_text("5")
            self.memory_kind = "resident set (VmHWM)"
        except OSError:
            self.memory_kind = "resident set since process start"

    def synchronize(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def measure_seconds(self, start: float, end: float) -> float:
        return end - start

    def reset_peak(self) -> None:
        if self.memory_kind == "resident set (VmHWM)":
            # proc(5): writing 5 resets VmHWM, the peak, to the current resident set.
            self.clear_refs.write_text("5")

    def read_memory(self) -> MemoryCounts:
        try:
            lines = self.status.read_text().splitlines()
        except OSError:
            # getrusage(2) tells `ru_maxrss` in KiB on Linux and in bytes on macOS.
            unit_bytes = 1 if sys.platform == "darwin" else 1024
            return MemoryCounts(None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes, None)
        kibibytes = {
            name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.strip()
        }
        return MemoryCounts(int(kibibytes["VmRSS"]) * 1024, int(kibibytes["VmHWM"]) * 1024, None)


class _MeasuredPhase(NamedTuple):
    """The marks at both ends of a phase, the memory at its end, and how long the host took to queue its work."""

    start: Any
    end: Any
    memory: MemoryCounts
    host_seconds: float


class Meter:
    """Measure one pass after another on one device."""

    def __init__(self, instrument: Instrument) -> None:
        self._instrument = instrument
        self._phases: dict[str, _MeasuredPhase] = {}
        self._pass_start_seconds = 0.0

    @classmethod
    def for_device(cls, device: torch.device) -> "Meter":
        match device.type:
            case "cuda":
                return cls(CudaInstrument(device))
            case "cpu":
                return cls(HostInstrument())
            case other:
                raise ValueError(f"a pass can be measured on cuda and cpu, not on {other}")

    @property
    def memory_kind(self) -> str:
        """What the byte counts of a phase measure."""
        return self._instrument.memory_kind

    def read_held_bytes(self) -> int | None:
        """Return the bytes that are in use now; None if the system tells peaks alone."""
        return self._instrument.read_memory().allocated_bytes

    def read_peak_bytes(self) -> int:
        """Return the peak since the latest phase began."""
        return self._instrument.read_memory().peak_allocated_bytes

    def start_pass(self) -> None:
        """Start the clock after the device has finished earlier work, so that this pass is not charged for it."""
        self._phases = {}
        self._instrument.synchronize()
        self._pass_start_seconds = time.perf_counter()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the time inside the block as the phase `name`, also if it raises. A profiler sees it as a range."""
        assert name not in self._phases, f"{name} was measured twice in one pass"
        self._instrument.reset_peak()
        with record_function(PHASE_PREFIX + name):
            start, start_seconds = self._instrument.mark(), time.perf_counter()
            try:
                yield
            finally:
                # Read before the end mark is made, so that the host is not charged for that.
                host_seconds = time.perf_counter() - start_seconds
                end = self._instrument.mark()
                self._phases[name] = _MeasuredPhase(start, end, self._instrument.read_memory(), host_seconds)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time inside the block from the measurement; use it between two phases."""
        self._instrument.synchronize()
        start = time.perf_counter()
        yield
        self._instrument.synchronize()
        self._pass_start_seconds += time.perf_counter() - start

    def end_pass(self) -> tuple[dict[str, PhaseCost], float]:
        """Wait for the device. Return the cost of each phase, and the seconds since `start_pass`, without pauses."""
        self._instrument.synchronize()
        seconds = time.perf_counter() - self._pass_start_seconds
        costs = {
            name: PhaseCost(
                seconds=self._instrument.measure_seconds(phase.start, phase.end),
                **phase.memory._asdict(),
                host_seconds=phase.host_seconds if self._instrument.is_asynchronous else None,
            )
            for name, phase in self._phases.items()
        }
        return costs, seconds
