"""Define what a job's objective is computed from: the replay's log-probs, and what the job recorded beside them.

Shape letters: B rows, S tokens a row, A columns of the action mask (the last tokens of each row), N action tokens, V
vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actor_init.inputs.documents import KeptLogits, find_documents
from capture.facts import FactError
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import MicroBatch
from replay.options.needed_tensors import explain_missing


class ObjectiveError(FactError):
    """An objective cannot be computed from a capture. The message says what it lacks and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveData:
    """What a job recorded of one pass that its objective may need. Rows are in the captured order.

    tensors          the forward's tensor arguments and the job's notes, by name, as they came
    numbers          numbers among the forward's other arguments, and the facts of a converted dump
    left_out         what could not be kept, by name, with the reason
    sequence_BA      number of the sequence that each of a row's last tokens is in: its row, or its document where rows
                     hold several
    num_sequences    in the micro-batch
    has_action_mask  something says which tokens the loss is over: an action mask, labels, or the gradient of logits
    num_job_ranks    ranks of the job
    source           name of the capture
    """

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, float]
    left_out: Mapping[str, str]
    sequence_BA: Tensor
    num_sequences: int
    has_action_mask: bool
    num_job_ranks: int
    source: str

    @classmethod
    def collect(cls, call: CapturedCall, batch: MicroBatch) -> "ObjectiveData":
        """Collect it from a capture; `batch` is as the replay feeds it."""
        facts = call.call_facts.items()
        numbers = {
            name: float(fact) for name, fact in facts if isinstance(fact, int | float) and type(fact) is not bool
        }
        sequence_BS = (
            (find_documents(batch).is_first_BS.flatten().cumsum(0) - 1).clamp(min=0).view_as(batch.sequences_BS)
        )
        num_tokens = batch.sequences_BS.shape[1]
        says_tokens = (batch.action_mask_BA, batch.labels_BS, batch.loss_targets_BS)
        num_actions = num_tokens - 1 if batch.action_mask_BA is None else batch.action_mask_BA.shape[1]
        return cls(
            tensors={**call.tensors, **call.notes},
            numbers=numbers,
            left_out=call.left_out,
            sequence_BA=sequence_BS[:, num_tokens - num_actions :],
            num_sequences=int(sequence_BS.max()) + 1,
            has_action_mask=any(tensor is not None for tensor in says_tokens),
            num_job_ranks=call.origin.world_size or 1,
            source=batch.origin.source,
        )

    def to(self, device: torch.device) -> "ObjectiveData":
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, sequence_BA=self.sequence_BA.to(device))


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveInputs:
    """What a function named by --loss FILE.py:FUNCTION gets. It returns the loss of the pass, a tensor of one number.

    Rows are in the captured order; only `kept_logits` may have them reversed, which `logits` and `entropies` undo.

    log_probs_BA              the replay's, fp32, with their graph; 0 where the action mask is off
    action_mask_BA            True at the action tokens that have a log-prob
    recorded                  what the job recorded of the pass
    num_window_tokens         action tokens in all passes of the step, of all ranks
    num_window_passes         those passes
    kept_logits               what the forward left of its logits
    kept_logits_are_reversed  the forward was fed the rows from the last to the first
    """

    log_probs_BA: Tensor
    action_mask_BA: Tensor
    recorded: ObjectiveData
    num_window_tokens: int
    num_window_passes: int
    kept_logits: KeptLogits | None = None
    kept_logits_are_reversed: bool = False

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The captured tensors by name: the forward's arguments and the job's notes."""
        return self.recorded.tensors

    def logits(self) -> tuple[Tensor, Tensor]:
        """Return fp32 logits [N, V] of the action tokens, with their graph, and each one's place in the flattened
        [B, A].

        Raises ValueError under --tp and --ring, where no rank holds them whole.
        """
        assert self.kept_logits is not None
        logits_NV, slot_N = self.kept_logits.select_actions()
        if self.kept_logits_are_reversed:
            rows, num_actions = self.log_probs_BA.shape
            slot_N = (rows - 1 - slot_N // num_actions) * num_actions + slot_N % num_actions
        return logits_NV, slot_N

    def entropies(self) -> Tensor:
        """Return the entropy [B, A] of the distribution that each action token was predicted with, with its graph."""
        assert self.kept_logits is not None
        entropies_BA = self.kept_logits.compute_entropies()
        return entropies_BA.flip(0) if self.kept_logits_are_reversed else entropies_BA

    def find(self, *names: str) -> Tensor | None:
        """Return the first captured tensor that has one of the names; None if none has."""
        return next((self.tensors[name] for name in names if name in self.tensors), None)

    def of_tokens(self, *names: str) -> Tensor:
        """Return the first captured tensor of these names as fp32 [B, A], each token's number in the token's place, 0
        where the action mask is off.

        A tensor of fewer columns than A covers the last tokens; one number for each row or sequence is that of each of
        its tokens. Raises ObjectiveError if there is none, or if it leaves out an action token.
        """
        return torch.where(self.action_mask_BA, self.of_places(*names), 0.0)

    def of_places(self, *names: str) -> Tensor:
        """Return the same with the numbers that the tensor has where the action mask is off."""
        tensor = self.find(*names)
        if tensor is None:
            raise ObjectiveError(explain_missing(self.recorded, names))
        return self._spread_over_tokens(tensor, names[0])

    def _spread_over_tokens(self, tensor: Tensor, name: str) -> Tensor:
        rows, num_actions = self.log_probs_BA.shape
        values = tensor.detach().float()
        if values.ndim == 0:
            return values.expand(rows, num_actions)
        if values.ndim == 1 and len(values) == rows:
            return values[:, None].expand(rows, num_actions)
        if values.ndim == 1 and len(values) == self.recorded.num_sequences:
            return values[self.recorded.sequence_BA]
        if values.ndim == 1 and rows == 1:
            values = values[None]
        if values.ndim != 2 or len(values) != rows:
            raise ObjectiveError(
                f"{self.recorded.source}: {name} has shape {list(tensor.shape)}; allowed are a number, "
                f"[{rows}], and [{rows}, tokens] of the rows' last tokens"
            )
        num_missing = num_actions - values.shape[1]
        if num_missing > 0:
            if bool(self.action_mask_BA[:, :num_missing].any()):
                raise ObjectiveError(
                    f"{self.recorded.source}: {name} covers the last {values.shape[1]} tokens of a row, and the "
                    f"action mask has tokens before them. Note it for all {num_actions}"
                )
            return torch.nn.functional.pad(values, (num_missing, 0))
        return values[:, -num_actions:]

    def number(self, *names: str) -> float | None:
        """Return the first captured number of these names, noted or an argument; None if there is none."""
        tensor = self.find(*names)
        if tensor is not None:
            return float(tensor.flatten()[0]) if tensor.numel() == 1 else None
        return next((self.recorded.numbers[name] for name in names if name in self.recorded.numbers), None)

    def sum_by_sequence(self, values_BA: Tensor) -> Tensor:
        """Add up the action tokens' values of each sequence, [sequences]."""
        masked = torch.where(self.action_mask_BA, values_BA, 0.0)
        zeros = masked.new_zeros(self.recorded.num_sequences)
        return zeros.index_add(0, self.recorded.sequence_BA.flatten(), masked.flatten())

    def num_tokens_by_sequence(self) -> Tensor:
        """Count the action tokens of each sequence, [sequences]."""
        return self.sum_by_sequence(torch.ones_like(self.log_probs_BA, requires_grad=False).detach())
