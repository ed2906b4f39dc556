"""Tell from the weights behind a step whether the ranks of a job, which hold whole models, took it together.

Ranks that step with gradients of their own drift apart. Where they had unequal gradients when these were recorded, and
have equal weights all the same, they averaged gradients, or weights, behind that moment.
"""

from collections.abc import Iterable

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
