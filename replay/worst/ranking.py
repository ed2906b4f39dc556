"""Say whether a predicted peak fits the memory of this device, and how much would be left."""

from dataclasses import dataclass
from enum import StrEnum

from replay.inspection.shapes import Shape
from replay.prediction.costs import MOST_OF_PEAK, Cost, Error
from replay.worst.memory import Memory


class Fits(StrEnum):
    YES = "fits"
    PERHAPS = "too near to tell"
    NO = "does not fit"
    UNKNOWN = "not known"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    shape: Shape
    cost: Cost  # predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The memory here, and what lies between a predicted peak and it."""

    memory: Memory | None  # None: the system does not say
    overhead: float  # what the allocator reserves, as a share of what it gives out
    error: Error | None
    ran_out_at: float | None = None  # the least predicted peak of an input that ran out of memory when it was measured

    def has_shown(self, peak: float) -> bool:
        """Did an input with no higher peak run out of memory here?"""
        return self.ran_out_at is not None and peak >= self.ran_out_at

    def needed(self, peak: float, num_ranks: int) -> float:
        """Return the bytes that ranks with this peak take of the memory that each, or all, have here."""
        is_shared = self.memory is not None and self.memory.is_shared
        return peak * self.overhead * (num_ranks if is_shared else 1)

    def fits(self, peak: float, num_ranks: int, least: float | None = None) -> Fits:
        """Judge a peak, or one between `least` and `peak`, which may be off by the error."""
        if self.has_shown(peak):
            return Fits.NO
        if self.memory is None:
            return Fits.UNKNOWN
        off = MOST_OF_PEAK if self.error is None else self.error.most_of_peak
        if self.needed(peak, num_ranks) * (1 + off) <= self.memory.free_bytes:
            return Fits.YES
        if self.needed(peak if least is None else least, num_ranks) * (1 - off) > self.memory.free_bytes:
            return Fits.NO
        return Fits.PERHAPS
