"""Measure a few inputs in a replay of its own, and say whether a predicted peak fits into this machine's memory.

What the replay wrote counts, however it ended.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from replay.campaign.campaign import Campaign, PlannedRun
from replay.options.spec import InputOrder, ReplaySpec
from replay.profiling.prediction import MOST_OF_PEAK, Cost, InputShape, PredictionErrors
from replay.runlog.reader import read_run_below
from replay.runlog.records import PassRecord
from replay.runlog.summary import find_reason_to_leave_out

# Repetitions of an input that are measured.
NUM_COUNTING = 3
# Passes. The second one holds the gradient of the first, as every later one does, so more tell nothing new.
MOST_IN_A_WINDOW = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuringRun:
    """What a run measured, by the place of an input among those that it was given."""

    costs: Mapping[int, Cost]
    # On the rank that is fed the most.
    fed_tokens: Mapping[int, int]
    # Errors of passes, in words.
    failed: Mapping[int, str]
    # The most that the allocator reserved, as a multiple of the most that it gave out.
    overhead: float
    # Why the run ended early; empty if it did not.
    ended: str
    # Folder of the run's log; empty if the run did not get that far.
    log: str


def measure(
    campaign: Campaign[Any], spec: ReplaySpec, numbers: Sequence[int], *, num_data_ranks: int = 1, window: int = 1
) -> MeasuringRun:
    """Replay the inputs with these numbers in this order, each a few times in a row, unless `campaign` knows the run.

    window  passes in one gradient

    A repetition counts if it ends an accumulation window and does nothing for the first time, such as loading a
    kernel. If no repetition is so, the last one counts. The seconds of an input are the least of its repetitions,
    since other processes can only add to them. Its peak is the highest of them. Of several ranks the slowest and the
    largest count.
    """
    window = min(window, MOST_IN_A_WINDOW)
    num_repeats = NUM_COUNTING * window if window > 1 else 1 + NUM_COUNTING
    picks = [str(number) for number in numbers for _ in range(num_repeats)]
    run = replace(
        spec,
        actor=replace(spec.actor, grad_accumulation=window),
        inputs=replace(spec.inputs, order=InputOrder.RECORDED, pick_inputs=",".join(picks)),
        measure=replace(spec.measure, noise_floor=False),
    )
    num_processes = num_data_ranks * spec.actor.parallel.tp * spec.actor.parallel.ring
    child = campaign.run(PlannedRun(home="runs", spec=run, num_processes=num_processes))
    folder, run_file, records = read_run_below(child.logs)
    counting: dict[int, list[list[PassRecord]]] = {}
    for index, ranks in _whole_passes(records, num_processes):
        if (index + 1) % window == 0:
            counting.setdefault(index // num_repeats, []).append(ranks)
    failed: dict[int, str] = {}
    for record in records:
        if record.error is not None:
            failed.setdefault(record.index // num_repeats, f"{record.error_type}: {record.error}")
    is_whole = child.exit_code in (0, 1) and run_file is not None and run_file.exit_code is not None
    return MeasuringRun(
        costs={place: _combine_repetitions(repeated) for place, repeated in counting.items()},
        fed_tokens={
            place: max(record.input.fed_tokens for record in repeated[-1]) for place, repeated in counting.items()
        },
        failed=failed,
        overhead=_compute_overhead(records),
        ended="" if is_whole else child.error or f"no end in its log, see {child.output}",
        log=str(folder) if folder is not None else "",
    )


def _whole_passes(records: Sequence[PassRecord], num_ranks: int) -> Iterator[tuple[int, list[PassRecord]]]:
    """Yield the passes that all ranks made without an error: index and records, in order."""
    passes: dict[int, list[PassRecord]] = {}
    for record in records:
        passes.setdefault(record.index, []).append(record)
    for index, ranks in sorted(passes.items()):
        if len(ranks) == num_ranks and all(record.error is None for record in ranks):
            yield index, ranks


def _combine_repetitions(repeated: Sequence[Sequence[PassRecord]]) -> Cost:
    clean = [ranks for ranks in repeated if find_reason_to_leave_out(ranks) is None] or repeated[-1:]
    phases = clean[-1][0].cost.phases
    return Cost(
        seconds={
            name: min(max(record.cost.phases[name].seconds for record in ranks) for ranks in clean) for name in phases
        },
        peaks={
            name: float(max(record.cost.phases[name].peak_allocated_bytes for ranks in clean for record in ranks))
            for name in phases
        },
    )


def _compute_overhead(records: Sequence[PassRecord]) -> float:
    costs = [cost for record in records for cost in record.cost.phases.values()]
    reserved = max((cost.peak_reserved_bytes or 0 for cost in costs), default=0)
    return max(1.0, reserved / max((cost.peak_allocated_bytes for cost in costs), default=1)) if reserved else 1.0


# Seconds in which the process that asks the GPU for its memory has to answer.
TIMEOUT_SECONDS = 120.0
# A process of its own asks, so that this one holds no memory of the GPU. It multiplies first: the memory that every
# process needs for CUDA and its libraries is then not counted as free.
_PROGRAM = """
import json, torch
if torch.cuda.is_available():
    torch.ones(1, device="cuda") @ torch.ones(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    print(json.dumps({"device": torch.cuda.get_device_name(), "free": free, "total": total}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory that a new process may fill. On CUDA its context and what others hold are not in `free_bytes`."""

    device: str
    free_bytes: int
    total_bytes: int
    # Whether the ranks on this machine share the memory, as they do on a CPU.
    is_shared: bool


def read_device_memory() -> DeviceMemory | None:
    """Return the memory of the first GPU, asked in a process of its own, or the RAM; None if that is not known."""
    import torch

    if torch.cuda.is_available():
        process = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        try:
            memory = json.loads(process.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            return None
        return DeviceMemory(
            device=memory["device"], free_bytes=memory["free"], total_bytes=memory["total"], is_shared=False
        )
    return read_host_memory()


def read_host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> DeviceMemory | None:
    """Return the RAM, within the limit of this process's control group; None if it is not known."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(size.split()[0]) * 1024 for name, _, size in (line.partition(":") for line in lines) if size}
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    limit, used = _read_number(cgroup / "memory.max"), _read_number(cgroup / "memory.current")
    if limit is not None and used is not None:
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return DeviceMemory(device="CPU", free_bytes=free, total_bytes=total, is_shared=True)


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    # There is no such file, or no limit.
    except (OSError, ValueError):
        return None


class Fits(StrEnum):
    YES = "fits"
    PERHAPS = "too near to tell"
    NO = "does not fit"
    UNKNOWN = "not known"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedInput:
    shape: InputShape
    # The predicted cost.
    cost: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRoom:
    """The memory here, and what lies between a predicted peak and it."""

    # None where the system does not tell it.
    memory: DeviceMemory | None
    # What the allocator reserves, as a multiple of what it gives out.
    overhead: float
    error: PredictionErrors | None
    # The lowest predicted peak of the measured inputs that ran out of memory.
    ran_out_at: float | None = None

    def is_known_to_fail(self, peak: float) -> bool:
        """Did an input with no higher peak run out of memory here?"""
        return self.ran_out_at is not None and peak >= self.ran_out_at

    def count_needed_bytes(self, peak: float, num_ranks: int) -> float:
        """Return the bytes that ranks with this peak take of the memory that each, or all, have here."""
        is_shared = self.memory is not None and self.memory.is_shared
        return peak * self.overhead * (num_ranks if is_shared else 1)

    def fits(self, peak: float, num_ranks: int, least: float | None = None) -> Fits:
        """Judge a peak, or one between `least` and `peak`, which may be off by the error."""
        if self.is_known_to_fail(peak):
            return Fits.NO
        if self.memory is None:
            return Fits.UNKNOWN
        off = MOST_OF_PEAK if self.error is None else self.error.most_of_peak
        if self.count_needed_bytes(peak, num_ranks) * (1 + off) <= self.memory.free_bytes:
            return Fits.YES
        if self.count_needed_bytes(peak if least is None else least, num_ranks) * (1 - off) > self.memory.free_bytes:
            return Fits.NO
        return Fits.PERHAPS
