"""Find the training passes that no step took, as many before each step: their gradients were cleared before it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from replay.output.text import pluralise
from replay.verdict.recorded_pass import RecordedPass

# Fewer steps than these may lack as many passes each by chance, as where fp16 leaves steps out.
LEAST_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ClearedPasses:
    """The passes between two steps of a job, which are the same number each time.

    num_cleared  those of them that are in no step
    num_passes   all of them
    """

    num_cleared: int
    num_passes: int

    def describe(self) -> str:
        """Say it in a sentence without a full stop."""
        verb, whose = ("is", "its") if self.num_cleared == 1 else ("are", "their")
        return (
            f"{self.num_cleared} of {pluralise(self.num_passes, 'training pass')} before each step {verb} in no step: "
            f"{whose} gradients were cleared before it, as by zero_grad in the loop over micro-batches"
        )


def find_cleared_passes(passes: Iterable[RecordedPass]) -> ClearedPasses | None:
    """Find what each step of the job lacks; None unless each rank's steps lack as many passes, of as many."""
    by_rank: dict[int | None, dict[int, RecordedPass]] = {}
    for recorded in passes:
        if recorded.trains and recorded.forward_number is not None:
            by_rank.setdefault(recorded.rank, {})[recorded.forward_number] = recorded
    found = {number for by_number in by_rank.values() for number in _count_between_steps(by_number)}
    # What comes before the first recorded pass of a rank may not be recorded, so the first step is counted by none.
    steps = [recorded.step_after for by_number in by_rank.values() for recorded in by_number.values()]
    if len({step.number for step in steps if step is not None}) <= LEAST_STEPS or len(found) != 1:
        return None
    [(num_cleared, num_passes)] = found
    return ClearedPasses(num_cleared=num_cleared, num_passes=num_passes) if num_cleared else None


def _count_between_steps(by_number: dict[int, RecordedPass]) -> Iterable[tuple[int, int]]:
    """Yield for each step of a rank but the first how many passes since the one before it took none of, and all."""
    taken: Sequence[Sequence[int]] = sorted(
        sorted(recorded.step_after.passes)
        for recorded in by_number.values()
        if recorded.step_after is not None and recorded.step_after.passes
    )
    for earlier, later in pairwise(taken):
        between = [number for number in by_number if earlier[-1] < number <= later[-1]]
        yield len(set(between) - set(later)), len(between)
