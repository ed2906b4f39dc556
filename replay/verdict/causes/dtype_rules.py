"""Tell that numbers of a job of fp32 went through a 16-bit dtype: they are values that this dtype has.

One value in 65,536 of fp32 is one of bf16 by chance, so a few dozen such values are no chance. The sum of two such
values has a few more bits. Its last eight bits in fp32 are 0 nearly always, and one in 256 by chance.
"""

import math
from collections.abc import Iterable
from itertools import pairwise

import torch

from replay.tolerances.difference import roundoff
from replay.tolerances.job_bounds import GRADIENT_QUANTITIES, STEPPED
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence, CauseRule, name_time
from replay.verdict.causes.model_rules import FORWARD_FINDINGS
from replay.verdict.gradient_findings import list_steps
from replay.verdict.outcomes import FINER_DTYPE, Outcome
from replay.verdict.recorded_pass import MOVED, OPTIMIZER

LEAST_VALUES = 16
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SUMMED = "a 16-bit dtype"
LAST_BITS = 0xFF
# The share of sums of rounded values whose last bits are 0. Seen: 0.997 of two values each.
LEAST_SHARE = 0.9


def find_half_dtype(values: Iterable[float]) -> str | None:
    """Name the 16-bit dtype that all these values, or the summands of most of them, are of; None if there is none.

    Values that are 0, or not finite, are left out: they are values of every dtype.
    """
    numbers = torch.tensor([value for value in values if value and math.isfinite(value)], dtype=torch.float32)
    if len(numbers) < LEAST_VALUES:
        return None
    for name, dtype in HALVES.items():
        if torch.equal(numbers.to(dtype).float(), numbers):
            return name
    has_short = (numbers.view(torch.int32) & LAST_BITS) == 0
    return SUMMED if float(has_short.float().mean()) >= LEAST_SHARE else None


def find_rounded_gradient(evidence: CauseEvidence) -> Cause | None:
    """Tell that the job's gradient is of values of a 16-bit dtype, and the replay's is not."""
    wrong = evidence.find_wrong_window(*GRADIENT_QUANTITIES)
    if wrong is None:
        return None
    verdict, _, window = wrong
    job_values = [value for step in list_steps(window) for signature in step.signatures for value in signature.values]
    gradients = [compared.replayed.gradient for compared in window if compared.replayed.gradient is not None]
    own_values = [value for gradient in gradients for values in gradient.signatures.values() for value in values]
    dtype = find_half_dtype(job_values)
    if dtype is None or find_half_dtype(own_values) is not None:
        return None
    return Cause(
        name=CauseName.DTYPE,
        sureness=Sureness.IS,
        sentence=f"the job's gradients are rounded to {dtype}, {name_time(verdict)}: the sampled elements are values "
        f"of that dtype{', or sums of some' if dtype == SUMMED else ''}",
        try_next="look for a cast of gradients, or for a reduction in that dtype",
        explains=GRADIENT_QUANTITIES,
    )


def find_rounded_weights(evidence: CauseEvidence) -> Cause | None:
    """Tell that the job's fp32 weights are of values of a 16-bit dtype after a step, and were not before it.

    Where a later step's are not, the model was cast once, as for a checkpoint in place, and cast back.
    """
    if evidence.first_wrong is None:
        return None
    by_step: dict[int, list[float]] = {}
    for compared in evidence.passes:
        if compared.recorded.num_steps_before is not None:
            values = by_step.setdefault(compared.recorded.num_steps_before, [])
            # A norm's weights of 1 are of every dtype.
            fp32_samples = (sample for sample in compared.recorded.samples if sample.dtype == "float32")
            values.extend(value for sample in fp32_samples for value in sample.values if value != 1)
    steps = sorted(step for step, values in by_step.items() if values)
    dtypes = {step: find_half_dtype(by_step[step]) for step in steps}
    is_rounded = [dtypes[before] is None and dtypes[behind] is not None for before, behind in pairwise(steps)]
    if True not in is_rounded:
        return None
    step = steps[is_rounded.index(True) + 1]
    undone = next((later for later in steps if later > step and dtypes[later] is None), None)
    was_cast = "" if undone is None else f", nor after step {undone}: the model was cast to that dtype and cast back"
    return Cause(
        name=CauseName.DTYPE,
        sureness=Sureness.IS,
        sentence=f"the job's fp32 weights are rounded to {dtypes[step]} after step {step}: each sampled element is a "
        f"value of that dtype, and was not before{was_cast}",
        try_next="cast a copy of the model for a checkpoint or an evaluation"
        if undone is not None
        else "keep fp32 masters, and look for a copy of the weights through that dtype",
        explains=(MOVED, STEPPED, OPTIMIZER, *FORWARD_FINDINGS, *GRADIENT_QUANTITIES),
    )


def find_finer_dtype(evidence: CauseEvidence) -> Cause | None:
    """Tell that a finer dtype was typed than the job computed in, where no number is wrong."""
    reasons = [str(verdict.reason) for verdict in evidence.verdicts if verdict.outcome is Outcome.UNSETTLED]
    job_dtypes = [dtype for compared in evidence.passes for dtype in compared.recorded.dtypes]
    if evidence.first_wrong is not None or not any(reason.startswith(FINER_DTYPE) for reason in reasons):
        return None
    job_dtype = max(job_dtypes, key=roundoff)
    autocast = next((compared.recorded.environment.get("autocast", "off") for compared in evidence.passes), "off")
    under = "" if autocast == "off" else ", under autocast"
    return Cause(
        name=CauseName.DTYPE,
        sureness=Sureness.IS,
        sentence=f"the job computes in {job_dtype}{under}, and {evidence.settings.dtype} was typed",
        try_next="the replay without --dtype, in the job's own; or take the coarser dtype out of the job",
    )


RULES = (
    CauseRule(
        name=CauseName.DTYPE,
        find=find_finer_dtype,
        means="the job computes in a coarser dtype than was typed, and no number is wrong",
        told_by="what the recording states of the job's dtypes",
        job="autocast-everywhere",
    ),
    CauseRule(
        name=CauseName.DTYPE,
        find=find_rounded_gradient,
        means="gradients went through a 16-bit dtype in a job of fp32",
        told_by="each sampled element of the gradient is a value of that dtype",
        job="gradients-in-bf16",
    ),
    CauseRule(
        name=CauseName.DTYPE,
        find=find_rounded_weights,
        means="weights of fp32 are written in a 16-bit dtype by a step",
        told_by="each sampled element of the weights is a value of that dtype after a step, and not before",
        job="bf16-masters",
    ),
)
