"""Find where documents begin in a micro-batch's rows: at each row's first token, and where the capture says so.

A row holds several documents if it was given boundaries (`cu_seq_lens_q`, as flash attention's kernels take them), or
position ids that restart. Then attention stays within a document, as under transformers' own masks and kernels.

Shape letters: B rows, S tokens a row, T real tokens of all rows, D documents.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from actor_init.attention.ring import sum_over_ring
from actor_init.parallel.vocab_parallel import entropies_of_shards
from capture.facts import Setting
from capture.file_format.micro_batch import CaptureError, MicroBatch

BORDER_NAMES = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seq_lens", "cu_seqlens")
KEY_BORDER_NAMES = ("cu_seq_lens_k", "cu_seqlens_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    position_BS: Tensor  # int64, of the real tokens; undefined for padding
    is_first_BS: Tensor  # True at each document's first real token

    @property
    def share_rows(self) -> bool:
        """Does any row hold several documents?"""
        return bool((self.is_first_BS.sum(dim=1) > 1).any())

    def lengths(self, real_BS: Tensor) -> Tensor:
        """Return the lengths [D] of all rows' documents, in real tokens."""
        first_D = self.is_first_BS[real_BS].nonzero().flatten()
        return torch.diff(first_D, append=torch.tensor([int(real_BS.sum())]))

    def packed_positions(self, real_BS: Tensor, source: str) -> Tensor:
        """Return positions [T] that rise by one within a document, and jump between documents.

        That is how transformers' masks tell packed documents apart, except where one document's positions `continue_on`
        from the one before. Raises CaptureError if they jump within a document.
        """
        position_T, is_first_T = self.position_BS[real_BS], self.is_first_BS[real_BS]
        difference_T = torch.diff(position_T, prepend=position_T[:1])
        if not bool((difference_T == 1)[~is_first_T].all()):
            why = ": position_ids jump within a text, which packed rows cannot repeat"
            raise CaptureError(source, why, f"Try: {Setting('packing', False)}")
        return position_T

    def restarting_positions(self, real_BS: Tensor, source: str) -> Tensor:
        """Return positions [T] as `packed_positions`, but all from 0 where one document's would go on from another's.

        Raises CaptureError if they jump within a document.
        """
        position_T = self.packed_positions(real_BS, source)
        if not self.continue_on(real_BS):
            return position_T
        return position_T - position_T[self.is_first_BS[real_BS]].repeat_interleave(self.lengths(real_BS))

    def continue_on(self, real_BS: Tensor) -> bool:
        """Do any document's positions go on where those of the one before end?"""
        position_T, is_first_T = self.position_BS[real_BS], self.is_first_BS[real_BS]
        return bool((torch.diff(position_T) == 1)[is_first_T[1:]].any())


def documents_of(batch: MicroBatch) -> Documents:
    """Return the documents. Without position ids a row's real tokens, or a document's, count from 0.

    Raises CaptureError for position ids or boundaries that are invalid or do not fit the rows.
    """
    real_BS = batch.attention_mask_BS
    counted_BS = real_BS.long().cumsum(dim=1) - 1
    position_BS = _position_ids(batch)
    number_S = _numbers(batch)
    if number_S is not None:
        is_first_BS = _where_real(number_S.expand_as(real_BS), real_BS, lambda difference: difference > 0)
    elif position_BS is not None:
        is_first_BS = _where_real(position_BS, real_BS, lambda difference: difference <= 0)
    else:
        is_first_BS = real_BS & (counted_BS == 0)
    if position_BS is None:
        first_BS = torch.where(is_first_BS, counted_BS, 0).cummax(dim=1).values
        position_BS = counted_BS - first_BS
    return Documents(position_BS=position_BS, is_first_BS=is_first_BS)


def _position_ids(batch: MicroBatch) -> Tensor | None:
    """Return position ids [B, S], also if all rows share one."""
    given = batch.extra_tensors.get("position_ids")
    if given is None:
        return None
    rows, num_tokens = batch.sequences_BS.shape
    if given.dtype.is_floating_point or given.shape not in ((rows, num_tokens), (1, num_tokens), (num_tokens,)):
        raise CaptureError(
            f"{batch.origin.source}: position_ids are {given.dtype} of shape {list(given.shape)}; replayed are "
            f"integers of shape {[rows, num_tokens]} or {[1, num_tokens]}, and none with an axis more, as for images"
        )
    if int(given.min()) < 0:
        raise CaptureError(f"{batch.origin.source}: position id {int(given.min())} is negative")
    return given.long().expand(rows, num_tokens)


def _where_real(values_BS: Tensor, real_BS: Tensor, is_start: Callable[[Tensor], Tensor]) -> Tensor:
    """Return True at real tokens whose difference to the previous real token in their row satisfies `is_start`."""
    found_BS = torch.zeros_like(real_BS)
    for values_S, real_S, found_S in zip(values_BS, real_BS, found_BS, strict=True):
        found_S[real_S] = torch.cat([torch.ones_like(real_S[:1]), is_start(torch.diff(values_S[real_S]))])[
            : real_S.sum()
        ]
    return found_BS


def _numbers(batch: MicroBatch) -> Tensor | None:
    """Return each token's document number [S]; None without boundaries."""
    given = _named(batch.extra_tensors, BORDER_NAMES)
    if given is None:
        return None
    rows, num_tokens = batch.sequences_BS.shape
    borders = given.flatten().long()
    keys = _named(batch.extra_tensors, KEY_BORDER_NAMES)
    if keys is not None and not torch.equal(keys.flatten().long(), borders):
        raise CaptureError(f"{batch.origin.source}: borders of queries and of keys differ, which no replay can repeat")
    fits = len(borders) > 1 and int(borders[0]) == 0 and int(borders[-1]) <= num_tokens
    if rows != 1 or given.dtype.is_floating_point or not fits or not bool((torch.diff(borders) >= 0).all()):
        raise CaptureError(
            f"{batch.origin.source}: borders of documents must rise from 0 to at most {num_tokens} in one row, "
            f"not {borders[:8].tolist()} in {rows} rows"
        )
    return torch.bucketize(torch.arange(num_tokens), borders, right=True)


def _named(tensors: Mapping[str, Tensor], names: tuple[str, ...]) -> Tensor | None:
    return next((tensors[name] for name in names if name in tensors), None)


# Keep the logits of one forward, or their entropies, for a loss that needs more than the action tokens' log-probs.
#
# Shape letters: B rows, A trailing tokens a row with an action mask, N action tokens with a log-prob, V vocabulary.


class KeptLogits:
    """Holds the latest forward's logits, or only their entropies. What is not asked for is not computed."""

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

    def of_actions(self) -> tuple[Tensor, Tensor]:
        """Return fp32 logits [N, V] of the action tokens, and each one's index [N] in the flattened [B, A].

        Raises ValueError where a rank holds a part of them alone: under ring attention, or sharded on the vocabulary.
        """
        assert self._logits is not None
        if self._ring is not None or isinstance(self._logits, DTensor):
            raise ValueError(
                "the logits are spread over ranks, so a loss cannot have them. Try: without --ring, without --tp"
            )
        return self._logits.flatten(0, 1)[self._predictor_N].float(), self._slot_N

    def entropies(self) -> Tensor:
        """Return the entropy of the distribution that each action token was predicted with, in nats; fp32 [B, A]."""
        if self._entropy_N is not None:
            entropy_N = self._entropy_N
        elif isinstance(self._logits, DTensor):
            entropy_N = entropies_of_shards(self._logits, self._predictor_N)
        else:
            assert self._logits is not None
            log_probs_NV = torch.log_softmax(self._logits.flatten(0, 1)[self._predictor_N].float(), dim=-1)
            entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(dim=-1)
        flat = entropy_N.new_zeros(self._shape_BA).flatten().index_put((self._slot_N,), entropy_N)
        if self._ring is not None:
            flat = sum_over_ring(flat, self._ring)
        return flat.view(self._shape_BA)
