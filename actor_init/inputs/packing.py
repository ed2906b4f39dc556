"""Turn a micro-batch into model inputs: its padded rows, or the real tokens of all rows in one packed row.

Shape letters: B rows, S tokens a row, A trailing tokens a row with an action mask, T real tokens of all rows, N action
tokens that have a log-prob.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actor_init.attention.ring import RingSlice
from actor_init.inputs.documents import Documents, KeptLogits, documents_of
from actor_init.model_form import Borders, HeadForm, Layout
from capture.facts import Setting
from capture.file_format.micro_batch import IGNORED_LABEL, CaptureError, MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorInputs:
    """One micro-batch, ready for the model. Padded: ids [B, S]. Packed: ids [1, T], documents concatenated.

    An action token's log-prob comes from the logits at the real token before it. The first token of a document, and a
    token that the attention mask marks as padding, have none: they are 0 in the result and False in `action_mask_BA`.
    Exception: a row's first token after padding, in padded rows of a micro-batch whose `padding_predicts`.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask_BS: Tensor | None  # None when packed
    cu_seq_lens: Tensor | None  # int32 [documents + 1], document boundaries; None when padded
    max_length: int  # of a document, rounded up to few distinct values
    predictor_N: Tensor  # index into the flattened ids: the token whose logits predict
    target_ids_N: Tensor
    slot_N: Tensor  # index into the flattened [B, A]
    action_mask_BA: Tensor
    captured_index: Tensor  # like the ids: each token's index in the flattened captured [B, S], -1 for padding
    borders: Borders = Borders.OWN  # what tells the model where packed documents begin
    ring: RingSlice | None = None  # if set, all fields except the action mask are this rank's slice
    kept_logits: KeptLogits | None = None  # where the forward leaves its logits for a loss that asks for them
    head: HeadForm | None = None  # None: whole logits
    is_even: bool = False  # the loss gives each log-prob the same gradient
    makes_positions: bool = False  # the model makes its own position ids, of padding too, as it did in the job

    def to(self, device: torch.device) -> "ActorInputs":
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), (Tensor, RingSlice))
        }
        return replace(self, **moved)


def actor_inputs(batch: MicroBatch, *, packing: bool) -> ActorInputs:
    """Prepare `batch` (on the host) for one forward.

    Without an action mask the labelled tokens are the action tokens; without labels too, every token after a row's
    first. The target is the label if there is one, else the token itself. Of `shift_labels`, which are the next tokens,
    each row has S, and A is S. Raises CaptureError if no token is real, for
    documents that `documents_of` refuses, and for rows of several documents that are not to be packed.
    """
    documents = _checked_documents(batch, packing=packing)
    if packing:  # there is no padding that could predict
        batch = replace(batch, padding_predicts=False)
    real_BS = batch.attention_mask_BS
    num_tokens, num_actions = real_BS.shape[1], _num_actions(batch)
    has_log_prob_BS = _have_log_probs(batch, documents)
    row_N, token_N = has_log_prob_BS.nonzero(as_tuple=True)

    flat_BS = torch.arange(real_BS.numel()).view_as(real_BS)
    flat_T = flat_BS[real_BS]  # original index of each packed token
    packed_of_flat = torch.full((real_BS.numel(),), -1)
    packed_of_flat[flat_T] = torch.arange(flat_T.numel())
    predictor_N = packed_of_flat[flat_BS[row_N, token_N]]
    if _next_labels(batch) is None:
        predictor_N -= 1  # the previous real token, as a packed index

    shared: dict[str, Any] = {
        "target_ids_N": _targets(batch)[row_N, token_N],
        "slot_N": row_N * num_actions + token_N - (num_tokens - num_actions),
        "action_mask_BA": has_log_prob_BS[:, num_tokens - num_actions :],
    }
    if not packing:
        # what padding predicts depends on its positions, so they are the job's: those that it gave, or the model's own
        is_predicted, has_positions = bool(_predicted_by_padding(batch).any()), "position_ids" in batch.extra_tensors
        position_BS = documents.position_BS
        return ActorInputs(
            input_ids=batch.sequences_BS,
            position_ids=position_BS if is_predicted and has_positions else position_BS.masked_fill(~real_BS, 1),
            attention_mask_BS=real_BS,
            cu_seq_lens=None,
            max_length=num_tokens,
            predictor_N=_padding_or(flat_T[predictor_N], batch, row_N, token_N),
            captured_index=torch.where(real_BS, flat_BS, -1),
            makes_positions=is_predicted and not has_positions,
            **shared,
        )
    lengths = documents.lengths(real_BS)
    return ActorInputs(
        input_ids=batch.sequences_BS.flatten()[flat_T].unsqueeze(0),
        position_ids=documents.packed_positions(real_BS, batch.origin.source).unsqueeze(0),
        attention_mask_BS=None,
        cu_seq_lens=F.pad(lengths.cumsum(dim=0), (1, 0)).int(),
        max_length=_bucket(int(lengths.max())),
        predictor_N=predictor_N,
        captured_index=flat_T.unsqueeze(0),
        borders=Borders.MASK if documents.continue_on(real_BS) else Borders.OWN,
        **shared,
    )


def _checked_documents(batch: MicroBatch, *, packing: bool) -> Documents:
    """Return the documents. Raises CaptureError where no token is real, or padded rows would hold several of them."""
    if not batch.attention_mask_BS.any():
        raise CaptureError(f"{batch.origin.source}: the attention mask leaves no real token")
    documents = documents_of(batch)
    if documents.share_rows and not packing:
        why = ": a row holds several packed documents, which padded rows cannot keep apart"
        raise CaptureError(batch.origin.source, why, f"Try: {Setting('packing', True)}")
    return documents


def _num_actions(batch: MicroBatch) -> int:
    """Return how many of a row's last columns have a place in [B, A]."""
    if _next_labels(batch) is not None:
        return batch.sequences_BS.shape[1]
    return batch.sequences_BS.shape[1] - 1 if batch.action_mask_BA is None else batch.action_mask_BA.shape[1]


def _targets(batch: MicroBatch) -> Tensor:
    """Return [B, S], the token whose log-prob is computed at each place."""
    if (next_BS := _next_labels(batch)) is not None:
        return next_BS
    if batch.labels_BS is None:
        return batch.sequences_BS
    return torch.where(batch.labels_BS == IGNORED_LABEL, batch.sequences_BS, batch.labels_BS)


def arranged(inputs: ActorInputs, layout: Layout) -> ActorInputs:
    """Return `inputs` under `layout`; they must be packed where `layout.joins`."""
    if layout.packs:
        return replace(inputs, borders=layout.borders) if layout.borders is not Borders.OWN else inputs
    return inputs if layout.as_captured else unpacked(inputs)


def unpacked(inputs: ActorInputs) -> ActorInputs:
    """Return packed inputs as padded rows of one document each, padded on the right, with the same log-probs."""
    assert inputs.cu_seq_lens is not None
    borders = inputs.cu_seq_lens.long()
    lengths_D = borders.diff()
    longest = int(lengths_D.max())
    real_DL = torch.arange(longest) < lengths_D[:, None]

    def rows_of(packed_1T: Tensor, padding: int) -> Tensor:
        rows_DL = packed_1T.new_full(real_DL.shape, padding)
        rows_DL[real_DL] = packed_1T[0]
        return rows_DL

    document_N = torch.bucketize(inputs.predictor_N, borders, right=True) - 1
    return replace(
        inputs,
        input_ids=rows_of(inputs.input_ids, 0),
        position_ids=rows_of(inputs.position_ids, 1),
        attention_mask_BS=real_DL,
        cu_seq_lens=None,
        max_length=longest,
        predictor_N=document_N * longest + inputs.predictor_N - borders[document_N],
        captured_index=rows_of(inputs.captured_index, -1),
    )


def _have_log_probs(batch: MicroBatch, documents: Documents) -> Tensor:
    """Return [B, S], True at the action tokens that follow a real token of their own document.

    With `shift_labels` it is True at the real tokens that predict one.
    """
    real_BS = batch.attention_mask_BS
    if (next_BS := _next_labels(batch)) is not None:
        return (real_BS | _predicted_by_padding(batch)) & (next_BS != IGNORED_LABEL)
    action_mask_BA = batch.action_mask_BA
    if action_mask_BA is None:
        labelled_BS = torch.ones_like(real_BS) if batch.labels_BS is None else batch.labels_BS != IGNORED_LABEL
        action_mask_BA = labelled_BS[:, 1:]
    is_action_BS = F.pad(action_mask_BA, (real_BS.shape[1] - action_mask_BA.shape[1], 0))
    return is_action_BS & real_BS & (~documents.is_first_BS | _predicted_by_padding(batch))


def _predicted_by_padding(batch: MicroBatch) -> Tensor:
    """Return [B, S], True where a label is that of a row's first real token, and padding predicts it.

    Of `shift_labels` that is the place of the padding before the token, else the token's own. Nowhere unless the
    micro-batch's `padding_predicts`.
    """
    next_BS, labels_BS = _next_labels(batch), batch.labels_BS
    if not batch.padding_predicts or batch.action_mask_BA is not None or (next_BS is None and labels_BS is None):
        return torch.zeros_like(batch.attention_mask_BS)
    is_first_BS = batch.attention_mask_BS & (batch.attention_mask_BS.cumsum(dim=1) == 1)
    is_first_BS[:, 0] = False
    if next_BS is not None:
        return F.pad(is_first_BS[:, 1:], (0, 1)) & (next_BS != IGNORED_LABEL)
    assert labels_BS is not None
    return is_first_BS & (labels_BS != IGNORED_LABEL)


def _padding_or(predictor_N: Tensor, batch: MicroBatch, row_N: Tensor, token_N: Tensor) -> Tensor:
    """Return the predictors of padded rows, with the padding in the place of those that it predicts."""
    column_N = token_N if _next_labels(batch) is not None else token_N - 1
    padding_N = row_N * batch.sequences_BS.shape[1] + column_N
    return torch.where(_predicted_by_padding(batch)[row_N, token_N], padding_N, predictor_N)


def num_predicted_by_padding(batch: MicroBatch) -> int:
    """Count the labels that padding predicts in a model's own loss; 0 where a row holds several documents."""
    if documents_of(batch).share_rows:
        return 0
    return int(_predicted_by_padding(replace(batch, padding_predicts=True)).sum())


def _next_labels(batch: MicroBatch) -> Tensor | None:
    """Return `shift_labels` [B, S] where they say what is predicted: without an action mask."""
    return batch.shift_labels if batch.action_mask_BA is None else None


def predicts_own_tokens(batch: MicroBatch) -> tuple[Tensor, int]:
    """Return [B, A], True where the target is the row's own token, and the column of the first of A."""
    ids_BS, num_tokens = batch.sequences_BS, batch.sequences_BS.shape[1]
    if (next_BS := _next_labels(batch)) is not None:
        return F.pad(next_BS[:, :-1] == ids_BS[:, 1:], (0, 1)), 1
    first = 1 if batch.action_mask_BA is None else num_tokens - batch.action_mask_BA.shape[1]
    is_own_BS = torch.ones_like(batch.attention_mask_BS)
    if batch.labels_BS is not None:
        is_own_BS = (batch.labels_BS == ids_BS) | (batch.labels_BS == IGNORED_LABEL)
    return is_own_BS[:, first:], first


def num_action_tokens(batch: MicroBatch) -> int:
    """Return how many tokens a loss of `batch` averages over. Raises CaptureError as `actor_inputs` does."""
    return int(_have_log_probs(batch, documents_of(batch)).sum())


def padded_to(inputs: ActorInputs, num_tokens: int) -> ActorInputs:
    """Return inputs with longer rows and the same log-probs: padded on the right, or with a packed document of
    padding.
    """
    rows, before = inputs.input_ids.shape
    more = num_tokens - before
    if not more:
        return inputs
    row_N, token_N = inputs.predictor_N // before, inputs.predictor_N % before
    longer = replace(
        inputs,
        input_ids=F.pad(inputs.input_ids, (0, more)),
        position_ids=torch.cat([inputs.position_ids, torch.arange(more).expand(rows, more)], dim=1),
        predictor_N=row_N * num_tokens + token_N,
        captured_index=F.pad(inputs.captured_index, (0, more), value=-1),
    )
    if inputs.cu_seq_lens is None:
        assert inputs.attention_mask_BS is not None
        return replace(longer, attention_mask_BS=F.pad(inputs.attention_mask_BS, (0, more)), max_length=num_tokens)
    borders = torch.cat([inputs.cu_seq_lens, torch.tensor([num_tokens], dtype=torch.int32)])
    return replace(longer, cu_seq_lens=borders, max_length=max(inputs.max_length, _bucket(more)))


def sliced(inputs: ActorInputs, ring: RingSlice) -> ActorInputs:
    """Return one rank's part of a packed row: its tokens, and the log-probs that they predict."""
    num_tokens = inputs.input_ids.shape[1]
    own_L = ring.own_index_L
    place_T = torch.full((len(ring.index_T),), -1)
    place_T[own_L] = torch.arange(len(own_L))
    more = len(ring.index_T) - num_tokens
    is_own_N = place_T[inputs.predictor_N] >= 0
    return replace(
        inputs,
        input_ids=F.pad(inputs.input_ids, (0, more))[:, own_L],
        position_ids=F.pad(inputs.position_ids, (0, more))[:, own_L],
        predictor_N=place_T[inputs.predictor_N[is_own_N]],
        target_ids_N=inputs.target_ids_N[is_own_N],
        slot_N=inputs.slot_N[is_own_N],
        captured_index=F.pad(inputs.captured_index, (0, more), value=-1)[:, own_L],
        ring=ring,
    )


def _bucket(length: int) -> int:
    """Return the next power of two, at least 256: kernels take it as a Python int, and each new value recompiles a
    graph.
    """
    return max(256, 1 << (length - 1).bit_length())
