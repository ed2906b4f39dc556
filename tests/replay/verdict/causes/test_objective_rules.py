"""Which other loss a job computed in place of the objective: losses written out here, found by what was recorded.

Shape letters: B rows, S tokens a row, A columns of the action mask (the last tokens of each row).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capture.file_format.micro_batch import LOSS_GRADIENTS, LOSS_TARGETS
from replay.objective.dpo_variants import list_dpo_variants
from replay.objective.inputs import ObjectiveInputs
from replay.objective.objective import Objective
from replay.options.option_parsing import build_replay_spec
from replay.runner.loss_variants import try_losses
from replay.tolerances.job_bounds import LOSS, TOKEN_LOG_PROBS
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.objective_rules import find_loss_outside_mask, find_other_objective
from replay.verdict.causes.table import find_causes
from replay.verdict.findings import judge_number
from replay.verdict.outcomes import Outcome
from replay.verdict.token_traits import TokenTraits
from replay.verdict.tried_losses import TriedLosses
from tests.helpers.objective_inputs import ROWS, made
from tests.replay.verdict.causes.made_evidence import draw_gradients, make_forward_evidence, make_verdict, make_window

NUM_PROMPT_TOKENS = 3


def open_objective(**options: Any) -> Objective:
    objective = Objective.open(build_replay_spec(options))
    assert objective is not None
    return objective


def record_gradient(inputs: ObjectiveInputs, loss: Tensor) -> ObjectiveInputs:
    """Add the gradient of the targets' logits to what the job recorded: that of the log-probs, times 1 - p."""
    [weights_BA] = torch.autograd.grad(loss, inputs.log_probs_BA)
    gradients_BA = weights_BA * (1 - inputs.log_probs_BA.detach().exp())
    # A token is predicted one place before it.
    gradients_BS = F.pad(gradients_BA, (NUM_PROMPT_TOKENS - 1, 1))
    tensors = {**inputs.tensors, LOSS_GRADIENTS: gradients_BS, LOSS_TARGETS: torch.ones_like(gradients_BS).int()}
    return replace(inputs, recorded=replace(inputs.recorded, tensors=tensors))


def try_against(
    job_loss: Callable[[ObjectiveInputs], Tensor],
    objective: Objective,
    *,
    with_gradient: bool = True,
    seed: int = 0,
    num_tokens_of_other_passes: int = 0,
) -> tuple[float, TriedLosses | None]:
    """Return the loss of a job that computes `job_loss`, and what a replay with `objective` tries."""
    inputs = made(seed)
    inputs = replace(inputs, num_window_tokens=inputs.num_window_tokens + num_tokens_of_other_passes)
    loss = job_loss(inputs)
    recorded = record_gradient(inputs, loss) if with_gradient else inputs

    def make_inputs(log_probs_BA: Tensor) -> ObjectiveInputs:
        return replace(recorded, log_probs_BA=log_probs_BA)

    value = float(loss.detach())
    return value, try_losses(objective, make_inputs, inputs.log_probs_BA, value)


def find_cause(
    *tried: tuple[float, TriedLosses | None], wrong: str = LOSS, num_judged: int | None = None
) -> Cause | None:
    """Find the cause that passes of these losses show.

    wrong       the quantity whose finding differs
    num_judged  passes whose weights are the job's; None: all
    """
    gradients = draw_gradients()
    passes, verdicts = [], []
    for index, (loss, losses) in enumerate(tried):
        own = math.nan if losses is None else losses.own.loss
        [compared] = make_window([gradients], gradients, index=index)
        findings = [
            judge_number(LOSS, loss, own, difference=abs(own - loss), bound=1e-5),
            judge_number(TOKEN_LOG_PROBS, 1.0, 1.0, difference=float(wrong == TOKEN_LOG_PROBS), bound=1e-5),
        ]
        passes.append(replace(compared, findings=findings, replayed=replace(compared.replayed, tried_losses=losses)))
        is_judged = num_judged is None or index < num_judged
        outcome = Outcome.DIFFERS if is_judged else Outcome.CANNOT_TELL
        verdicts.append(replace(make_verdict(index, findings), outcome=outcome))
    return find_other_objective(replace(make_forward_evidence(), passes=passes, verdicts=verdicts))


def compute_policy(
    inputs: ObjectiveInputs,
    token_loss: Callable[[Tensor, Tensor], Tensor],
    *,
    divergence: Callable[[Tensor], Tensor] = torch.zeros_like,
    on_policy: bool = False,
    num_divided_by: int | None = None,
) -> Tensor:
    """Return a mean of token losses, each of the ratio and the advantage, plus half of a divergence."""
    tensors, log_probs_BA = inputs.tensors, inputs.log_probs_BA
    old_BA = log_probs_BA.detach() if on_policy else tensors["old_log_probs"]
    loss_BA = token_loss((log_probs_BA - old_BA).exp(), tensors["advantages"])
    loss_BA = loss_BA + 0.5 * divergence(log_probs_BA - tensors["ref_log_probs"])
    losses_N = loss_BA[inputs.action_mask_BA]
    return losses_N.sum() / (num_divided_by or len(losses_N))


def compute_weighted_divergence(inputs: ObjectiveInputs) -> Tensor:
    """The clipped loss plus half of k3 times the ratio, as of TRL's `use_bias_correction_kl`."""
    ratio_BA = (inputs.log_probs_BA - inputs.tensors["old_log_probs"]).exp()
    log_ratio_BA = inputs.tensors["ref_log_probs"] - inputs.log_probs_BA
    k3_BA = log_ratio_BA.exp() - log_ratio_BA - 1
    return compute_policy(inputs, clip) + 0.5 * (ratio_BA * k3_BA)[inputs.action_mask_BA].mean()


def clip(ratio_BA: Tensor, advantages_BA: Tensor) -> Tensor:
    return -torch.min(ratio_BA * advantages_BA, ratio_BA.clamp(0.8, 1.2) * advantages_BA)


def compute_pairs(inputs: ObjectiveInputs, beta: float, *, has_reference: bool = True, sign: int = 1) -> Tensor:
    sums_B = (inputs.log_probs_BA * inputs.action_mask_BA).sum(dim=1)
    if has_reference:
        sums_B = sums_B - (inputs.tensors["ref_log_probs"] * inputs.action_mask_BA).sum(dim=1)
    margins = sums_B[: ROWS // 2] - sums_B[ROWS // 2 :]
    return torch.log1p((-sign * beta * margins).exp()).mean()


POLICY, DPO = {"loss": "policy"}, {"loss": "dpo"}
WITH_KL = {"loss": "policy", "kl_coefficient": "0.5"}


@pytest.mark.parametrize(
    ("options", "job_loss", "words"),
    [
        (POLICY, lambda inputs: compute_policy(inputs, clip, on_policy=True), "so that each ratio is 1"),
        (
            POLICY,
            lambda inputs: compute_policy(
                inputs, lambda ratio, advantage: -torch.max(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            ),
            "takes the larger of the clipped and the unclipped gain",
        ),
        (
            POLICY,
            lambda inputs: compute_policy(inputs, clip, num_divided_by=28),
            "is divided by all 28 places of the rows",
        ),
        (POLICY, lambda inputs: compute_policy(inputs, lambda r, a: clip(r, -a)), "has the other sign"),
        (POLICY, lambda inputs: compute_policy(inputs, lambda ratio, a: -ratio * a), "does not clip the ratio"),
        (
            WITH_KL,
            lambda inputs: compute_policy(inputs, clip, divergence=lambda x: x.exp() - 1 - x),
            "has policy and reference swapped in the KL",
        ),
        (WITH_KL, lambda inputs: compute_policy(inputs, clip), "has no KL term"),
        (WITH_KL, compute_weighted_divergence, "estimates the KL by k3-weighted, not k3"),
        (DPO, lambda inputs: compute_pairs(inputs, 0.5), "has a beta of 0.5, not 0.1"),
        (DPO, lambda inputs: compute_pairs(inputs, 0.1, has_reference=False), "has no reference"),
        (DPO, lambda inputs: compute_pairs(inputs, 0.1, sign=-1), "prefers the rejected sequences"),
    ],
)
def test_a_job_s_other_loss_is_named(
    options: Mapping[str, str], job_loss: Callable[[ObjectiveInputs], Tensor], words: str
) -> None:
    cause = find_cause(try_against(job_loss, open_objective(**options)))
    assert cause is not None
    assert words in cause.sentence
    assert (cause.name, cause.sureness) == (CauseName.OBJECTIVE, Sureness.IS)


def test_a_loss_over_the_tokens_of_all_passes_of_the_step_is_named() -> None:
    def compute(inputs: ObjectiveInputs) -> Tensor:
        return compute_policy(inputs, clip, num_divided_by=inputs.num_window_tokens)

    tried = [try_against(compute, open_objective(**POLICY), seed=seed, num_tokens_of_other_passes=9) for seed in (0, 1)]
    cause = find_cause(*tried)
    assert cause is not None
    assert cause.sentence.startswith("the job's loss is the sum over its tokens divided by the tokens of all passes")
    assert "if the job is meant so: --reduction window-tokens; " in str(cause.try_next)


@pytest.mark.parametrize(("num_judged", "is_named"), [(None, False), (1, True)])
def test_a_pass_after_a_wrong_step_says_nothing_about_the_loss(num_judged: int | None, is_named: bool) -> None:
    """The replay stepped with a gradient that is not the job's, so that none of its losses is the job's any more."""
    before = try_against(lambda inputs: compute_policy(inputs, clip, on_policy=True), open_objective(**POLICY))
    cause = find_cause(before, try_against(compute_half, open_objective(**POLICY), seed=1), num_judged=num_judged)
    assert (cause is not None) is is_named


def test_values_alone_need_several_passes_to_be_sure() -> None:
    """One number among dozens of losses may be near by chance."""

    def compute(inputs: ObjectiveInputs) -> Tensor:
        return compute_policy(inputs, clip, on_policy=True)

    one = try_against(compute, open_objective(**POLICY), with_gradient=False)
    cause = find_cause(one)
    assert cause is not None
    assert "so that each ratio is 1" in cause.sentence
    # Without its gradient the loss of a ratio of 1 is that of an advantage's mean, and no other variant's.
    assert "gradient" not in cause.sentence
    other = try_against(compute_half, open_objective(**POLICY), with_gradient=False, seed=1)
    assert find_cause(one, other) is None


def compute_half(inputs: ObjectiveInputs) -> Tensor:
    return compute_policy(inputs, clip) / 3


def test_no_variant_is_named_for_a_loss_that_none_has() -> None:
    assert find_cause(try_against(compute_half, open_objective(**POLICY))) is None


def test_the_objective_s_own_loss_tries_nothing() -> None:
    assert try_against(lambda inputs: compute_policy(inputs, clip), open_objective(**POLICY))[1] is None


def test_another_forward_is_no_other_loss() -> None:
    tried = try_against(lambda inputs: compute_policy(inputs, clip, on_policy=True), open_objective(**POLICY))
    assert find_cause(tried, wrong=TOKEN_LOG_PROBS) is None


def test_other_betas_are_tried_where_beta_is_0() -> None:
    cause = find_cause(try_against(lambda inputs: compute_pairs(inputs, 0.5), open_objective(**DPO, dpo_beta="0")))
    assert cause is not None
    assert "has a beta of 0.5, not 0" in cause.sentence


def test_each_loss_of_pairs_is_another_one() -> None:
    objective = open_objective(**DPO)
    for variant in list_dpo_variants(objective.spec):
        _, tried = try_against(variant.loss, objective)
        assert tried is not None, variant.says
        [found] = [other for other in tried.others if other.name == variant.says]
        assert found.gradient_apart is not None
        assert found.gradient_apart < 1e-4, variant.says


def test_a_loss_over_more_than_its_mask_is_the_cause() -> None:
    evidence = make_forward_evidence(LOSS)
    gradients = draw_gradients()
    [compared] = make_window([gradients], gradients)
    traits = TokenTraits(rows=(), has_mask=True, largest_id=9, num_outside_mask=35, num_with_gradient=80)
    for tokens, is_cause in ((traits, True), (replace(traits, num_outside_mask=0), False)):
        recorded = replace(compared.recorded, tokens=tokens)
        own = replace(compared, recorded=recorded, findings=evidence.verdicts[0].findings)
        with_pass = replace(evidence, passes=[own])
        cause = find_loss_outside_mask(with_pass)
        assert (cause is not None) is is_cause
        assert ("35 of 80 positions" in find_causes(with_pass)[0].sentence) is is_cause
