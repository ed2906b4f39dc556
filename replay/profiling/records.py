"""Define what a profile says of one pass, in base units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
