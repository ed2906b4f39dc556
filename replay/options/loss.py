"""Define the losses a replay can use: they drive a backward of realistic cost through the model."""

from dataclasses import replace

from torch import Tensor

from actor_init.inputs.packing import ActorInputs
from capture.file_format.micro_batch import MicroBatch, with_labels_of_own_tokens
from replay.options.spec import LossName, Parts, is_objective


def tokens_for(loss: str, batch: MicroBatch) -> MicroBatch:
    """Return `batch` with the action mask that `loss` averages over.

    sft drops the captured action mask, so that the loss is over the labels, or over every real token if there are
    none. A job's objective is of a row's own tokens, so that `shift_labels` are labels there.
    """
    if is_objective(loss):
        return with_labels_of_own_tokens(batch)
    return replace(batch, action_mask_BA=None) if loss == LossName.SFT else batch


def may_count_after_padding(spec: Parts) -> bool:
    """Tell whether a label counts that padding predicts, as in a model's own loss, if rows are padded as captured.

    Not where packed rows were asked for, nor where parity compares runs of the same tokens in any layout.
    """
    actor, measure = spec.actor, spec.measure
    return not (actor.packing or actor.parallel.ring > 1 or measure.details or is_objective(measure.loss))


def negated_mean(log_probs_BA: Tensor, inputs: ActorInputs) -> Tensor:
    """Return minus the mean log-prob of the micro-batch's action tokens; 0 if there are none."""
    return -log_probs_BA.sum() / inputs.action_mask_BA.sum().clamp(min=1)
