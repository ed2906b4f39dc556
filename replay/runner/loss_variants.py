"""Try other losses on a pass's log-probs, if the loss of the objective is not the job's.

Each loss is compared with two things that a recording may have: the job's loss, and the gradient of the logits of the
target tokens. The gradient has a number for each token, so it tells losses apart whose values are nearly equal. The
pass has run, so its logits are gone: losses with an entropy or a temperature are tried later (pass_trials.py).

Shape letters: B rows, A columns of the action mask (the last tokens of each row).
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from replay.objective.dpo_variants import list_dpo_variants
from replay.objective.inputs import ObjectiveError, ObjectiveInputs
from replay.objective.objective import Objective
from replay.options.declarations.dpo import DPO
from replay.options.declarations.policy import POLICY
from replay.runner.trial_logits import measure_distance
from replay.runner.trial_objectives import PolicyCase, differentiate_targets, list_policy_trials, place_gradients
from replay.tolerances.difference import is_coarse
from replay.verdict.tried_losses import TriedLoss, TriedLosses

# The job used the objective's loss in a pass if loss and gradient are no farther apart than this, relatively.
SAME_LOSS, SAME_GRADIENT = 1e-5, 1e-4
# Losses are compared only in a pass in which no log-prob is farther from the job's than this.
MAX_DIFFERENCE_IN_FP32, MAX_DIFFERENCE_IN_16_BITS = 1e-3, 0.05


def has_other_log_probs(
    job_log_probs: Sequence[float], replay_log_probs: Sequence[float | None], job_dtypes: Collection[str]
) -> bool:
    """Is a log-prob of the replay too far from the job's to compare losses that are computed from the log-probs?

    replay_log_probs  at the job's positions; None: the replay has no log-prob at the position
    job_dtypes        what the job computed in; empty: not known, so it may be a dtype of 16 bits
    """
    is_in_fp32 = bool(job_dtypes) and not is_coarse(job_dtypes)
    max_difference = MAX_DIFFERENCE_IN_FP32 if is_in_fp32 else MAX_DIFFERENCE_IN_16_BITS
    return any(
        replay_log_prob is not None and abs(replay_log_prob - job_log_prob) > max_difference
        for job_log_prob, replay_log_prob in zip(job_log_probs, replay_log_probs, strict=False)
    )


def try_losses(
    objective: Objective,
    make_inputs: Callable[[Tensor], ObjectiveInputs],
    log_probs_BA: Tensor,
    job_loss: float | None,
) -> TriedLosses | None:
    """Compute other losses from the log-probs of a pass.

    Returns None if the objective needs logits or entropies, if no other forms of it are known here, if the capture has
    neither of the two things that losses are compared with, or if they show that the objective's loss is the job's.

    log_probs_BA  those of the pass
    job_loss      the loss that the job recorded; None: it recorded none, or one with a doubt
    """
    if objective.needs_logits_or_entropies or objective.loss not in (POLICY.name, DPO.name):
        return None
    inputs = make_inputs(log_probs_BA.detach().double().requires_grad_())
    gradient_BA = place_gradients(inputs)
    with torch.enable_grad():
        loss = objective.formula.loss(inputs, objective.spec)
        own = TriedLoss(
            name="",
            says="",
            try_next="",
            loss=float(loss.detach()),
            gradient_apart=_measure_gradient(loss, inputs, gradient_BA),
            num_changes=0,
        )
        is_same_loss = job_loss is None or math.isclose(own.loss, job_loss, rel_tol=SAME_LOSS, abs_tol=SAME_LOSS)
        if is_same_loss and (own.gradient_apart is None or own.gradient_apart <= SAME_GRADIENT):
            return None
        list_others = _try_policies if objective.loss == POLICY.name else _try_pairs
        others = list(list_others(objective, inputs, gradient_BA, math.nan if job_loss is None else job_loss))
    return TriedLosses(
        own=own, others=others, num_gradients=0 if gradient_BA is None else int((gradient_BA != 0).sum())
    )


def _try_policies(
    objective: Objective, inputs: ObjectiveInputs, gradient_BA: Tensor | None, job_loss: float
) -> Iterator[TriedLoss]:
    yield from list_policy_trials(
        PolicyCase(inputs=inputs, spec=objective.spec, job_loss=job_loss, gradient_BA=gradient_BA)
    )


def _try_pairs(
    objective: Objective, inputs: ObjectiveInputs, gradient_BA: Tensor | None, job_loss: float
) -> Iterator[TriedLoss]:
    for variant in list_dpo_variants(objective.spec):
        try:
            loss = variant.loss(inputs)
        except ObjectiveError:
            # The capture lacks what this loss is computed from.
            continue
        yield TriedLoss(
            name=variant.says,
            says=variant.says,
            try_next=variant.try_next,
            loss=float(loss.detach()),
            gradient_apart=_measure_gradient(loss, inputs, gradient_BA),
        )


def _measure_gradient(loss: Tensor, inputs: ObjectiveInputs, gradient_BA: Tensor | None) -> float | None:
    if gradient_BA is None:
        return None
    return measure_distance(gradient_BA, differentiate_targets(loss, inputs))
