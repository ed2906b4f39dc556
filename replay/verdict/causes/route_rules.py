"""Tell what is wrong with the routers of a mixture of experts: whom they choose, and what their loss counts."""

from replay.output.text import pluralise
from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT, LOSS
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence, CauseRule, name_time
from replay.verdict.causes.model_rules import ALL_FINDINGS
from replay.verdict.causes.wrong_gradient import GRADIENT_FINDINGS, find_farthest, find_wrong_gradient
from replay.verdict.recorded_pass import ROUTER_LOSS_DOUBT
from replay.verdict.route_findings import ROUTES, name_layer


def find_other_routes(evidence: CauseEvidence) -> Cause | None:
    """Name the first layer whose router chooses other experts than its scores do here.

    With the job's routes a forward of the right scores agrees. Where numbers of the forward are wrong besides, what
    comes before the router may be the cause, too.
    """
    found = evidence.find_wrong(ROUTES)
    if found is None:
        return None
    verdict, finding = found
    is_alone = {wrong.name for other, wrong in evidence.wrong if other is verdict} == {ROUTES}
    where = name_layer(finding.where or "")
    return Cause(
        name=CauseName.ROUTES,
        sureness=Sureness.PROBABLY if is_alone else Sureness.MAY_BE,
        sentence=f"the job's router of {where} sends {finding.replayed:.0%} of the tokens to other experts than the "
        f"scores here do, {name_time(verdict)}",
        try_next="compare the router's code, bias and config in the job with the model's",
        explains=(ROUTES, *ALL_FINDINGS),
    )


def find_other_router_loss(evidence: CauseEvidence) -> Cause | None:
    """Tell how many times its coefficient the routers' loss counts in the job, where the loss alone is wrong.

    Where it cannot be computed here, a loss that is off tells nothing else.
    """
    found = evidence.find_wrong(LOSS)
    if found is None or not evidence.is_forward_wrong:
        return find_gradient_without_router_loss(evidence)
    verdict, finding = found
    if finding.doubt is not None and finding.doubt.startswith(ROUTER_LOSS_DOUBT):
        why = finding.doubt.removeprefix(ROUTER_LOSS_DOUBT)
        return Cause(
            name=CauseName.ROUTER_LOSS,
            sureness=Sureness.PROBABLY,
            sentence=f"the job's loss holds its routers' loss, which is not computed here{why}",
            explains=(LOSS, GRAD_NORM, GRADIENT),
        )
    if {wrong.name for other, wrong in evidence.wrong if other is verdict} != {LOSS} or finding.replayed is None:
        return None
    compared = evidence.find_pass(verdict)
    term = None if compared is None else compared.record.routes.router_loss
    if not term:
        return None
    factor = (finding.recorded - finding.replayed + term) / term
    return Cause(
        name=CauseName.ROUTER_LOSS,
        sureness=Sureness.PROBABLY,
        sentence=f"the routers' loss counts {factor:.3g} times what its coefficient here gives, {name_time(verdict)}",
        try_next="compare the job's router_aux_loss_coef with the config's",
        explains=(LOSS, GRAD_NORM, GRADIENT),
    )


def find_gradient_without_router_loss(evidence: CauseEvidence) -> Cause | None:
    """Tell that the gradient is of a loss without the routers', which the model's own loss holds.

    The routers' loss reaches routers, and what comes before the last one, and turns the gradient of a router most.
    """
    wrong = find_wrong_gradient(evidence)
    if wrong is None or wrong.verdict is not evidence.first_wrong:
        return None
    off = wrong.list_off()
    routers = tuple(
        f"{flips.router}."
        for compared in wrong.window
        for flips in compared.replayed.router_flips
        if compared.record.routes.router_loss
    )
    if not off or not routers:
        return None
    most = find_farthest(off)
    if not most.name.startswith(routers) or wrong.is_scaled(most):
        return None
    return Cause(
        name=CauseName.ROUTER_LOSS,
        sureness=Sureness.PROBABLY,
        sentence="the job's gradient is of another routers' loss than the model's, or of none, "
        f"{name_time(wrong.verdict)}: off in {pluralise(len(off), 'parameter')}, the farthest in {most.name}",
        try_next="see whether the job's own loss adds the model's aux_loss, times the config's router_aux_loss_coef",
        explains=GRADIENT_FINDINGS,
    )


RULES = (
    CauseRule(
        name=CauseName.ROUTES,
        find=find_other_routes,
        means="a router chooses other experts than its scores here, beyond a tie",
        told_by="the experts of each token, recorded in each pass, beside those that the scores here choose",
        job="experts-with-lowest-scores",
    ),
    CauseRule(
        name=CauseName.ROUTER_LOSS,
        find=find_other_router_loss,
        means="the routers' loss counts more or less than its coefficient, or is left out",
        told_by="the loss, which alone is off, and the routers' loss by the model's own function; or a router's "
        "gradient, the farthest of those that are off",
        job="router-loss-doubled",
    ),
)
