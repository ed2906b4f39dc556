"""Compute a loss with the gradient of the job's, from what the gradient of the job's logits told of it.

With g the recorded gradient of a target's logit, and p the probability of the target, the job's loss has the derivative
g / (1 - p) by the target's log-prob. The sum of the log-probs, each times that number, has the same gradient. Its value
is not that of the job's loss.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from capture.file_format.micro_batch import LOSS_GRADIENTS, LOSS_TARGETS
from replay.objective.inputs import ObjectiveData, ObjectiveError, ObjectiveInputs
from replay.objective.objective import Formula, Need
from replay.options.spec import ObjectiveSpec

# Of a target that is all but certain rounding leaves nothing of 1 - p; its gradient is as little.
LEAST_DOUBT = 1e-6


def compute_recorded_loss(inputs: ObjectiveInputs, spec: ObjectiveSpec) -> Tensor:
    """Compute the loss of one pass. Its gradient is the pass's share of the step's, so that passes add up."""
    gradients_BS = inputs.tensors[LOSS_GRADIENTS]
    if gradients_BS.shape != inputs.log_probs_BA.shape:
        raise ObjectiveError(f"{inputs.recorded.source}: {LOSS_GRADIENTS} has shape {list(gradients_BS.shape)}")
    # Gradients and log-probs stand at the positions that predict their targets.
    gradients_BA = gradients_BS.float()
    doubts_BA = -torch.expm1(inputs.log_probs_BA.detach().float())
    weights_BA = torch.where(doubts_BA > LEAST_DOUBT, gradients_BA / doubts_BA.clamp(min=LEAST_DOUBT), 0.0)
    return torch.where(inputs.action_mask_BA, weights_BA * inputs.log_probs_BA, 0.0).sum()


def list_recorded_needs(recorded: ObjectiveData, spec: ObjectiveSpec) -> Iterable[Need]:
    advice = "a recording has them where the job computes its loss from logits that the model returns"
    return [Need(names=(name,), or_else=advice) for name in (LOSS_TARGETS, LOSS_GRADIENTS)]


def describe_recorded(spec: ObjectiveSpec) -> list[str]:
    return ["the weights of log-probs that the job's gradient had"]


RECORDED = Formula(
    loss=compute_recorded_loss,
    describe=describe_recorded,
    needs=list_recorded_needs,
    sums_over_window=lambda spec: True,
)
