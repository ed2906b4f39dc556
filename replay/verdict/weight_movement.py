"""Tell from what a job's passes sampled of its weights whether the weights moved.

`pair_with_first` gives the pairs of samples. Three questions are asked of them, and each has a threshold of its own:

* `did_any_move`: may the samples of several passes be merged, as they are of the same weights? One weight that moved
  forbids it. A weight has moved if it was the replay's in one pass and was not in another. So a difference that storing
  it in another dtype explains does not count (`is_equal_but_for_dtype`).
* `did_most_move`, `are_same`, `did_come_back`: did training move the weights between two steps, and are they back? A
  few parameters may be frozen, or have no gradient, so more than half have to have moved, and at least LEAST_SAMPLES
  have to be sampled at both steps. A value that differs at all has moved: both are the job's, and of one dtype.
* `find_moved_parameters`: which parameters moved behind some step? Each tells for itself, so one pair is enough.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from replay.verdict.recorded_pass import RecordedPass

# So many parameters have to be sampled at both of two steps before they tell whether the weights moved between them.
LEAST_SAMPLES = 4

# Values of neighbouring elements, by the parameter's name and the number of the first element.
Samples = Mapping[tuple[str, int], Sequence[float]]
WeightT = TypeVar("WeightT", bound=Hashable)
SampleT = TypeVar("SampleT")


def pair_with_first(samples: Iterable[tuple[WeightT, SampleT]]) -> Iterator[tuple[WeightT, SampleT, SampleT]]:
    """Yield each weight with its first sample and a later one, for every later one."""
    first_samples: dict[WeightT, SampleT] = {}
    for weight, sample in samples:
        if weight in first_samples:
            yield weight, first_samples[weight], sample
        else:
            first_samples[weight] = sample


def did_any_move(passes: Iterable[RecordedPass]) -> bool:
    """Tell whether a parameter of a rank was the replay's in one of these passes, and another in a second one."""
    comparisons = (
        ((recorded.rank, name), name in recorded.weight_comparison.differing)
        for recorded in passes
        for name in recorded.weight_comparison.compared
    )
    return any(differs != differed_first for _, differed_first, differs in pair_with_first(comparisons))


def did_most_move(earlier: Samples, later: Samples) -> bool:
    """Tell whether training moved most of the weights that were sampled at two steps of one rank."""
    num_moved, num_pairs = _count_moved(earlier, later)
    return 2 * num_moved > num_pairs >= LEAST_SAMPLES


def are_same(earlier: Samples, later: Samples) -> bool:
    """Tell whether all weights that were sampled at two steps of one rank are the same."""
    num_moved, num_pairs = _count_moved(earlier, later)
    return not num_moved and num_pairs >= LEAST_SAMPLES


def did_come_back(earlier: Samples, later: Samples, between: Iterable[Samples]) -> bool:
    """Tell whether most of the weights that are again those of an earlier step were other ones at a step in between.

    Weights that never moved are no sign of it, whatever others did: some may be frozen for a time.
    """
    return are_same(earlier, later) and any(
        did_most_move(earlier, {weight: values for weight, values in samples.items() if weight in later})
        for samples in between
    )


def _count_moved(earlier: Samples, later: Samples) -> tuple[int, int]:
    """Count the samples that differ, and those that were taken at both steps."""
    differences = [
        tuple(before) != tuple(after) for _, before, after in pair_with_first(chain(earlier.items(), later.items()))
    ]
    return sum(differences), len(differences)


def find_moved_parameters(passes: Sequence[RecordedPass]) -> tuple[list[str], list[str]]:
    """Name the parameters that were sampled before and after a step, or twice where no step was recorded.

    Returns those whose samples differ, and those whose samples are the same.
    """
    has_stepped = any(recorded.num_steps_before for recorded in passes)
    samples = (
        ((recorded.rank, sample.name, sample.start), (recorded.num_steps_before, tuple(sample.values)))
        for recorded in passes
        for sample in recorded.samples
    )
    moved: dict[str, None] = {}
    unmoved: dict[str, None] = {}
    for (_, name, _), (step_before, before), (step_after, after) in pair_with_first(samples):
        if step_before != step_after or not has_stepped:
            (moved if before != after else unmoved)[name] = None
    return list(moved), [name for name in unmoved if name not in moved]
