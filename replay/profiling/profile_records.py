"""Define what a profile holds of a pass, its time and its memory, and divide the time among kinds of work.

Every moment belongs to one kind: to the kernel that runs, the one that began first where several do; to exposed
communication where only communication runs; to `gaps` where nothing runs. So the kinds add up to the pass.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

# The name of the range under which a phase of a pass is recorded begins with this.
PHASE_PREFIX = "phase: "


class Work(StrEnum):
    ATTENTION = "attention"
    MATMUL = "matmul"
    ELEMENTWISE = "elementwise"
    COPIES = "copies"
    COMMUNICATION = "communication"
    GAPS = "gaps"


# A kernel of CUDA, or an operator of torch, whose name contains one of these parts is this kind of work. They are
# tried in this order: a name may contain parts of several.
NAME_PARTS: Mapping[Work, Sequence[str]] = {
    Work.COMMUNICATION: ("nccl", "gloo:", "c10d::", "oneccl"),
    Work.ATTENTION: ("flash", "fmha", "sdpa", "scaled_dot_product", "efficient_attention", "flex_attention"),
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


def classify_work(name: str) -> Work:
    """Return the kind of work of a kernel or operator by its name; what no part fits is elementwise."""
    name = name.lower()
    return next((work for work, parts in NAME_PARTS.items() if any(part in name for part in parts)), Work.ELEMENTWISE)


def divide_seconds(intervals: Iterable[Interval], begin: float, end: float) -> dict[Work, float]:
    """Return the seconds of each kind between `begin` and `end`, which add up to `end - begin`."""
    seconds: dict[Work, float] = defaultdict(float)
    clipped = sorted(
        interval._replace(begin=max(interval.begin, begin), end=min(interval.end, end)) for interval in intervals
    )
    clipped = [interval for interval in clipped if interval.begin < interval.end]
    computing = [interval for interval in clipped if interval.work is not Work.COMMUNICATION]
    last_end = begin
    for interval in computing:
        seconds[interval.work] += max(0.0, interval.end - max(interval.begin, last_end))
        last_end = max(last_end, interval.end)
    busy = sum(seconds.values())
    communicating = [interval for interval in clipped if interval.work is Work.COMMUNICATION]
    busy_with_both = _measure_union(sorted([*computing, *communicating]))
    if communicating:
        seconds[Work.COMMUNICATION] = busy_with_both - busy
    seconds[Work.GAPS] = end - begin - busy_with_both
    return dict(seconds)


def measure_hidden_seconds(intervals: Sequence[Interval]) -> float:
    """Return the seconds in which communication ran beside other work."""
    communicating = [interval for interval in intervals if interval.work is Work.COMMUNICATION]
    computing = [interval for interval in intervals if interval.work is not Work.COMMUNICATION]
    return max(0.0, _measure_union(communicating) + _measure_union(computing) - _measure_union(intervals))


def _measure_union(intervals: Iterable[Interval]) -> float:
    total, last_end = 0.0, float("-inf")
    for interval in sorted(intervals):
        total += max(0.0, interval.end - max(interval.begin, last_end))
        last_end = max(last_end, interval.end)
    return total


def find_waits(seconds_by_rank: Sequence[Sequence[float]]) -> list[float] | None:
    """Return how long each rank waited in collectives, given the seconds of each collective on each rank, in order.

    The rank that comes last to a collective is in it for the shortest time; what another is in it longer, it waited.
    None if the ranks did not run the same number of collectives.
    """
    if len({len(seconds) for seconds in seconds_by_rank}) != 1 or not seconds_by_rank[0]:
        return None
    shortest = [min(seconds) for seconds in zip(*seconds_by_rank, strict=True)]
    return [sum(seconds) - sum(shortest) for seconds in seconds_by_rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class LongKernel:
    """All launches of one kernel (on a CPU one operator) for one module."""

    name: str
    # The module whose forward or backward launched it. None: outside all modules that are told apart.
    module: str | None
    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProfile:
    """What one rank's profile says of the pass; seconds on the device's clock, on a CPU on the host's."""

    seconds: float
    # By the values of Work. They add up to `seconds`.
    seconds_by_work: Mapping[str, float]
    hidden_communication_seconds: float
    longest: Sequence[LongKernel]
    # In the order in which the collectives ran.
    collective_seconds: Sequence[float]
    # The file of a Chrome trace in the log folder.
    timeline: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The profiled pass, on all ranks."""

    index: int
    source: str
    # "cuda" or "cpu".
    device: str
    ranks: Sequence[RankProfile]

    @property
    def waits(self) -> Sequence[float] | None:
        """Seconds that each rank waited for another in collectives; None where that cannot be told."""
        return find_waits([rank.collective_seconds for rank in self.ranks]) if len(self.ranks) > 1 else None


class HolderKind(StrEnum):
    """What memory is held for, at the peak of a pass."""

    WEIGHTS = "weights"
    # Held before the pass, and no weight that the model computes with.
    OPTIMIZER = "optimizer and masters"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    HEAD = "head and logits"
    # Gathered weights, and gradients on their way.
    COMMUNICATION = "communication"
    # Gradients of activations, and what operators need meanwhile.
    BACKWARD = "backward"
    OTHER = "other"
    # On a CPU: Python, libraries, and memory that was freed and is kept.
    PROCESS = "the process"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Blocks that one part of the pass held at its peak."""

    kind: HolderKind
    # The name of a module, with `*` for a block's number, or of a place in the code. It may be empty.
    name: str
    num_bytes: int
    # The number of blocks.
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """An option that needs less memory, and the peak that is predicted with it."""

    option: str
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProfile:
    """What held one rank's peak of a pass."""

    # The sum of the holders.
    peak_bytes: int
    # The allocator's own peak; on a CPU that of the process's resident memory.
    counted_bytes: int
    # What the allocator held from the driver at the peak; on a CPU the resident peak of the run's own pass, if known.
    reserved_bytes: int | None
    # The error, if memory did not suffice.
    ran_out: str | None
    # The largest first.
    holders: Sequence[Holder]
    # The file in the log folder.
    snapshot: str
    # The lowest predicted peak first.
    savings: Sequence[Saving] = ()
    # None: its place among the ranks.
    rank: int | None = None
    # "cuda" or "cpu".
    device: str = "cuda"
    # An error other than that memory did not suffice.
    failed: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    """What held the peak of a pass, on all ranks, or on those that ran out of memory in it."""

    index: int
    source: str
    ranks: Sequence[MemoryProfile]
    # Whether the pass was run again for this.
    is_once_more: bool = True
