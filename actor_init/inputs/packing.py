"""Prepare a micro-batch as model inputs: its padded rows, or the real tokens of all rows in one packed row.

Shape letters: B rows, S tokens a row, A trailing tokens a row with an action mask, T real tokens of all rows, N action
tokens that have a log-prob.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from actor_init.attention.ring_split import RingSlice
from actor_init.inputs.documents import Documents, KeptLogits, find_documents, gives_positions, is_of_trainers_actor
from actor_init.model_form import DocumentBorders, HeadForm, Layout
from capture.facts import Setting
from capture.file_format.micro_batch import IGNORED_LABEL, CaptureError, MicroBatch, find_padding_between_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorInputs:
    """One micro-batch, ready for the model. Padded: ids [B, S]. Packed: ids [1, T], documents concatenated.

    An action token's log-prob comes from the logits at the real token before it. The first token of a document, and a
    token that the attention mask marks as padding, have none: they are 0 in the result and False in `action_mask_BA`.
    Exceptions: a row's first token after padding, in padded rows of a micro-batch whose `padding_predicts_label`; and
    tokens in or behind padding between a row's tokens, for which the model computes logits as for any other.

    attention_mask_BS     None when packed
    cu_seq_lens           int32 [documents + 1], document boundaries; None when padded
    max_length            of a document, rounded up to few distinct values
    predictor_N           index into the flattened ids: the token whose logits predict
    slot_N                index into the flattened [B, A]
    captured_index        like the ids: each token's index in the flattened captured [B, S], -1 for padding
    borders               what tells the model where packed documents begin
    ring                  if set, all fields except the action mask are this rank's slice
    kept_logits           where the forward leaves its logits for a loss that asks for them
    head                  how log-probs are computed from the head; None: from whole logits
    has_uniform_gradient  the loss gives each log-prob the same gradient
    makes_positions       the model makes its own position ids, of padding too, as it did in the job
    modules_in_other_mode  those in another mode, train or eval, than the module around them, as in the job
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask_BS: Tensor | None
    cu_seq_lens: Tensor | None
    max_length: int
    predictor_N: Tensor
    target_ids_N: Tensor
    slot_N: Tensor
    action_mask_BA: Tensor
    captured_index: Tensor
    borders: DocumentBorders = DocumentBorders.OWN
    ring: RingSlice | None = None
    kept_logits: KeptLogits | None = None
    head: HeadForm | None = None
    has_uniform_gradient: bool = False
    makes_positions: bool = False
    modules_in_other_mode: tuple[str, ...] = ()

    def to(self, device: torch.device) -> "ActorInputs":
        tensors: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), (Tensor, RingSlice))
        }
        return replace(self, **tensors)


def prepare_inputs(batch: MicroBatch, *, packing: bool) -> ActorInputs:
    """Prepare `batch` (on the host) for one forward.

    Without an action mask the labelled tokens are the action tokens; without labels too, every token after a row's
    first. The target is the label if there is one, else the token itself. Of `shift_labels`, which are the next tokens,
    each row has S, and A is S. Raises CaptureError if no token is real, for documents that `find_documents` refuses,
    for rows of several documents that are not to be packed, and for rows to be packed that `needs_captured_rows` names.
    """
    documents = _read_documents(batch, packing=packing)
    if packing and needs_captured_rows(batch):
        why = ": the attention mask has padding between the tokens of a row, which packed rows cannot keep"
        raise CaptureError(batch.origin.source, why, f"Try: {Setting('packing', False)}")
    real_BS = batch.attention_mask_BS
    num_tokens, num_actions = real_BS.shape[1], _count_action_columns(batch)
    # A packed row has no padding that could predict.
    by_padding_BS = torch.zeros_like(real_BS) if packing else _find_predicted_by_padding(batch)
    has_log_prob_BS = _find_predicted_tokens(batch, documents, by_padding_BS)
    row_N, token_N = has_log_prob_BS.nonzero(as_tuple=True)

    flat_BS = torch.arange(real_BS.numel()).view_as(real_BS)
    # The index that each packed token has in the flattened [B, S], and back.
    flat_T = flat_BS[real_BS]
    packed_of_flat = torch.full((real_BS.numel(),), -1)
    packed_of_flat[flat_T] = torch.arange(flat_T.numel())
    predictor_N = packed_of_flat[flat_BS[row_N, token_N]]
    if _read_next_labels(batch) is None:
        # The real token before the action token predicts it.
        predictor_N -= 1

    shared: dict[str, Any] = {
        "target_ids_N": _choose_targets(batch)[row_N, token_N],
        "slot_N": row_N * num_actions + token_N - (num_tokens - num_actions),
        "action_mask_BA": has_log_prob_BS[:, num_tokens - num_actions :],
    }
    if not packing:
        # What padding predicts depends on its positions. So they are the job's: those that it gave, or those that the
        # model makes.
        has_positions = "position_ids" in batch.extra_tensors
        is_predicted = needs_captured_rows(batch) or bool(by_padding_BS.any())
        position_BS = documents.position_BS
        return ActorInputs(
            input_ids=batch.sequences_BS,
            position_ids=position_BS if is_predicted and has_positions else position_BS.masked_fill(~real_BS, 1),
            attention_mask_BS=real_BS,
            cu_seq_lens=None,
            max_length=num_tokens,
            predictor_N=_choose_predictors(flat_T[predictor_N], batch, by_padding_BS, row_N, token_N),
            captured_index=torch.where(real_BS, flat_BS, -1),
            makes_positions=is_predicted and not gives_positions(batch),
            **shared,
        )
    lengths = documents.measure_lengths(real_BS)
    return ActorInputs(
        input_ids=batch.sequences_BS.flatten()[flat_T].unsqueeze(0),
        position_ids=documents.compute_packed_positions(real_BS, batch.origin.source).unsqueeze(0),
        attention_mask_BS=None,
        cu_seq_lens=F.pad(lengths.cumsum(dim=0), (1, 0)).int(),
        max_length=_round_up_max_length(int(lengths.max())),
        predictor_N=predictor_N,
        captured_index=flat_T.unsqueeze(0),
        borders=DocumentBorders.MASK if documents.has_continuing_positions(real_BS) else DocumentBorders.OWN,
        **shared,
    )


def _read_documents(batch: MicroBatch, *, packing: bool) -> Documents:
    """Read the documents. Raises CaptureError where no token is real, or padded rows would hold several of them."""
    if not batch.attention_mask_BS.any():
        raise CaptureError(f"{batch.origin.source}: the attention mask leaves no real token")
    documents = find_documents(batch)
    if documents.has_shared_rows and not packing:
        why = ": a row holds several packed documents, which padded rows cannot keep apart"
        raise CaptureError(batch.origin.source, why, f"Try: {Setting('packing', True)}")
    return documents


def _count_action_columns(batch: MicroBatch) -> int:
    """Count the last columns of a row that have a place in [B, A]."""
    if _read_next_labels(batch) is not None:
        return batch.sequences_BS.shape[1]
    return batch.sequences_BS.shape[1] - 1 if batch.action_mask_BA is None else batch.action_mask_BA.shape[1]


def _choose_targets(batch: MicroBatch) -> Tensor:
    """Choose the target tokens [B, S], the token whose log-prob is computed at each place."""
    if (next_BS := _read_next_labels(batch)) is not None:
        return next_BS
    if batch.labels_BS is None:
        return batch.sequences_BS
    return torch.where(batch.labels_BS == IGNORED_LABEL, batch.sequences_BS, batch.labels_BS)


def apply_layout(inputs: ActorInputs, layout: Layout) -> ActorInputs:
    """Lay `inputs` out by `layout`; they must be packed where `layout.joins_rows`."""
    if layout.packs:
        return replace(inputs, borders=layout.borders) if layout.borders is not DocumentBorders.OWN else inputs
    return inputs if layout.as_captured else unpack(inputs)


def unpack(inputs: ActorInputs) -> ActorInputs:
    """Turn packed inputs into padded rows of one document each, padded on the right, with the same log-probs."""
    assert inputs.cu_seq_lens is not None
    borders = inputs.cu_seq_lens.long()
    lengths_D = borders.diff()
    longest = int(lengths_D.max())
    real_DL = torch.arange(longest) < lengths_D[:, None]

    def fill_rows(packed_1T: Tensor, padding: int) -> Tensor:
        rows_DL = packed_1T.new_full(real_DL.shape, padding)
        rows_DL[real_DL] = packed_1T[0]
        return rows_DL

    document_N = torch.bucketize(inputs.predictor_N, borders, right=True) - 1
    return replace(
        inputs,
        input_ids=fill_rows(inputs.input_ids, 0),
        position_ids=fill_rows(inputs.position_ids, 1),
        attention_mask_BS=real_DL,
        cu_seq_lens=None,
        max_length=longest,
        predictor_N=document_N * longest + inputs.predictor_N - borders[document_N],
        captured_index=fill_rows(inputs.captured_index, -1),
    )


def _find_predicted_tokens(batch: MicroBatch, documents: Documents, by_padding_BS: Tensor) -> Tensor:
    """Find the action tokens [B, S] that follow a real token of their own document.

    With `shift_labels` it is True at the real tokens that predict one.
    """
    real_BS = batch.attention_mask_BS
    if (next_BS := _read_next_labels(batch)) is not None:
        return (real_BS | by_padding_BS) & (next_BS != IGNORED_LABEL)
    action_mask_BA = batch.action_mask_BA
    if action_mask_BA is None:
        labelled_BS = torch.ones_like(real_BS) if batch.labels_BS is None else batch.labels_BS != IGNORED_LABEL
        action_mask_BA = labelled_BS[:, 1:]
    is_action_BS = F.pad(action_mask_BA, (real_BS.shape[1] - action_mask_BA.shape[1], 0))
    return is_action_BS & ((real_BS & ~documents.is_first_BS) | by_padding_BS)


def _find_predicted_by_padding(batch: MicroBatch) -> Tensor:
    """Find the places [B, S] whose prediction padding takes part in, on its left or as the predicted token.

    Those are the tokens in and right behind padding between a row's tokens; and, if the micro-batch's
    `padding_predicts_label`, the label of a row's first real token. Of `shift_labels` a place is the token that
    predicts, else the predicted one.
    """
    real_BS, next_BS = batch.attention_mask_BS, _read_next_labels(batch)
    labels_BS = batch.labels_BS if batch.action_mask_BA is None else None
    gap_BS, is_first_BS = find_padding_between_tokens(real_BS), torch.zeros_like(real_BS)
    if batch.padding_predicts_label and (next_BS is not None or labels_BS is not None):
        is_first_BS = real_BS & (real_BS.cumsum(dim=1) == 1)
        is_first_BS[:, 0] = False
    if next_BS is not None:
        return (F.pad(is_first_BS[:, 1:], (0, 1)) | gap_BS) & (next_BS != IGNORED_LABEL)
    places_BS = is_first_BS | gap_BS | F.pad(gap_BS[:, :-1], (1, 0))
    return places_BS if labels_BS is None else places_BS & (labels_BS != IGNORED_LABEL)


def needs_captured_rows(batch: MicroBatch) -> bool:
    """Tell whether joined rows would lose padding between a row's tokens that the job's model was fed.

    A trainer's own actor may itself join rows, without any padding of theirs.
    """
    return not is_of_trainers_actor(batch) and bool(find_padding_between_tokens(batch.attention_mask_BS).any())


def _choose_predictors(
    predictor_N: Tensor, batch: MicroBatch, by_padding_BS: Tensor, row_N: Tensor, token_N: Tensor
) -> Tensor:
    """Choose the predictors of padded rows: the real token before, or the padding where it predicts."""
    column_N = token_N if _read_next_labels(batch) is not None else token_N - 1
    padding_N = row_N * batch.sequences_BS.shape[1] + column_N
    return torch.where(by_padding_BS[row_N, token_N], padding_N, predictor_N)


def count_predicted_by_padding(batch: MicroBatch) -> int:
    """Count the labels that padding predicts in a model's own loss; 0 where a row holds several documents."""
    if find_documents(batch).has_shared_rows:
        return 0
    return int(_find_predicted_by_padding(replace(batch, padding_predicts_label=True)).sum())


def _read_next_labels(batch: MicroBatch) -> Tensor | None:
    """Read `shift_labels` [B, S] where they say what is predicted: without an action mask."""
    return batch.shift_labels if batch.action_mask_BA is None else None


class TargetPlaces(NamedTuple):
    """Where the targets of a micro-batch are the input tokens at their positions.

    are_input_tokens_BA  False where a label is another token
    first_column         the column of the rows [B, S] where A begins
    """

    are_input_tokens_BA: Tensor
    first_column: int


def find_targets_equal_to_input_tokens(batch: MicroBatch) -> TargetPlaces:
    """Find where the target of a log-prob is the input token at its position."""
    ids_BS, num_tokens = batch.sequences_BS, batch.sequences_BS.shape[1]
    if (next_BS := _read_next_labels(batch)) is not None:
        return TargetPlaces(F.pad(next_BS[:, :-1] == ids_BS[:, 1:], (0, 1)), 1)
    first = 1 if batch.action_mask_BA is None else num_tokens - batch.action_mask_BA.shape[1]
    is_own_BS = torch.ones_like(batch.attention_mask_BS)
    if batch.labels_BS is not None:
        is_own_BS = (batch.labels_BS == ids_BS) | (batch.labels_BS == IGNORED_LABEL)
    return TargetPlaces(is_own_BS[:, first:], first)


def count_action_tokens(batch: MicroBatch) -> int:
    """Count the tokens that a loss of `batch` averages over. Raises CaptureError as `prepare_inputs` does."""
    return int(_find_predicted_tokens(batch, find_documents(batch), _find_predicted_by_padding(batch)).sum())


def pad_to(inputs: ActorInputs, num_tokens: int) -> ActorInputs:
    """Pad to longer rows with the same log-probs: on the right, or with a packed document of padding."""
    rows, old_length = inputs.input_ids.shape
    num_added = num_tokens - old_length
    if not num_added:
        return inputs
    row_N, token_N = inputs.predictor_N // old_length, inputs.predictor_N % old_length
    padded = replace(
        inputs,
        input_ids=F.pad(inputs.input_ids, (0, num_added)),
        position_ids=torch.cat([inputs.position_ids, torch.arange(num_added).expand(rows, num_added)], dim=1),
        predictor_N=row_N * num_tokens + token_N,
        captured_index=F.pad(inputs.captured_index, (0, num_added), value=-1),
    )
    if inputs.cu_seq_lens is None:
        assert inputs.attention_mask_BS is not None
        return replace(padded, attention_mask_BS=F.pad(inputs.attention_mask_BS, (0, num_added)), max_length=num_tokens)
    borders = torch.cat([inputs.cu_seq_lens, torch.tensor([num_tokens], dtype=torch.int32)])
    return replace(padded, cu_seq_lens=borders, max_length=max(inputs.max_length, _round_up_max_length(num_added)))


def slice_for_ring(inputs: ActorInputs, ring: RingSlice) -> ActorInputs:
    """Return one rank's slice of a packed row: its tokens, and the log-probs that they predict.

    ring  what `compute_ring_indices` computed of the row
    """
    num_tokens = inputs.input_ids.shape[1]
    local_L = ring.local_index_L
    local_of_T = torch.full((len(ring.index_T),), -1)
    local_of_T[local_L] = torch.arange(len(local_L))
    num_added = len(ring.index_T) - num_tokens
    is_local_N = local_of_T[inputs.predictor_N] >= 0
    return replace(
        inputs,
        input_ids=F.pad(inputs.input_ids, (0, num_added))[:, local_L],
        position_ids=F.pad(inputs.position_ids, (0, num_added))[:, local_L],
        predictor_N=local_of_T[inputs.predictor_N[is_local_N]],
        target_ids_N=inputs.target_ids_N[is_local_N],
        slot_N=inputs.slot_N[is_local_N],
        captured_index=F.pad(inputs.captured_index, (0, num_added), value=-1)[:, local_L],
        ring=ring,
    )


def _round_up_max_length(length: int) -> int:
    """Round up the length of the longest document, which kernels take as a bound, to a power of two, at least 256.

    Kernels take it as a Python int, and each new value recompiles a graph. How far rows are padded is not decided here:
    `ActorSpec.find_padded_length` does that.
    """
    return max(256, 1 << (length - 1).bit_length())
