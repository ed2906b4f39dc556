"""Define what a profile says of one pass, of its time and of its memory, in base units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from replay.profiling.shares import waited_for


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
