"""A token at a tie may take another expert; a router whose scores clearly choose others differs."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from actor_init.routes import RouterFlips
from replay.runlog.records import PassRecord, RoutesSection
from replay.tolerances.job_bounds import TOKEN_LOG_PROBS, compute_flip_bound, compute_tie_distance
from replay.verdict.findings import FindingStatus, VerdictSettings
from replay.verdict.recorded_pass import JobRouterLoss, RecordedPass, ReplayedPass, WeightComparison
from replay.verdict.route_findings import (
    compare_routes,
    describe_absent_router_loss,
    describe_flips,
    describe_router_loss,
    name_layer,
    note_job_routes,
)
from tests.helpers.made_records import record

SETTINGS = VerdictSettings(dtype="bfloat16", num_layers=4, num_data_ranks=1, grad_accumulation=1, is_mixture=True)
RECORDED = RecordedPass(
    rank=0,
    forward_number=0,
    world_size=1,
    trains=True,
    claims=(),
    weight_comparison=WeightComparison(compared=("a",)),
    num_frozen=0,
    dtypes=["bfloat16"],
)
NUM_TOKENS = 200
TIE = compute_tie_distance(["bfloat16"], 4)


def replayed_with(*distances: Sequence[float], has_job_routes: bool = True) -> ReplayedPass:
    """A pass through one router for each list of distances of tokens that flip."""
    flips = [
        RouterFlips(router=f"model.layers.{layer}.mlp.gate", num_tokens=NUM_TOKENS, distances=own)
        for layer, own in enumerate(distances)
    ]
    return ReplayedPass(router_flips=flips, has_job_routes=has_job_routes)


def routed(num_flips: int, num_tokens: int) -> PassRecord:
    return replace(record(0), routes=RoutesSection(routed_tokens=num_tokens, flipped_tokens=num_flips))


def test_any_number_of_flips_within_a_tie_agrees_and_is_no_evidence() -> None:
    [finding] = compare_routes(record(0), RECORDED, replayed_with([], [TIE * 0.9] * NUM_TOKENS), SETTINGS)
    assert finding.agrees
    assert not finding.is_evidence


def test_a_few_flips_beyond_a_tie_agree_and_many_differ() -> None:
    few, many = int(NUM_TOKENS * compute_flip_bound(NUM_TOKENS)), NUM_TOKENS // 4
    [finding] = compare_routes(record(0), RECORDED, replayed_with([TIE * 2] * few), SETTINGS)
    assert finding.agrees
    [finding] = compare_routes(record(0), RECORDED, replayed_with([TIE * 2] * many), SETTINGS)
    assert finding.status is FindingStatus.DIFFERS
    assert finding.values_as_text is not None
    assert finding.values_as_text.startswith(
        "25.0% of the tokens have scores that choose other experts than the job did"
    )


def test_the_first_router_that_differs_is_named() -> None:
    replayed = replayed_with([], [1.0] * 50, [1.0] * 150)
    [finding] = compare_routes(record(0), RECORDED, replayed, SETTINGS)
    assert finding.where == "model.layers.1.mlp.gate"


def test_in_fp32_a_tie_is_far_closer() -> None:
    settings = replace(SETTINGS, dtype="float32")
    recorded = replace(RECORDED, dtypes=["float32"])
    [finding] = compare_routes(record(0), recorded, replayed_with([TIE * 0.9] * 50), settings)
    assert finding.status is FindingStatus.DIFFERS


def test_nothing_is_judged_where_tokens_chose_anew() -> None:
    assert compare_routes(record(0), RECORDED, replayed_with([1.0] * 50, has_job_routes=False), SETTINGS) == []


def test_the_share_of_flips_and_the_layer_with_most_are_said() -> None:
    replayed = replayed_with([0.1], [0.1, 0.2])
    passes = [(routed(3, 2 * NUM_TOKENS), RECORDED, replayed)]
    assert describe_flips(passes) == [("experts", "0.8% of tokens would choose others here, most in layer 1")]
    live = replace(replayed, has_job_routes=False)
    [(_, said)] = describe_flips([(routed(3, 2 * NUM_TOKENS), RECORDED, live)])
    assert said == "0.8% of tokens chose others than in the job, most in layer 1"


def test_flips_with_other_weights_are_not_spoken_of() -> None:
    other = replace(RECORDED, weight_comparison=WeightComparison(compared=("a",), differing=("a",)))
    assert describe_flips([(routed(1, NUM_TOKENS), other, replayed_with([0.1]))]) == []


def test_the_job_s_routes_leave_no_doubt_about_ties() -> None:
    settings = replace(SETTINGS, floors={})
    doubt = replace(settings, why_no_floors="no other kernel").doubt_expert_routes(
        TOKEN_LOG_PROBS, 0.05, ["bfloat16"], 0
    )
    assert doubt == "tokens at a tie may take another expert: its rounding is not known"
    noted = note_job_routes(settings, [(record(0), RECORDED, replayed_with([]))])
    assert noted.has_job_routes
    assert noted.doubt_expert_routes(TOKEN_LOG_PROBS, 0.05, ["bfloat16"], 0) is None
    unmeasured = replace(noted, why_no_floors="no other kernel")
    assert unmeasured.doubt_expert_routes(TOKEN_LOG_PROBS, 0.05, ["bfloat16"], 0) == (
        "in a mixture of experts its rounding is not known: no other kernel"
    )
    one_live = [(record(0), RECORDED, replayed_with([])), (record(1), RECORDED, ReplayedPass())]
    assert not note_job_routes(settings, one_live).has_job_routes


def test_a_router_without_a_number_in_its_name_is_named_whole() -> None:
    assert (name_layer("model.layers.5.mlp.gate"), name_layer("router")) == ("layer 5", "router")


def test_what_the_routers_add_to_the_loss_is_said() -> None:
    with_loss = replace(record(2), routes=RoutesSection(router_loss=0.25))
    passes = [(record(1), RECORDED, ReplayedPass()), (with_loss, RECORDED, ReplayedPass())]
    assert describe_router_loss(passes) == [("routers", "their loss adds 0.25 to that of pass 3")]
    assert describe_router_loss(passes[:1]) == []


@pytest.mark.parametrize(
    ("share", "has_same_gradient", "where"),
    [
        (0.0, True, "in neither the noted loss nor the routers' gradient"),
        (0.0, False, "not in the noted loss"),
        (math.nan, True, "not in the routers' gradient"),
        (math.nan, False, None),
        (1.0, True, None),
    ],
)
def test_a_routers_loss_that_the_loop_left_out_is_noted(
    share: float, has_same_gradient: bool, where: str | None
) -> None:
    left_to_job = JobRouterLoss(coefficient=0.02, factor=share, is_noted=True)
    passes = [(record(0), RECORDED, ReplayedPass(router_loss_of_training_loop=left_to_job))]
    notes = describe_absent_router_loss(passes, has_same_gradient=has_same_gradient)
    said = f"routers: the config's routers' loss (coefficient 0.02) is {where}"
    assert notes == ([] if where is None else [("note", said)])
    none_asked = [(record(0), RECORDED, ReplayedPass())]
    assert describe_absent_router_loss(none_asked, has_same_gradient=True) == []
