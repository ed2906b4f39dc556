"""Tell that a gradient is another one because the job clips it otherwise: too early, by parts, by another norm."""

import math
from collections.abc import Sequence

from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT_NORMS, GRADIENT_QUANTITIES
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence, name_time
from replay.verdict.causes.wrong_gradient import GRADIENT_FINDINGS
from replay.verdict.gradient_findings import ComparedPass, list_steps
from replay.verdict.outcomes import PassVerdict
from replay.verdict.recorded_pass import MISSING_GRADIENT, WEIGHTING

CLIP_ONCE = "clip once, after the backward of a step's last pass"


def find_clipping_of_parts(evidence: CauseEvidence) -> Cause | None:
    """Tell that the job clipped what it had after a pass that was not the last of the step.

    What the job had recorded of the gradient is of such a clipping, and not that of the loss, so no other rule over a
    gradient's numbers holds. That the clipping changed it is not known: the norm may have been below the limit.
    """
    wrong = evidence.find_wrong_window(*GRADIENT_QUANTITIES)
    if wrong is None or not clips_parts(wrong[2]):
        return None
    verdict, _, window = wrong
    limits = {step.max_norm for step in list_steps(window) if step.max_norm is not None}
    to = f" to a norm of {limits.pop():g}" if len(limits) == 1 else ""
    return Cause(
        name=CauseName.CLIPPED_EARLY,
        sureness=Sureness.PROBABLY,
        sentence=f"the job clips its gradients{to} before the last of a step's {len(window)} passes, "
        f"{name_time(verdict)}: what it clips is a part of the step's gradient",
        try_next=CLIP_ONCE,
        explains=(*GRADIENT_FINDINGS, WEIGHTING),
    )


def clips_parts(window: Sequence[ComparedPass]) -> bool:
    """Tell whether the job clipped gradients of this window before its last pass."""
    return any(step.clips_early for step in list_steps(window))


def find_clipping_of_shards(evidence: CauseEvidence) -> Cause | None:
    """Tell that each rank clipped its own shards: their gradients are as long on each rank, to a round number."""
    wrong = evidence.find_wrong_window(*GRADIENT_QUANTITIES)
    if wrong is None:
        return None
    verdict, _, window = wrong
    norms: dict[int | None, float] = {}
    for compared in window:
        step = compared.recorded.step_after
        if step is not None and step.signatures and all(signature.is_part for signature in step.signatures):
            norms[compared.recorded.rank] = math.hypot(*(signature.norm for signature in step.signatures))
    limit = find_round_number(max(norms.values(), default=0.0))
    if len(norms) < 2 or limit is None:
        return None
    if not all(math.isclose(norm, limit, rel_tol=1e-3) for norm in norms.values()):
        return None
    return Cause(
        name=CauseName.CLIPPING,
        sureness=Sureness.PROBABLY,
        sentence=f"the gradient of each of {len(norms)} ranks' shards has a norm of {limit:g}, {name_time(verdict)}: "
        "code of the job's own clips by the norm of a rank's shards, and not by that of the whole gradient",
        try_next="add up the squares of the ranks' norms before clipping, as torch's clip_grad_norm_ does for DTensors",
        explains=GRADIENT_FINDINGS,
    )


def name_clipping_before_reduction(window: Sequence[ComparedPass], norms: str, verdict: PassVerdict) -> Cause:
    """Name the clipping of gradients that are each rank's own, and that the ranks average behind it."""
    limits = {step.max_norm for step in list_steps(window) if step.max_norm is not None}
    to = f" to a norm of {limits.pop():g}" if len(limits) == 1 else ""
    return Cause(
        name=CauseName.CLIPPING,
        sureness=Sureness.PROBABLY,
        sentence=f"each rank clips its own gradient{to} before the ranks average them, {name_time(verdict)}: before "
        f"the clipping {norms}, and the weights after the step are the same on all ranks",
        try_next="average the gradients over the ranks first, then clip",
        explains=(*GRADIENT_FINDINGS, WEIGHTING),
    )


def find_round_number(norm: float) -> float | None:
    """Return the number that a person would clip to, if a norm is one; None if it is not."""
    rounded = float(f"{norm:.1g}")
    return rounded if norm and math.isclose(norm, rounded, rel_tol=1e-3) else None


def find_other_norm(evidence: CauseEvidence) -> Cause | None:
    """Tell that the norm that the job clipped by is not that of its gradient, whose parts are the replay's."""
    wrong = evidence.find_wrong(GRAD_NORM)
    if wrong is None or evidence.is_forward_wrong or wrong[0] is not evidence.first_wrong:
        return None
    verdict, norm = wrong
    if evidence.settings.has_other_trained_parameters:
        # The job's norm is of fewer parameters, then.
        return None
    if any(finding.is_wrong and finding.name == MISSING_GRADIENT for finding in verdict.findings):
        # So it is here.
        return None
    if not any(finding.agrees and finding.name == GRADIENT_NORMS for finding in verdict.findings):
        return None
    return Cause(
        name=CauseName.CLIPPING,
        sureness=Sureness.IS,
        sentence=f"the job clips by a norm of {norm.recorded:.6g}, and its gradient has one of {norm.replayed:.6g}, "
        f"{name_time(verdict)}: the gradient of each parameter is as long as here",
        try_next="look for a norm of some parameters, of one rank's shards, or of each parameter alone",
        explains=GRADIENT_FINDINGS,
    )


def name_early_clipping(factor: float, verdict: PassVerdict) -> Cause:
    """Name the clipping of gradients that are still `factor` times those of the loss."""
    return Cause(
        name=CauseName.CLIPPED_EARLY,
        sureness=Sureness.PROBABLY,
        sentence=f"the job clips its gradients while they are multiplied by the loss scale: each is {factor:.6g} times "
        f"that of the loss, {name_time(verdict)}",
        try_next="call GradScaler.unscale_(optimizer) before the clipping",
        explains=(*GRADIENT_FINDINGS, WEIGHTING),
    )


def clips_under_scale(window: Sequence[ComparedPass]) -> bool:
    """Tell whether the gradient of this window was clipped as it was recorded: the factor of a loss scale is in it.

    GradScaler scales losses of any dtype. What it takes out only in its step comes behind the clipping. A job that
    clips to inf reads the norm, and clips nothing.
    """
    return any(step.max_norm is not None and 0 < step.max_norm < math.inf for step in list_steps(window))
