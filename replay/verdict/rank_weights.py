"""Tell from the weights behind a step whether the ranks of a job, which hold whole models, took it together.

Ranks that step with gradients of their own drift apart. Where they had unequal gradients when these were recorded, and
have equal weights all the same, they averaged gradients, or weights, behind that moment.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replay.verdict.recorded_pass import RecordedPass
from replay.verdict.weight_movement import are_same, did_most_move


def have_same_weights_after(passes: Iterable[RecordedPass], step: int) -> bool | None:
    """Tell whether the ranks have the same weights at each pass behind a step that moved them.

    None: no pass behind it tells. The job's first step has number 0.
    """
    by_step: dict[int, dict[int | None, dict[tuple[str, int], tuple[float, ...]]]] = {}
    for recorded in passes:
        if recorded.num_steps_before is not None and not recorded.weight_comparison.is_sharded:
            samples = by_step.setdefault(recorded.num_steps_before, {}).setdefault(recorded.rank, {})
            samples.update({(sample.name, sample.start): sample.values for sample in recorded.samples})
    before = by_step.get(step, {})
    has_moved = False
    for number, by_rank in by_step.items():
        if number <= step or len(by_rank) < 2:
            continue
        rank, first = next(iter(by_rank.items()))
        if not all(are_same(first, samples) for samples in by_rank.values()):
            return False
        has_moved |= did_most_move(before.get(rank, {}), first)
    return True if has_moved else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDifference:
    """An element of a weight that two ranks began with other values of, though each holds a whole model.

    step    the number of steps that the job had taken then
    values  on the first of the ranks and on the second
    """

    step: int
    name: str
    element: int
    ranks: tuple[int | None, int | None]
    values: tuple[float, float]

    def describe(self) -> str:
        (first, other), (value, other_value) = self.ranks, self.values
        return (
            f"element {self.element} of {self.name} is {value:.6g} on rank {first}, {other_value:.6g} on rank {other}, "
            f"before step {self.step + 1}"
        )


def find_ranks_that_began_apart(passes: Iterable[RecordedPass]) -> RankDifference | None:
    """Find a weight that ranks began with other values of, in the first of these passes."""
    whole = [
        recorded
        for recorded in passes
        if recorded.num_steps_before is not None and not recorded.weight_comparison.is_sharded
    ]
    first = min((recorded.num_steps_before or 0 for recorded in whole), default=0)
    seen: dict[tuple[str, str, int], tuple[int | None, Sequence[float]]] = {}
    for recorded in whole:
        for sample in recorded.samples if recorded.num_steps_before == first else ():
            key = sample.name, sample.dtype, sample.start
            rank, values = seen.setdefault(key, (recorded.rank, sample.values))
            for place, (value, other) in enumerate(zip(values, sample.values, strict=False)):
                if value != other and rank != recorded.rank:
                    return RankDifference(
                        step=first,
                        name=sample.name,
                        element=sample.start + place,
                        ranks=(rank, recorded.rank),
                        values=(value, other),
                    )
    return None
