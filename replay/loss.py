"""The losses a pass can be given: enough to drive a backward of the right size through the model."""

from dataclasses import replace

from torch import Tensor

from actor_init.inputs.packing import ActorInputs
from capture.file_format.micro_batch import MicroBatch
from replay.spec import LossName


def tokens_for(loss: LossName, batch: MicroBatch) -> MicroBatch:
    """`batch` with the action mask that `loss` averages over.

    sft leaves the captured action mask aside, so that the labels count, or every real token where there are none.
    """
    match loss:
        case LossName.STAND_IN:
            return batch
        case LossName.SFT:
            return replace(batch, action_mask_BA=None)


def negated_mean(log_probs_BA: Tensor, inputs: ActorInputs) -> Tensor:
    """Minus the mean log-prob of the action tokens of the micro-batch; 0 where there are none."""
    return -log_probs_BA.sum() / inputs.action_mask_BA.sum().clamp(min=1)
