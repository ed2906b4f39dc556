"""A gradient that may hold a routers' loss of the job's loop is not judged against one without it."""

import math
from collections.abc import Collection
from dataclasses import replace

import pytest

from actor_init.routes import RouterFlips
from replay.verdict.findings import FindingStatus
from replay.verdict.gradient_findings import UNKNOWN_ROUTER_LOSS, add_window_findings
from replay.verdict.recorded_pass import JobRouterLoss
from tests.replay.verdict.causes.made_evidence import (
    SETTINGS,
    draw_gradients,
    make_window,
    measure_norm,
    transpose_gradient,
)

ROUTER, HEAD = "model.layers.1.mlp.gate", "lm_head.weight"
EXPERTS, BEFORE = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"


def judge(off: Collection[str], share: float | None) -> set[FindingStatus]:
    """Judge a gradient whose parameters `off` differ; `share` is how often the noted loss holds the routers'."""
    replay = draw_gradients() | {
        f"{ROUTER}.weight": draw_gradients(1)["model.embed_tokens.weight"],
        HEAD: draw_gradients(2)["model.embed_tokens.weight"],
    }
    job = {name: transpose_gradient(values) if name in off else values for name, values in replay.items()}
    [compared] = make_window([job], replay)
    left_to_job = None if share is None else JobRouterLoss(coefficient=0.02, factor=share, is_noted=True)
    flips = [RouterFlips(router=ROUTER, num_tokens=8, distances=())]
    replayed = replace(compared.replayed, router_flips=flips, router_loss_of_training_loop=left_to_job)
    assert compared.recorded.step_after is not None
    step = replace(compared.recorded.step_after, grad_norm=measure_norm(job))
    recorded = replace(compared.recorded, step_after=step, has_job_weights_of_tokens=True)
    [judged] = add_window_findings([replace(compared, recorded=recorded, replayed=replayed)], SETTINGS)
    unsettled = [finding for finding in judged.window_findings if finding.status is FindingStatus.UNSETTLED]
    assert all((finding.doubt or "").startswith(UNKNOWN_ROUTER_LOSS) for finding in unsettled)
    return {finding.status for finding in judged.window_findings if not finding.agrees}


@pytest.mark.parametrize("share", [0.0, math.nan])
def test_routers_and_what_comes_before_them_are_unsettled(share: float) -> None:
    assert judge((f"{ROUTER}.weight", BEFORE), share) == {FindingStatus.UNSETTLED}
    assert judge((), share) == set()


@pytest.mark.parametrize("share", [0.0, math.nan])
@pytest.mark.parametrize("off", [(BEFORE,), (f"{ROUTER}.weight", EXPERTS), (f"{ROUTER}.weight", HEAD)])
def test_what_a_routers_loss_does_not_explain_differs(off: Collection[str], share: float) -> None:
    assert judge(off, share) == {FindingStatus.DIFFERS}


@pytest.mark.parametrize("share", [1.0, None])
def test_a_routers_loss_that_the_replay_holds_is_no_doubt(share: float | None) -> None:
    assert judge((f"{ROUTER}.weight", BEFORE), share) == {FindingStatus.DIFFERS}
