"""Tell which parameters had no gradient in the job's step, and which module they are all of."""

from collections.abc import Sequence

from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence, CauseRule, name_time
from replay.verdict.causes.model_rules import FORWARD_FINDINGS
from replay.verdict.causes.wrong_gradient import GRADIENT_FINDINGS, find_wrong_gradient, name_parameters
from replay.verdict.gradient_findings import ComparedPass
from replay.verdict.recorded_pass import MISSING_GRADIENT, match_parameter_name


def find_missing_gradient(evidence: CauseEvidence) -> Cause | None:
    """Name the trained parameters that had no gradient in the job and have one here."""
    wrong = evidence.find_wrong(MISSING_GRADIENT)
    if wrong is None:
        return _find_zero_gradient(evidence)
    verdict, finding = wrong
    missing, names = _list_missing(evidence.find_window(verdict) or ())
    what = name_parameters(missing, names) if missing else str(finding.where)
    if what == "model":
        # That is the module beside the head, whose name alone reads as all of the job's model.
        what = f"{len(missing)} of {len(names)} trained parameters, all whose names begin with {what}."
    if evidence.is_forward_wrong:
        # Whatever is detached computes the same, so here these parameters take no part at all.
        return Cause(
            name=CauseName.MODEL_CODE,
            sureness=Sureness.PROBABLY,
            sentence=f"{what} takes no part in the job's forward, {name_time(verdict)}: the job steps without its "
            "gradient, and the forward gives other numbers than with it",
            try_next="look for a module that is skipped, or replaced, in the job's model",
            explains=(*FORWARD_FINDINGS, *GRADIENT_FINDINGS),
        )
    module = _find_module_without_gradient(missing, names)
    place = "" if module is None or module in what else f"; no parameter of {module} has one"
    # In a job of an adapter nothing before its modules needs a gradient, and reentrant checkpointing then makes none.
    of_adapter = (
        "; or reentrant gradient checkpointing whose inputs need no gradient: enable_input_require_grads(), or "
        "use_reentrant=False"
        if any("lora_" in name for name in missing)
        else ""
    )
    return Cause(
        name=CauseName.NO_GRADIENT,
        sureness=Sureness.IS,
        # What was recorded when the optimizer stepped does not tell a gradient that the backward never made from one
        # that the loop dropped after it.
        sentence=f"the job steps without a gradient for {what}, {name_time(verdict)}{place}",
        try_next="look for detach(), no_grad, .data or a copy of a tensor on the way from these parameters to the "
        f"loss, and in the loop for gradients that are set to None{of_adapter}",
        explains=GRADIENT_FINDINGS,
    )


def _list_missing(window: Sequence[ComparedPass]) -> tuple[list[str], list[str]]:
    """List the parameters without a gradient in the job, and all that have one in the replay, in the model's order."""
    gradients = [compared.replayed.gradient for compared in window if compared.replayed.gradient is not None]
    names = list(gradients[0].norms) if gradients else []
    steps = [compared.recorded.step_after for compared in window if compared.recorded.step_after is not None]
    missing = {match_parameter_name(job_name, names) for step in steps for job_name in step.without_gradient}
    return [name for name in names if name in missing], names


def _find_module_without_gradient(missing: Sequence[str], names: Sequence[str]) -> str | None:
    """Find the module of most parameters, two at least, none of which has a gradient; of equal ones the last."""
    best: tuple[int, str] | None = None
    for name in missing:
        parts = name.split(".")[:-1]
        for end in range(1, len(parts) + 1):
            members = [other for other in names if other.startswith(f"{'.'.join(parts[:end])}.")]
            if len(members) > 1 and set(members) <= set(missing) and (best is None or len(members) >= best[0]):
                best = len(members), ".".join(parts[:end])
    return None if best is None else best[1]


def _find_zero_gradient(evidence: CauseEvidence) -> Cause | None:
    """Name the parameters whose gradient is zero in the job alone, while others are as here."""
    wrong = find_wrong_gradient(evidence)
    if wrong is None:
        return None
    parameters = wrong.gradient.parameters
    zero = [name for name, parameter in parameters.items() if parameter.job_norm == 0 and parameter.replay_norm]
    if not zero:
        return None
    return Cause(
        name=CauseName.NO_GRADIENT,
        sureness=Sureness.IS,
        sentence=f"the gradient of {name_parameters(zero, list(parameters))} is zero in the job, "
        f"{name_time(wrong.verdict)}, and is not here",
        try_next="look for detach(), no_grad, .data or a factor of 0 on the way from these parameters to the loss, and "
        "in the loop for gradients that are set to 0",
        explains=GRADIENT_FINDINGS,
    )


RULES = (
    CauseRule(
        name=CauseName.NO_GRADIENT,
        find=find_missing_gradient,
        means="trained parameters have no gradient in the job's step, or one of zero: detached, unused or emptied",
        told_by="the names of parameters without a gradient, and the norm of each gradient, recorded at each step",
        job="o-proj-detached",
    ),
)
