"""Tell why a gradient is another one though the forward before it was the job's."""

from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseRule, Evidence, name_time
from replay.verdict.gradient_findings import ANOTHER_LOSS
from replay.verdict.pass_values import MISSING_GRADIENT, MOVED, WEIGHTING

GRADIENT_FINDINGS = (MISSING_GRADIENT, GRAD_NORM, GRADIENT)


def find_missing_gradient(evidence: Evidence) -> Cause | None:
    """Name the trained parameters that had no gradient in the job and have one here."""
    wrong = evidence.find_wrong(MISSING_GRADIENT)
    if wrong is None:
        return None
    verdict, finding = wrong
    return Cause(
        name=CauseName.NO_GRADIENT,
        sureness=Sureness.IS,
        sentence=f"{finding.where}, {name_time(verdict)}: something detaches them, or the loss does not use them",
        try_next="look for detach(), no_grad, .data or a copy of a tensor on the way from these parameters to the loss",
        explains=GRADIENT_FINDINGS,
    )


def find_other_weighting(evidence: Evidence) -> Cause | None:
    """Tell that the job gave its passes other shares of a step's gradient than their numbers of tokens."""
    wrong = evidence.find_wrong(WEIGHTING)
    if wrong is None:
        return None
    verdict, finding = wrong
    return Cause(
        name=CauseName.WINDOW_WEIGHTS,
        sureness=Sureness.IS,
        sentence=f"the passes of a step weigh {finding.said}, {name_time(verdict)}",
        try_next=f"{finding.doubt}",
        explains=(WEIGHTING, GRAD_NORM, GRADIENT),
    )


def find_other_loss(evidence: Evidence) -> Cause | None:
    """Tell that what the job differentiated was not the loss that its model returned."""
    for verdict, finding in evidence.wrong:
        if finding.doubt is not None and finding.doubt.startswith(ANOTHER_LOSS):
            return Cause(
                name=CauseName.OBJECTIVE,
                sureness=Sureness.PROBABLY,
                sentence=f"{ANOTHER_LOSS}, {name_time(verdict)}",
                try_next="--objective FILE.py:function, with the loss that the job's loop differentiates",
                explains=(GRAD_NORM, GRADIENT),
            )
    return None


def find_lost_steps(evidence: Evidence) -> Cause | None:
    """Tell that steps in a 16-bit dtype moved no weight."""
    wrong = evidence.find_wrong(MOVED)
    if wrong is None or not str(wrong[1].said).startswith("none of"):
        return None
    verdict, finding = wrong
    return Cause(
        name=CauseName.DTYPE,
        sureness=Sureness.PROBABLY,
        sentence=f"{finding.said}, {name_time(verdict)}: in bf16 a step smaller than half a weight's spacing is lost",
        try_next="keep fp32 masters of the weights in the job",
        explains=(MOVED,),
    )


RULES = (
    CauseRule(
        name=CauseName.NO_GRADIENT,
        find=find_missing_gradient,
        means="trained parameters have no gradient in the job: something is detached, or unused",
        told_by="the names of parameters without a gradient, recorded at each step",
        job="o-proj-detached",
    ),
    CauseRule(
        name=CauseName.WINDOW_WEIGHTS,
        find=find_other_weighting,
        means="the micro-batches of a step, or its ranks, weigh otherwise than by their tokens",
        told_by="what the job multiplied each loss by before the backward",
        job="mean-of-means",
    ),
    CauseRule(
        name=CauseName.OBJECTIVE,
        find=find_other_loss,
        means="the job differentiated another loss than the one that its model returned",
        told_by="the model's loss agrees, and no sampled gradient does",
        job="mean-of-rows",
    ),
    CauseRule(
        name=CauseName.DTYPE,
        find=find_lost_steps,
        means="weights in bf16 without fp32 masters: small steps are lost",
        told_by="samples of the weights before and after a step",
        job="no-masters",
    ),
)
