"""Compute the clipped policy loss of PPO and GRPO; docs/objectives.md has the formulas and their sources.

Shape letters: B rows, A columns of the action mask (the last tokens of each row).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from capture.facts import Setting
from replay.objective.inputs import ObjectiveData, ObjectiveError, ObjectiveInputs
from replay.objective.objective import Formula, Need
from replay.options.declarations.tensor_names import ADVANTAGES, DIVISOR, NUM_ITEMS, OLD_LOG_PROBS, REF_LOG_PROBS
from replay.options.needed_tensors import explain_missing
from replay.options.spec import KlEstimator, ObjectiveSpec, Reduction

ON_POLICY = f"where the samples are the policy's own, {Setting('on_policy', True)}"
# As in verl and OpenRLHF: exp of more would overflow.
MAX_LOG_RATIO = 20.0


def compute_policy_loss(inputs: ObjectiveInputs, spec: ObjectiveSpec) -> Tensor:
    """Compute the loss of one pass. Raises ObjectiveError where the capture lacks what `spec` needs."""
    log_probs_BA = inputs.log_probs_BA
    advantages_BA = inputs.of_tokens(*ADVANTAGES)
    old_BA = log_probs_BA.detach() if spec.on_policy else inputs.of_tokens(*OLD_LOG_PROBS)
    loss_BA = compute_clipped_loss(log_probs_BA, old_BA, advantages_BA, spec)
    if spec.kl_coefficient:
        reference_BA = inputs.of_tokens(*REF_LOG_PROBS)
        divergence_BA = estimate_divergence(log_probs_BA, reference_BA, old_BA, spec.kl)
        loss_BA = loss_BA + spec.kl_coefficient * divergence_BA
    if spec.entropy_coefficient:
        loss_BA = loss_BA - spec.entropy_coefficient * inputs.entropies()
    return reduce_loss(loss_BA, inputs, spec)


def compute_clipped_loss(log_probs_BA: Tensor, old_BA: Tensor, advantages_BA: Tensor, spec: ObjectiveSpec) -> Tensor:
    """Compute each token's clipped policy loss."""
    ratio_BA = _compute_ratio(log_probs_BA, old_BA)
    high = spec.clip_low if spec.clip_high is None else spec.clip_high
    clipped_BA = ratio_BA.clamp(1 - spec.clip_low, 1 + high)
    loss_BA = -torch.minimum(ratio_BA * advantages_BA, clipped_BA * advantages_BA)
    if spec.dual_clip is not None:
        bounded_BA = torch.minimum(loss_BA, -spec.dual_clip * advantages_BA)
        loss_BA = torch.where(advantages_BA < 0, bounded_BA, loss_BA)
    return loss_BA


def estimate_divergence(log_probs_BA: Tensor, reference_BA: Tensor, old_BA: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate for each token the KL divergence of the policy to the reference.

    k3-weighted is k3 times the ratio of the policy to the old one (https://arxiv.org/abs/2512.02556), as TRL adds it by
    default.
    """
    log_ratio_BA = log_probs_BA - reference_BA
    match estimator:
        case KlEstimator.K1:
            return log_ratio_BA
        case KlEstimator.K2:
            return log_ratio_BA.square() / 2
        case KlEstimator.K3:
            return torch.expm1(-log_ratio_BA) + log_ratio_BA
        case KlEstimator.K3_WEIGHTED:
            k3_BA = estimate_divergence(log_probs_BA, reference_BA, old_BA, KlEstimator.K3)
            return _compute_ratio(log_probs_BA, old_BA) * k3_BA


def _compute_ratio(log_probs_BA: Tensor, old_BA: Tensor) -> Tensor:
    return (log_probs_BA - old_BA).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def reduce_loss(loss_BA: Tensor, inputs: ObjectiveInputs, spec: ObjectiveSpec) -> Tensor:
    """Reduce the tokens' losses to the loss of the pass. Raises ObjectiveError without a divisor."""
    total = torch.where(inputs.action_mask_BA, loss_BA, 0.0).sum()
    match spec.reduction:
        case Reduction.TOKENS:
            return total / inputs.action_mask_BA.sum().clamp(min=1)
        case Reduction.WINDOW_TOKENS:
            num_tokens = inputs.number(*NUM_ITEMS) or inputs.num_window_tokens
            return total * inputs.recorded.num_job_ranks / max(num_tokens, 1)
        case Reduction.SEQUENCES:
            counts = inputs.num_tokens_by_sequence()
            means = inputs.sum_by_sequence(loss_BA) / counts.clamp(min=1)
            return means.sum() / (counts > 0).sum().clamp(min=1)
        case Reduction.DIVISOR:
            divisor = spec.divisor or inputs.number(*DIVISOR)
            if not divisor:
                raise ObjectiveError(f"{explain_missing(inputs.recorded, DIVISOR)}, or {Setting('divisor', 'X')}")
            return total / (divisor * inputs.recorded.num_sequences)


def list_policy_needs(recorded: ObjectiveData, spec: ObjectiveSpec) -> Iterator[Need]:
    """List what must be recorded."""
    yield Need(names=ADVANTAGES)
    if not spec.on_policy:
        yield Need(names=OLD_LOG_PROBS, or_else=ON_POLICY)
    if spec.kl_coefficient:
        yield Need(names=REF_LOG_PROBS, or_else=f"or without {Setting('kl_coefficient')}")
    has_divisor = spec.divisor or any(name in recorded.numbers for name in DIVISOR)
    if spec.reduction is Reduction.DIVISOR and not has_divisor:
        yield Need(names=DIVISOR, or_else=f"or {Setting('divisor', 'X')}")


def describe_policy(spec: ObjectiveSpec) -> list[str]:
    high = spec.clip_low if spec.clip_high is None else spec.clip_high
    parts = [f"ratio clipped to {1 - spec.clip_low:g} ... {1 + high:g}", f"reduction {spec.reduction}"]
    parts += [f"divisor {spec.divisor:g}"] if spec.divisor is not None else []
    parts += ["on policy"] if spec.on_policy else []
    parts += [f"dual clip {spec.dual_clip:g}"] if spec.dual_clip is not None else []
    parts += [f"KL {spec.kl} x {spec.kl_coefficient:g}"] if spec.kl_coefficient else []
    parts += [f"entropy x {spec.entropy_coefficient:g}"] if spec.entropy_coefficient else []
    return parts


POLICY = Formula(
    loss=compute_policy_loss,
    describe=describe_policy,
    needs=list_policy_needs,
    asks_entropies=lambda spec: spec.entropy_coefficient > 0,
    sums_over_window=lambda spec: spec.reduction is Reduction.WINDOW_TOKENS,
)
