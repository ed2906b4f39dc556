"""Find where documents begin in a micro-batch's rows, and keep a forward's logits for losses that need them.

A document begins at each row's first token, and where the capture says so.
A row holds several documents if it was given boundaries (`cu_seq_lens_q`, as flash attention's kernels take them), or
position ids that restart. Then attention stays within a document, as under transformers' own masks and kernels.

Shape letters: B rows, S tokens a row, T real tokens of all rows, D documents, A trailing tokens a row with an action
mask, N action tokens with a log-prob, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actor_init.attention.ring_split import sum_over_ring
from capture.facts import Setting
from capture.file_format.micro_batch import CaptureError, MicroBatch

BORDER_NAMES = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seq_lens", "cu_seqlens")
KEY_BORDER_NAMES = ("cu_seq_lens_k", "cu_seqlens_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Where documents begin, and their tokens' positions.

    position_BS  int64, of the real tokens; undefined for padding
    is_first_BS  True at each document's first real token
    """

    position_BS: Tensor
    is_first_BS: Tensor

    @property
    def has_shared_rows(self) -> bool:
        """Does any row hold several documents?"""
        return bool((self.is_first_BS.sum(dim=1) > 1).any())

    def measure_lengths(self, real_BS: Tensor) -> Tensor:
        """Measure the lengths [D] of all rows' documents, in real tokens."""
        first_D = self.is_first_BS[real_BS].nonzero().flatten()
        return torch.diff(first_D, append=torch.tensor([int(real_BS.sum())]))

    def compute_packed_positions(self, real_BS: Tensor, source: str) -> Tensor:
        """Compute positions [T] that rise by one within a document, and jump between documents.

        That is how transformers' masks tell packed documents apart, except where one document's positions go on
        from the one before. Raises CaptureError if they jump within a document.
        """
        position_T, is_first_T = self.position_BS[real_BS], self.is_first_BS[real_BS]
        difference_T = torch.diff(position_T, prepend=position_T[:1])
        if not bool((difference_T == 1)[~is_first_T].all()):
            why = ": position_ids jump within a text, which packed rows cannot repeat"
            raise CaptureError(source, why, f"Try: {Setting('packing', False)}")
        return position_T

    def compute_restarting_positions(self, real_BS: Tensor, source: str) -> Tensor:
        """Compute packed positions [T], but all from 0 where one document's would go on from another's.

        Raises CaptureError if they jump within a document.
        """
        position_T = self.compute_packed_positions(real_BS, source)
        if not self.has_continuing_positions(real_BS):
            return position_T
        return position_T - position_T[self.is_first_BS[real_BS]].repeat_interleave(self.measure_lengths(real_BS))

    def has_continuing_positions(self, real_BS: Tensor) -> bool:
        """Do any document's positions go on where those of the one before end?"""
        position_T, is_first_T = self.position_BS[real_BS], self.is_first_BS[real_BS]
        return bool((torch.diff(position_T) == 1)[is_first_T[1:]].any())


def is_of_trainers_actor(batch: MicroBatch) -> bool:
    """Tell whether the model was given an action mask: then it is a trainer's own actor around it."""
    return batch.action_mask_BA is not None and not batch.has_noted_mask


def gives_positions(batch: MicroBatch) -> bool:
    """Tell whether the job, and not the model, decided on the position ids of a pass.

    A trainer's own actor counts real tokens.
    """
    return is_of_trainers_actor(batch) or not {"position_ids", *BORDER_NAMES}.isdisjoint(batch.extra_tensors)


def find_documents(batch: MicroBatch) -> Documents:
    """Find the documents. Without position ids a row's real tokens, or a document's, count from 0.

    Raises CaptureError for position ids or boundaries that are invalid or do not fit the rows.
    """
    real_BS = batch.attention_mask_BS
    row_index_BS = real_BS.long().cumsum(dim=1) - 1
    position_BS = _read_position_ids(batch)
    number_S = _number_documents(batch)
    if number_S is not None:
        is_first_BS = _find_starts(number_S.expand_as(real_BS), real_BS, lambda difference: difference > 0)
    elif position_BS is not None:
        is_first_BS = _find_starts(position_BS, real_BS, lambda difference: difference <= 0)
    else:
        is_first_BS = real_BS & (row_index_BS == 0)
    if position_BS is None:
        first_BS = torch.where(is_first_BS, row_index_BS, 0).cummax(dim=1).values
        position_BS = row_index_BS - first_BS
    return Documents(position_BS=position_BS, is_first_BS=is_first_BS)


def _read_position_ids(batch: MicroBatch) -> Tensor | None:
    """Read position ids [B, S], also if all rows share one."""
    ids = batch.extra_tensors.get("position_ids")
    if ids is None:
        return None
    rows, num_tokens = batch.sequences_BS.shape
    if ids.dtype.is_floating_point or ids.shape not in ((rows, num_tokens), (1, num_tokens), (num_tokens,)):
        raise CaptureError(
            f"{batch.origin.source}: position_ids are {ids.dtype} of shape {list(ids.shape)}; replayed are "
            f"integers of shape {[rows, num_tokens]} or {[1, num_tokens]}, and none with an axis more, as for images"
        )
    if int(ids.min()) < 0:
        raise CaptureError(f"{batch.origin.source}: position id {int(ids.min())} is negative")
    return ids.long().expand(rows, num_tokens)


def _find_starts(values_BS: Tensor, real_BS: Tensor, begins: Callable[[Tensor], Tensor]) -> Tensor:
    """Find the real tokens whose difference to the previous real token in their row `begins` a document."""
    is_start_BS = torch.zeros_like(real_BS)
    for values_S, real_S, is_start_S in zip(values_BS, real_BS, is_start_BS, strict=True):
        is_start_S[real_S] = torch.cat([torch.ones_like(real_S[:1]), begins(torch.diff(values_S[real_S]))])[
            : real_S.sum()
        ]
    return is_start_BS


def _number_documents(batch: MicroBatch) -> Tensor | None:
    """Number each token's document [S]; None without boundaries."""
    recorded_borders = _find_tensor(batch.extra_tensors, BORDER_NAMES)
    if recorded_borders is None:
        return None
    rows, num_tokens = batch.sequences_BS.shape
    borders = recorded_borders.flatten().long()
    key_borders = _find_tensor(batch.extra_tensors, KEY_BORDER_NAMES)
    if key_borders is not None and not torch.equal(key_borders.flatten().long(), borders):
        raise CaptureError(f"{batch.origin.source}: borders of queries and of keys differ, which no replay can repeat")
    fits = len(borders) > 1 and int(borders[0]) == 0 and int(borders[-1]) <= num_tokens
    if rows != 1 or recorded_borders.dtype.is_floating_point or not fits or not bool((torch.diff(borders) >= 0).all()):
        raise CaptureError(
            f"{batch.origin.source}: borders of documents must rise from 0 to at most {num_tokens} in one row, "
            f"not {borders[:8].tolist()} in {rows} rows"
        )
    return torch.bucketize(torch.arange(num_tokens), borders, right=True)


def _find_tensor(tensors: Mapping[str, Tensor], names: tuple[str, ...]) -> Tensor | None:
    return next((tensors[name] for name in names if name in tensors), None)


class KeptLogits:
    """Hold the latest forward's logits, or only their entropies. What no loss asks for is not computed."""

    def __init__(self) -> None:
        self._logits: Tensor | None = None
        self._entropy_N: Tensor | None = None

    def keep(
        self, logits: Tensor, predictor_N: Tensor, slot_N: Tensor, shape_BA: tuple[int, ...], ring: Any | None
    ) -> None:
        """Take the model's logits, and where those are that predict an action token.

        ring  the process group whose ranks hold the other tokens' logits, or None
        """
        self._logits, self._predictor_N, self._slot_N, self._shape_BA = logits, predictor_N, slot_N, shape_BA
        self._ring: dist.ProcessGroup | None = ring

    def keep_entropies(self, entropy_N: Tensor, slot_N: Tensor, shape_BA: tuple[int, ...], ring: Any | None) -> None:
        """Take the entropies of distributions whose logits were never whole."""
        self._entropy_N, self._slot_N, self._shape_BA, self._ring = entropy_N, slot_N, shape_BA, ring

    def drop(self) -> None:
        self._logits = self._entropy_N = None

    def select_actions(self) -> tuple[Tensor, Tensor]:
        """Select fp32 logits [N, V] of the action tokens, and each one's index [N] in the flattened [B, A].

        Raises ValueError where a rank holds a part of them alone: under ring attention, or sharded on the vocabulary.
        """
        from torch.distributed.tensor import DTensor

        assert self._logits is not None
        if self._ring is not None or isinstance(self._logits, DTensor):
            raise ValueError(
                "the logits are spread over ranks, so a loss cannot have them. Try: without --ring, without --tp"
            )
        return self._logits.flatten(0, 1)[self._predictor_N].float(), self._slot_N

    def compute_entropies(self) -> Tensor:
        """Compute the entropy of the distribution that each action token was predicted with, in nats; fp32 [B, A]."""
        from torch.distributed.tensor import DTensor

        from actor_init.parallel.vocab_parallel import compute_sharded_entropies

        if self._entropy_N is not None:
            entropy_N = self._entropy_N
        elif isinstance(self._logits, DTensor):
            entropy_N = compute_sharded_entropies(self._logits, self._predictor_N)
        else:
            assert self._logits is not None
            log_probs_NV = torch.log_softmax(self._logits.flatten(0, 1)[self._predictor_N].float(), dim=-1)
            entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(dim=-1)
        flat = entropy_N.new_zeros(self._shape_BA).flatten().index_put((self._slot_N,), entropy_N)
        if self._ring is not None:
            flat = sum_over_ring(flat, self._ring)
        return flat.view(self._shape_BA)
