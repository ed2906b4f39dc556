"""Find the weights that a job changed though it trains them not: what is frozen stays as it is, whatever steps do.

A recording samples a few frozen parameters anew behind each step. Code that merges an adapter, casts or pushes weights
in place, averages or loads them changes those, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from replay.tolerances.difference import FP32_SPACING
from replay.verdict.findings import VerdictSettings
from replay.verdict.gradient_findings import ComparedPass
from replay.verdict.recorded_pass import RecordedPass, match_parameter_name

# An adapter that is merged and unmerged in fp32 moves a weight by so much of its neighbours' size, and does no harm.
LEAST_CHANGE = 64 * FP32_SPACING


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenChange:
    """Neighbouring elements of a frozen parameter that are other ones behind a step of the job than before.

    start   the number of the first element
    before  in the last sample before the change, which was taken when the job had taken `step_before` steps
    after   in the first sample behind it, when the job had taken `step_after` steps
    """

    name: str
    dtype: str
    start: int
    step_before: int
    step_after: int
    before: Sequence[float]
    after: Sequence[float]

    @property
    def largest(self) -> tuple[int, float, float]:
        """The number of the element that changed most, and its values."""
        pairs = list(zip(self.before, self.after, strict=True))
        place = max(range(len(pairs)), key=lambda place: abs(pairs[place][1] - pairs[place][0]))
        return self.start + place, *pairs[place]


def find_frozen_changes(passes: Sequence[ComparedPass], settings: VerdictSettings) -> list[FrozenChange]:
    """Find the changes of parameters that neither the job nor the replay trains in any pass; in the order of steps.

    None are found where job and replay may not train the same parameters.
    """
    if settings.follows_frozen or settings.has_other_trained_parameters:
        return []
    trained_here = {
        name
        for compared in passes
        if compared.replayed.gradient is not None
        for name in compared.replayed.gradient.norms
    }
    sampled = [
        compared.recorded
        for compared in passes
        if compared.recorded.samples and compared.recorded.num_steps_before is not None
    ]
    if not all(_trains_as_many(recorded, len(trained_here)) for recorded in sampled):
        return []
    trained_in_job = _list_trained_in_job(passes)
    last: dict[tuple[int | None, str, int], tuple[int, str, Sequence[float]]] = {}
    changes: list[FrozenChange] = []
    for recorded in sorted(sampled, key=lambda recorded: recorded.num_steps_before or 0):
        step = recorded.num_steps_before or 0
        for sample in recorded.samples:
            if sample.name in trained_in_job or match_parameter_name(sample.name, trained_here) is not None:
                continue
            key = recorded.rank, sample.name, sample.start
            step_before, dtype, before = last.get(key, (step, sample.dtype, sample.values))
            last[key] = step, sample.dtype, sample.values
            if (
                step_before < step
                and dtype == sample.dtype
                and len(before) == len(sample.values)
                and _have_changed(before, sample.values)
            ):
                changes.append(
                    FrozenChange(
                        name=sample.name,
                        dtype=dtype,
                        start=sample.start,
                        step_before=step_before,
                        step_after=step,
                        before=before,
                        after=sample.values,
                    )
                )
    return changes


def _trains_as_many(recorded: RecordedPass, num_trained_here: int) -> bool:
    return recorded.num_frozen == recorded.weight_comparison.num_parameters - num_trained_here > 0


def _list_trained_in_job(passes: Sequence[ComparedPass]) -> set[str]:
    steps = [compared.recorded.step_after for compared in passes if compared.recorded.step_after is not None]
    return {
        *(sample.name for step in steps if step.gradients is not None for sample in step.gradients.samples),
        *(signature.name for step in steps for signature in step.signatures),
        *(name for step in steps for name in step.without_gradient),
    }


def _have_changed(before: Sequence[float], after: Sequence[float]) -> bool:
    if not all(map(math.isfinite, (*before, *after))):
        return False
    size = max(map(abs, (*before, *after)), default=0.0)
    return any(abs(new - old) > LEAST_CHANGE * size for old, new in zip(before, after, strict=True))
