"""Divide the time of a profiled pass among kinds of work.

Every moment belongs to one kind: to the kernel that runs, the one that began first where several do; to exposed
communication where only communication runs; to `gaps` where nothing runs. So the kinds add up to the pass.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

PHASE = "phase: "  # begins the name of the range that a phase of a pass is recorded under


class Work(StrEnum):
    ATTENTION = "attention"
    MATMUL = "matmul"
    ELEMENTWISE = "elementwise"
    COPIES = "copies"
    COMMUNICATION = "communication"
    GAPS = "gaps"


# parts of the names of CUDA kernels and of torch's operators, in the order in which they are tried
PARTS: Mapping[Work, Sequence[str]] = {
    Work.COMMUNICATION: ("nccl", "gloo:", "c10d::", "oneccl"),
    Work.ATTENTION: ("flash", "fmha", "sdpa", "scaled_dot_product", "efficient_attention"),
    Work.MATMUL: (
        "gemm",
        "gemv",
        "nvjet",
        "cutlass",
        "cublas",
        "xmma",
        "splitk",
        "::mm",
        "addmm",
        "bmm",
        "linear",
        "matmul",
    ),
    Work.COPIES: ("memcpy", "memset", "copy", "aten::cat", "catarray", "chunk_cat", "::clone", "::contiguous"),
}


class Interval(NamedTuple):
    """Work from `begin` to `end`, in seconds on one clock."""

    begin: float
    end: float
    work: Work


def work_of(name: str) -> Work:
    """Return the kind of work of a kernel or operator by its name; what no part fits is elementwise."""
    name = name.lower()
    return next((work for work, parts in PARTS.items() if any(part in name for part in parts)), Work.ELEMENTWISE)


def seconds_by_work(intervals: Iterable[Interval], begin: float, end: float) -> dict[Work, float]:
    """Return the seconds of each kind between `begin` and `end`, which add up to `end - begin`."""
    seconds: dict[Work, float] = defaultdict(float)
    clipped = sorted(one._replace(begin=max(one.begin, begin), end=min(one.end, end)) for one in intervals)
    computing = [one for one in clipped if one.work is not Work.COMMUNICATION and one.begin < one.end]
    last = begin
    for one in computing:
        seconds[one.work] += max(0.0, one.end - max(one.begin, last))
        last = max(last, one.end)
    busy = sum(seconds.values())
    communicating = [one for one in clipped if one.work is Work.COMMUNICATION and one.begin < one.end]
    busy_with_both = _covered(sorted([*computing, *communicating]))
    if communicating:
        seconds[Work.COMMUNICATION] = busy_with_both - busy
    seconds[Work.GAPS] = end - begin - busy_with_both
    return dict(seconds)


def hidden_seconds(intervals: Sequence[Interval]) -> float:
    """Return the seconds in which communication ran beside other work."""
    communicating = [one for one in intervals if one.work is Work.COMMUNICATION]
    computing = [one for one in intervals if one.work is not Work.COMMUNICATION]
    return max(0.0, _covered(communicating) + _covered(computing) - _covered(intervals))


def _covered(intervals: Iterable[Interval]) -> float:
    total, last = 0.0, float("-inf")
    for one in sorted(intervals):
        total += max(0.0, one.end - max(one.begin, last))
        last = max(last, one.end)
    return total


def waited_for(seconds_by_rank: Sequence[Sequence[float]]) -> list[float] | None:
    """Return how long each rank waited in collectives, given the seconds of each collective on each rank, in order.

    The rank that comes last to a collective is in it for the shortest time; what another is in it longer, it waited.
    None if the ranks did not run the same number of collectives.
    """
    if len({len(seconds) for seconds in seconds_by_rank}) != 1 or not seconds_by_rank[0]:
        return None
    shortest = [min(one) for one in zip(*seconds_by_rank, strict=True)]
    return [sum(seconds) - sum(shortest) for seconds in seconds_by_rank]


# Define what a profile says of one pass, of its time and of its memory, in base units.


@dataclass(frozen=True, kw_only=True, slots=True)
class LongKernel:
    """All launches of one kernel (on a CPU one operator) for one module."""

    name: str
    module: str | None  # whose forward, or backward, launched it; None: outside all modules that are told apart
    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProfile:
    """What one rank's profile says of the pass; seconds on the device's clock, on a CPU on the host's."""

    seconds: float
    seconds_by_work: Mapping[str, float]  # by values of Work; they add up to `seconds`
    hidden_communication_seconds: float
    longest: Sequence[LongKernel]
    collective_seconds: Sequence[float]  # in order
    timeline: str  # a Chrome trace, file in the log folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The profiled pass, on all ranks."""

    index: int
    source: str
    device: str  # cuda or cpu
    ranks: Sequence[RankProfile]

    @property
    def waits(self) -> Sequence[float] | None:
        """Seconds that each rank waited for another in collectives; None where that cannot be told."""
        return waited_for([rank.collective_seconds for rank in self.ranks]) if len(self.ranks) > 1 else None


class HolderKind(StrEnum):
    """What memory is held for, at the peak of a pass."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer and masters"  # held before the pass, and no weight that the model computes with
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    HEAD = "head and logits"
    COMMUNICATION = "communication"  # gathered weights, gradients on their way
    BACKWARD = "backward"  # gradients of activations, and what operators need meanwhile
    OTHER = "other"
    PROCESS = "the process"  # on a CPU: Python, libraries, and memory that was freed and is kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Blocks that one part of the pass held at its peak."""

    kind: HolderKind
    name: str  # of the module, with `*` for a block's number; or of a place in the code; may be empty
    num_bytes: int
    count: int  # of blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """An option that needs less memory, and the peak that is predicted with it."""

    option: str
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProfile:
    """What held one rank's peak of a pass."""

    peak_bytes: int  # sum of the holders
    counted_bytes: int  # the allocator's own peak; on a CPU that of the process's resident memory
    reserved_bytes: int | None  # held from the driver then; on a CPU the resident peak of the run's own pass, if known
    ran_out: str | None  # the error, if memory did not suffice
    holders: Sequence[Holder]  # the largest first
    snapshot: str  # file in the log folder
    savings: Sequence[Saving] = ()  # the lowest predicted peak first
    rank: int | None = None  # None: its place among the ranks
    device: str = "cuda"  # or cpu
    failed: str | None = None  # another error


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    """What held the peak of a pass, on all ranks, or on those that ran out of memory in it."""

    index: int
    source: str
    ranks: Sequence[MemoryProfile]
    is_once_more: bool = True  # False: it was not run again
