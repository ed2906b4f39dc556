"""Select rows of a micro-batch as a new micro-batch, and iterate over its documents.

Shape letters: B rows, S tokens a row, A trailing tokens a row with an action mask, L tokens of one document.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from actor_init.inputs.documents import documents_of
from capture.file_format.micro_batch import IGNORED_LABEL, MicroBatch


def rows_of(batch: MicroBatch, rows: Sequence[int]) -> MicroBatch:
    """Return the given rows of `batch`, in that order; a row may be repeated.

    Documents within a row are kept apart by restarting position ids. Raises CaptureError if they cannot be.
    """
    documents, real_BS = documents_of(batch), batch.attention_mask_BS
    position_BS = torch.where(real_BS, documents.position_BS, 0)
    if documents.share_rows:
        position_BS[real_BS] = documents.restarting_positions(real_BS, batch.origin.source)
    index = torch.tensor(rows)
    return replace(
        batch,
        sequences_BS=batch.sequences_BS[index],
        attention_mask_BS=real_BS[index],
        action_mask_BA=None if batch.action_mask_BA is None else batch.action_mask_BA[index],
        labels_BS=None if batch.labels_BS is None else batch.labels_BS[index],
        extra_tensors={"position_ids": position_BS[index]},
    )


def documents_alone(batch: MicroBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each document's token ids, position ids and labels [1, L], without padding, labels as Hugging Face takes
    them.

    Labels are not shifted, and -100 where there is no action token. They are derived from the micro-batch rather than
    from the actor's inputs, so that they can be compared with the actor.
    """
    is_first_BS, position_BS = (documents := documents_of(batch)).is_first_BS, documents.position_BS
    label_BS = _labels(batch)
    for row in range(batch.num_rows):
        token_R = batch.attention_mask_BS[row].nonzero().flatten()
        borders = [*is_first_BS[row, token_R].nonzero().flatten().tolist(), len(token_R)]
        for begin, end in pairwise(borders):
            token_L = token_R[begin:end]
            yield batch.sequences_BS[row, token_L][None], position_BS[row, token_L][None], label_BS[row, token_L][None]


def _labels(batch: MicroBatch) -> Tensor:
    """Return labels [B, S]: the action mask selects, else the labels, else every token. The target is the label or
    token.
    """
    given_BS = batch.labels_BS
    labelled_BS = torch.ones_like(batch.attention_mask_BS) if given_BS is None else given_BS != IGNORED_LABEL
    target_BS = batch.sequences_BS if given_BS is None else torch.where(labelled_BS, given_BS, batch.sequences_BS)
    counts_BS = labelled_BS
    if batch.action_mask_BA is not None:
        num_tokens, num_actions = batch.sequences_BS.shape[1], batch.action_mask_BA.shape[1]
        counts_BS = F.pad(batch.action_mask_BA, (num_tokens - num_actions, 0))
    return target_BS.masked_fill(~(counts_BS & batch.attention_mask_BS), IGNORED_LABEL)
