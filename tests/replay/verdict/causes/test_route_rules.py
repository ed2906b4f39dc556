"""Which cause explains a router that chooses otherwise, and a routers' loss that counts otherwise."""

from dataclasses import replace

import pytest

from actor_init.routes import RouterFlips
from replay.runlog.records import RoutesSection
from replay.tolerances.job_bounds import LOSS, TOKEN_LOG_PROBS
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence
from replay.verdict.causes.route_rules import find_other_router_loss, find_other_routes
from replay.verdict.causes.table import find_causes, split_unexplained
from replay.verdict.findings import judge_number
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from replay.verdict.recorded_pass import ROUTER_LOSS_DOUBT
from replay.verdict.route_findings import ROUTES
from tests.replay.verdict.causes.made_evidence import (
    draw_gradients,
    make_forward_evidence,
    make_gradient_evidence,
    make_verdict,
    make_window,
    transpose_gradient,
)


def make_route_evidence(*others: str) -> CauseEvidence:
    """Evidence of a router of layer 3 that sends half of the tokens elsewhere, and of other wrong numbers."""
    where = "model.layers.3.mlp.gate"
    findings = [judge_number(ROUTES, 0.0, 0.5, difference=0.5, bound=0.02, is_evidence=False, where=where)]
    findings += [judge_number(name, 2.0, 1.0, difference=1.0, bound=0.1) for name in others]
    return replace(make_forward_evidence(), verdicts=[make_verdict(1, findings)])


def test_a_router_alone_probably_is_the_cause() -> None:
    cause = find_other_routes(make_route_evidence())
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.ROUTES, Sureness.PROBABLY)
    assert cause.sentence == (
        "the job's router of layer 3 sends 50% of the tokens to other experts than the scores here do, since pass 2"
    )


def test_beside_a_wrong_forward_it_may_be_a_consequence() -> None:
    cause = find_other_routes(make_route_evidence(TOKEN_LOG_PROBS))
    assert cause is not None
    assert cause.sureness is Sureness.MAY_BE
    assert find_other_routes(make_forward_evidence(TOKEN_LOG_PROBS)) is None


@pytest.mark.parametrize(
    ("where", "is_explained"),
    [
        ("model.layers.*.mlp.gate", True),
        ("model.layers.[2-3].mlp", True),
        ("model.layers.[0-2].mlp.gate", False),
        ("model.layers.*.self_attn", False),
    ],
)
def test_other_code_of_a_router_explains_its_routes(where: str, is_explained: bool) -> None:
    evidence = make_route_evidence(LOSS, TOKEN_LOG_PROBS)
    code = ModelDifference(kind=ModelDifferenceKind.FORWARD, where=where, job="job.py:route", replay=None)
    evidence = replace(evidence, settings=replace(evidence.settings, model_differences=[code]))
    causes = find_causes(evidence)
    assert [cause.name for cause in causes] == [CauseName.MODEL_CODE]
    assert split_unexplained(evidence, causes) == ([] if is_explained else [ROUTES], [])


def make_loss_evidence(term: float | None, *wrong: str) -> CauseEvidence:
    """Evidence of a loss of 2 in the job and 1 here, of which `term` is the routers'."""
    gradients = draw_gradients()
    [compared] = make_window([gradients], gradients)
    record = replace(compared.record, routes=RoutesSection(router_loss=term))
    return replace(make_forward_evidence(*wrong), passes=[replace(compared, record=record)])


def test_a_loss_that_alone_is_wrong_tells_how_often_the_routers_count() -> None:
    cause = find_other_router_loss(make_loss_evidence(0.5, LOSS))
    assert cause is not None
    assert cause.name is CauseName.ROUTER_LOSS
    assert cause.sentence == "the routers' loss counts 3 times what its coefficient here gives, since pass 1"


ROUTER = "model.layers.1.mlp.gate"


def make_router_gradient_evidence(
    *, router: str = ROUTER, off: str = ROUTER, term: float | None = 0.5
) -> CauseEvidence:
    """Evidence of a gradient of a router, among others, that points elsewhere in the job, and of its loss, if any."""
    replay = draw_gradients() | {f"{ROUTER}.weight": draw_gradients(1)["model.embed_tokens.weight"]}
    job = {name: transpose_gradient(values) if name.startswith(off) else values for name, values in replay.items()}
    [compared] = make_window([job], replay)
    record = replace(compared.record, routes=RoutesSection(router_loss=term))
    replayed = replace(compared.replayed, router_flips=[RouterFlips(router=router, num_tokens=8, distances=())])
    return make_gradient_evidence([replace(compared, record=record, replayed=replayed)])


def test_a_router_s_gradient_that_is_farthest_off_probably_lacks_the_routers_loss() -> None:
    [cause] = find_causes(make_router_gradient_evidence())
    assert (cause.name, cause.sureness) == (CauseName.ROUTER_LOSS, Sureness.PROBABLY)
    assert cause.sentence == (
        "the job's gradient is of another routers' loss than the model's, or of none, since the job's step 1: off in 1 "
        "parameter, the farthest in model.layers.1.mlp.gate.weight"
    )


def test_a_model_without_a_routers_loss_and_another_parameter_have_another_cause() -> None:
    for evidence in (
        make_router_gradient_evidence(term=None),
        make_router_gradient_evidence(router="model.layers.0.mlp.gate"),
        make_router_gradient_evidence(off="model.embed_tokens"),
    ):
        [cause] = find_causes(evidence)
        assert cause.name is CauseName.GRADIENTS_CHANGED


def test_without_a_routers_loss_or_with_wrong_tokens_it_is_another_cause() -> None:
    assert find_other_router_loss(make_loss_evidence(None, LOSS)) is None
    assert find_other_router_loss(make_loss_evidence(0.5, LOSS, TOKEN_LOG_PROBS)) is None


def test_a_routers_loss_that_is_not_computed_here_leaves_nothing_else_to_say_of_the_loss() -> None:
    doubt = f"{ROUTER_LOSS_DOUBT}: --ring 2 gives each rank a share of the tokens"
    findings = [judge_number(LOSS, 2.0, 1.0, difference=1.0, bound=0.1, doubt=doubt)]
    evidence = replace(make_forward_evidence(), verdicts=[make_verdict(0, findings)])
    [cause] = find_causes(evidence)
    assert (cause.name, cause.sureness) == (CauseName.ROUTER_LOSS, Sureness.PROBABLY)
    assert cause.sentence.endswith("which is not computed here: --ring 2 gives each rank a share of the tokens")


def test_the_routers_loss_is_that_of_the_wrong_pass() -> None:
    """Another pass of another rank has another one."""
    evidence = make_loss_evidence(0.5, LOSS)
    [own] = evidence.passes
    others = [
        replace(own, record=replace(own.record, index=index, rank=rank, routes=RoutesSection(router_loss=0.1)))
        for index, rank in ((1, 0), (0, 1))
    ]
    cause = find_other_router_loss(replace(evidence, passes=[*others, own]))
    assert cause is not None
    assert cause.sentence.startswith("the routers' loss counts 3 times")
    assert find_other_router_loss(replace(evidence, passes=others)) is None
    assert find_other_router_loss(make_forward_evidence(TOKEN_LOG_PROBS)) is None
