"""Compute the loss of direct preference optimisation; docs/objectives.md has the formula and its source."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from capture.facts import Setting
from replay.objective.inputs import ObjectiveData, ObjectiveError, ObjectiveInputs
from replay.objective.objective import Formula, Need
from replay.options.declarations.tensor_names import REF_CHOSEN, REF_LOG_PROBS, REF_REJECTED
from replay.options.needed_tensors import explain_missing
from replay.options.spec import ObjectiveSpec, PairOrder


def compute_dpo_loss(inputs: ObjectiveInputs, spec: ObjectiveSpec) -> Tensor:
    """Compute the sigmoid loss, the mean over the pairs of one pass.

    Raises ObjectiveError for an odd number of sequences, or where the capture lacks the reference's log-probs.
    """
    margins, smoothing = compute_margins(inputs, spec, read_reference(inputs, spec)), spec.label_smoothing
    losses: Tensor = -F.logsigmoid(margins) * (1 - smoothing) - F.logsigmoid(-margins) * smoothing
    return losses.mean()


def compute_margins(inputs: ObjectiveInputs, spec: ObjectiveSpec, reference: tuple[Tensor, Tensor]) -> Tensor:
    """Compute by how much the policy prefers each chosen sequence more than the reference does, times beta, [pairs].

    reference  its log-probs of the chosen sequences and of the rejected ones
    """
    chosen, rejected = split_pairs(reduce_by_sequence(inputs.log_probs_BA, inputs, spec), spec.pairs)
    ref_chosen, ref_rejected = reference
    return spec.dpo_beta * ((chosen - rejected) - (ref_chosen - ref_rejected))


def reduce_by_sequence(values_BA: Tensor, inputs: ObjectiveInputs, spec: ObjectiveSpec) -> Tensor:
    """Compute each sequence's sum of log-probs, or their mean, [sequences]."""
    sums = inputs.sum_by_sequence(values_BA)
    return sums / inputs.num_tokens_by_sequence().clamp(min=1) if spec.average_log_probs else sums


def split_pairs(values: Tensor, pairs: PairOrder) -> tuple[Tensor, Tensor]:
    """Split numbers into those of the chosen sequences and those of the rejected ones, [pairs] each."""
    match pairs:
        case PairOrder.HALVES:
            half = len(values) // 2
            return values[:half], values[half:]
        case PairOrder.ALTERNATE:
            return values[0::2], values[1::2]


def read_reference(inputs: ObjectiveInputs, spec: ObjectiveSpec) -> tuple[Tensor, Tensor]:
    """Read the reference's numbers: as noted for each pair or sequence, else from its tokens' log-probs.

    Raises ObjectiveError for an odd number of sequences, or where the capture lacks them.
    """
    if inputs.recorded.num_sequences % 2:
        why = f": {inputs.recorded.num_sequences} sequences are no pairs"
        advice = f"Try: {Setting('loss', 'sft')}, or a capture with chosen and rejected sequences"
        raise ObjectiveError(inputs.recorded.source, why, advice)
    chosen, rejected = inputs.find(*REF_CHOSEN), inputs.find(*REF_REJECTED)
    num_pairs = inputs.recorded.num_sequences // 2
    if chosen is not None and rejected is not None:
        if any(numbers.numel() != num_pairs for numbers in (chosen, rejected)):
            raise ObjectiveError(
                f"{inputs.recorded.source}: {REF_CHOSEN[0]} and {REF_REJECTED[0]} must have one number for "
                f"each of {num_pairs} pairs, not shapes {list(chosen.shape)} and {list(rejected.shape)}"
            )
        return chosen.float().flatten(), rejected.float().flatten()
    token_values = inputs.find(*REF_LOG_PROBS)
    if token_values is None:
        raise ObjectiveError(explain_missing(inputs.recorded, REF_LOG_PROBS))
    if token_values.ndim == 1 and token_values.numel() == inputs.recorded.num_sequences:
        return split_pairs(token_values.float(), spec.pairs)
    with torch.no_grad():
        return split_pairs(reduce_by_sequence(inputs.of_tokens(*REF_LOG_PROBS), inputs, spec), spec.pairs)


def list_dpo_needs(recorded: ObjectiveData, spec: ObjectiveSpec) -> Iterable[Need]:
    """List what must be recorded: the reference's numbers of the pairs, or of sequences or tokens."""
    has_pairs = all(names[0] in recorded.tensors for names in (REF_CHOSEN, REF_REJECTED))
    return () if has_pairs else (Need(names=REF_LOG_PROBS),)


def describe_dpo(spec: ObjectiveSpec) -> list[str]:
    parts = [f"beta {spec.dpo_beta:g}", f"pairs in {spec.pairs}"]
    parts += [f"label smoothing {spec.label_smoothing:g}"] if spec.label_smoothing else []
    parts += ["mean log-probs"] if spec.average_log_probs else []
    return parts


DPO = Formula(loss=compute_dpo_loss, describe=describe_dpo, needs=list_dpo_needs)
