"""Tell that a job clips its gradients by code of its own, before they are recorded, and clip the replay's as it did.

Such a clipping leaves no call that a recording could see. It leaves a norm: several steps whose gradients are as long
as a number that a person would type were clipped to it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from capture.file_format.optimizer_step import OptimizerStep
from replay.verdict.findings import VerdictSettings
from replay.verdict.gradient_findings import ComparedPass
from replay.verdict.gradient_samples import GradientSamples

# Relative: how near a clipped norm is to its limit. Clipping divides by the norm plus 1e-6.
SAME_LIMIT = 3e-5
MIN_CLIPPED = 2


def infer_own_clipping_limit(steps: Sequence[Sequence[OptimizerStep]]) -> float | None:
    """Infer the norm that code of the job's own clips to; None where none shows.

    steps  by step, what each rank recorded of it
    """
    norms = [norm for ranks in steps if (norm := _measure_norm(ranks)) is not None]
    largest = max(norms, default=0.0)
    limit = float(f"{largest:.2g}")
    num_clipped = sum(math.isclose(norm, limit, rel_tol=SAME_LIMIT) for norm in norms)
    has_recorded_clipping = any(step.max_norm is not None or step.clips_early for ranks in steps for step in ranks)
    is_largest = math.isclose(largest, limit, rel_tol=SAME_LIMIT)
    return limit if limit and is_largest and num_clipped >= MIN_CLIPPED and not has_recorded_clipping else None


def _measure_norm(ranks: Sequence[OptimizerStep]) -> float | None:
    """Measure the norm of all signed gradients of a step; None where not all ranks that hold a part signed theirs."""
    if not ranks or not all(step.signatures for step in ranks):
        return None
    signatures = {(signature.name, signature.start, place if signature.is_part else 0): signature.norm
                  for place, step in enumerate(ranks) for signature in step.signatures}  # fmt: skip
    return math.hypot(*signatures.values())


def clip_as_the_job(compared_passes: Sequence[ComparedPass], settings: VerdictSettings) -> list[ComparedPass]:
    """Clip the replay's gradient of each window to the norm that the job's own code clipped to."""
    return [
        _clip(compared_pass, settings.job_code_clip_norm) if settings.job_code_clip_norm is not None else compared_pass
        for compared_pass in compared_passes
    ]


def _clip(compared_pass: ComparedPass, limit: float) -> ComparedPass:
    result, gradient = compared_pass.record.result, compared_pass.replayed.gradient
    norm = result.grad_norm
    if norm is None or not norm > limit:
        return compared_pass
    factor = limit / norm
    if gradient is not None:
        gradient = GradientSamples(
            norms={name: factor * value for name, value in gradient.norms.items()},
            sizes=gradient.sizes,
            values={place: tuple(factor * v for v in values) for place, values in gradient.values.items()},
            signatures={place: tuple(factor * v for v in values) for place, values in gradient.signatures.items()},
        )
    record = replace(compared_pass.record, result=replace(result, grad_norm=limit))
    return replace(compared_pass, record=record, replayed=replace(compared_pass.replayed, gradient=gradient))
