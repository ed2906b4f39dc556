"""Hold the weights that a replay has behind the job's steps against those that the job had there.

A capture samples the weights before each pass, and the replay takes the same elements of what its optimizer steps. What
a step did is how far an element is from where the replay began. An update that is not the optimizer's own (an average
swapped in, weights reloaded, steps left out or taken twice) shows at the step where it happens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from replay.tolerances.difference import relative_difference, roundoff
from replay.tolerances.job_bounds import (
    GRADIENT,
    HIDING_BOUND,
    LEAST_RMS,
    MEDIAN_UPDATE_BOUND,
    MIN_UPDATES,
    STEPPED,
    UPDATE_FACTOR,
)
from replay.verdict.findings import ROUNDING_HIDES, Finding, FindingStatus, VerdictSettings, judge_number, list_dtypes
from replay.verdict.frozen_weights import LEAST_CHANGE, FrozenChange, find_frozen_changes
from replay.verdict.gradient_findings import ComparedPass
from replay.verdict.gradient_samples import GradientSamples
from replay.verdict.recorded_pass import SteppedSample


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterDrift:
    """How far a parameter is from the job's, as a share of how far the replay's steps moved it.

    rounding  how far storing it in the job's dtype may move it, as such a share
    """

    drift: float
    rounding: float
    worst: SteppedSample

    @property
    def excess(self) -> float:
        """The drift that storing the parameter does not explain."""
        return max(self.drift - self.rounding, 0.0)


def compare_stepped_weights(
    steps: Sequence[Sequence[ComparedPass]], compared_passes: Sequence[ComparedPass], settings: VerdictSettings
) -> dict[int, Finding]:
    """Compare the weights behind each step of the replay whose gradient agrees with the job's, up to one that differs.

    steps  the windows that ended with a step, in their order

    Returns the finding of each step that could be compared, by its number from 0.
    """
    findings_by_step: dict[int, Finding] = {}
    changes = find_frozen_changes(compared_passes, settings)
    for number, window in enumerate(steps):
        findings = window[-1].window_findings
        if any(not finding.agrees and finding.status is not FindingStatus.NOT_JUDGED for finding in findings):
            # The update follows from another gradient, or from other settings, and so do all later ones.
            return findings_by_step
        frozen = _judge_frozen(changes, window)
        if frozen is None and not any(finding.agrees and finding.is_evidence for finding in findings):
            continue
        samples = [
            sample
            for compared_pass in compared_passes
            if compared_pass.record.result.num_steps == number + 1 and _is_step_of_job(compared_pass, window)
            for sample in compared_pass.replayed.weights_before_pass
        ]
        finding = judge_stepped_samples(samples, window, settings)
        if frozen is not None and (finding is None or finding.status is not FindingStatus.DIFFERS):
            finding = frozen
        if finding is not None:
            findings_by_step[number] = finding
        if finding is not None and finding.status is FindingStatus.DIFFERS:
            return findings_by_step
    return findings_by_step


def _is_step_of_job(compared_pass: ComparedPass, window: Sequence[ComparedPass]) -> bool:
    """Had the job taken one step since the window's passes?"""
    before, after = window[0].recorded.num_steps_before, compared_pass.recorded.num_steps_before
    return before is not None and after == before + 1


def _judge_frozen(changes: Sequence[FrozenChange], window: Sequence[ComparedPass]) -> Finding | None:
    """Judge the frozen weights that are other ones behind this window's step; here they stay as they are."""
    num_before = window[0].recorded.num_steps_before
    of_step = [change for change in changes if num_before is not None and change.step_after == num_before + 1]
    if not of_step:
        return None
    index, before, after = of_step[0].largest
    return judge_number(
        STEPPED,
        after,
        before,
        difference=relative_difference(after, before),
        bound=LEAST_CHANGE,
        where=f"{of_step[0].name}, element {index}, frozen",
        num_values=len(of_step),
    )


def judge_stepped_samples(
    samples: Sequence[SteppedSample], window: Sequence[ComparedPass], settings: VerdictSettings
) -> Finding | None:
    """Judge how far the weights went in the step of the window, by the sample that is farthest from the replay's.

    None without a gradient that tells which samples moved by more than rounding.
    """
    gradient = next((member.replayed.gradient for member in window if member.replayed.gradient is not None), None)
    if gradient is None:
        return None
    sizes = {name: gradient.compute_rms(name) for name in gradient.norms}
    largest = max(sizes.values(), default=0.0)
    # A gradient that is 0 but for rounding, as of a bias of keys, has any sign, and Adam steps by its sign alone.
    drifts = [
        drift
        for sample in samples
        if sizes.get(sample.name, 0.0) >= LEAST_RMS * largest > 0
        and _has_gradient(sample, gradient)
        and (drift := measure_drift(sample)) is not None
    ]
    if not drifts:
        return None
    dtypes = [dtype for member in window for dtype in list_dtypes(member.recorded, settings)]
    bound = UPDATE_FACTOR * settings.choose_bound(GRADIENT, dtypes, 1, window[-1].record.index)
    farthest = max(drifts, key=lambda drift: drift.drift / (bound + drift.rounding))
    bound += farthest.rounding
    element = farthest.worst
    finding = judge_number(
        STEPPED,
        element.job_values[0],
        element.replay_values[0],
        difference=farthest.drift,
        bound=bound,
        where=f"{element.name}, element {element.start}",
        num_values=len(drifts),
    )
    if bound <= HIDING_BOUND or not finding.agrees:
        return finding
    # Rounding turns the sign of some elements' steps, and not of half of all.
    middle = sorted(drifts, key=lambda drift: drift.excess)[len(drifts) // 2]
    if len(drifts) < MIN_UPDATES or middle.rounding + MEDIAN_UPDATE_BOUND > HIDING_BOUND:
        return replace(finding, status=FindingStatus.NOT_JUDGED, doubt=ROUNDING_HIDES, is_evidence=False)
    return judge_number(
        STEPPED,
        middle.worst.job_values[0],
        middle.worst.replay_values[0],
        difference=middle.excess,
        bound=MEDIAN_UPDATE_BOUND,
        where=f"the median parameter, {middle.worst.name}, element {middle.worst.start}",
        num_values=len(drifts),
    )


def _has_gradient(sample: SteppedSample, gradient: GradientSamples) -> bool:
    """Tell whether all sampled elements but one have a gradient that is more than rounding, where that is known.

    In GPT-2 the biases of queries, keys and values are one parameter, and that of keys has none.
    """
    values = gradient.values.get((sample.name, sample.start))
    if values is None:
        return True
    size = gradient.compute_rms(sample.name)
    return sum(abs(value) < LEAST_RMS * size for value in values) <= 1


def measure_drift(sample: SteppedSample) -> ParameterDrift | None:
    """Measure how far most of a parameter's sampled elements are off; None where the replay did not move it.

    An element whose gradient is near 0 may go the other way, so the second nearest of four decides: three are farther.
    """
    moved = [abs(value - initial) for value, initial in zip(sample.replay_values, sample.initial_values, strict=True)]
    scale = math.sqrt(sum(value * value for value in moved) / len(moved))
    if not scale:
        return None
    apart = sorted(abs(value - other) for value, other in zip(sample.replay_values, sample.job_values, strict=True))
    size = max(abs(value) for value in sample.job_values)
    return ParameterDrift(
        drift=apart[min(1, len(apart) - 1)] / scale, rounding=2 * roundoff(sample.dtype) * size / scale, worst=sample
    )
