"""Read of a pass's tokens what tells whether they were fed as they were meant to be: padding, labels, rows, positions.

They are a few numbers a row, so that all ranks can look at those of all. Shape letters: B rows, S tokens a row, T real
tokens of a row.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from actor_init.inputs.documents import BORDER_NAMES, Documents, find_documents, gives_positions
from capture.file_format.capture_file import ACTION_MASK, CapturedCall
from capture.file_format.micro_batch import (
    IGNORED_LABEL,
    LOSS_GRADIENTS,
    CaptureError,
    MicroBatch,
    find_padding_between_tokens,
    move_to_tokens,
)
from replay.options.declarations.tensor_names import ADVANTAGES
from replay.output.text import pluralise
from replay.verdict.special_tokens import SpecialTokens

# So many of a row's first tokens are kept, to be compared with other rows'.
NUM_FIRST_TOKENS = 16
# Of more distinct ids only so many are kept.
_MAX_COMMONEST_IDS = 4
# Where the label of a token may be found among the row's tokens, counted from the token itself.
_OFFSETS = (-1, 0, 1, 2)
# What jobs call the mask of the tokens that their loss is of.
LOSS_MASKS = (ACTION_MASK, "loss_mask", "completion_mask", "response_mask", "assistant_masks")
# Fewer labels than these may be equal to other tokens by chance, and shorter rows to other rows.
_MIN_LABELS = 8
_MIN_ROW_TOKENS = 8
# One other token may follow an end, as the end of a line; a run of one id from this length on is padding.
_MIN_PADDING = 4
# So many tokens may follow the end of a text.
_MAX_BEHIND_END = 2
# One last target may be the next row's first token by chance.
_MIN_CROSSING = 2
# Fewer places without a target may be at one distance from each other by chance.
_MIN_LEFT_OUT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTraits:
    """One row, without its padding.

    digest        of its tokens; None for one that is short, or of one token alone
    first_tokens  its first NUM_FIRST_TOKENS
    num_labelled  how many of its first tokens after the first one have labels, up to the first that has none
    leading, trailing  the token at its beginning or end, and how often it stands there
    ends_unlabelled    the first of the trailing ones has no label, and the token before it has one
    num_inner_begins   how often the id that begins a text stands inside the row, if that is one document
    num_inner_ends     how often ids that end one do, each run of them once
    num_tokens         of the row
    has_end            an id that ends a text is among its last ones; None where none is known, or the row is packed
    has_prompt         the token after the first one has no label, and a later one has
    num_labelled_tail  how many of the trailing ones have labels
    num_turn_ends      ids inside the row that end a text behind a token with a label
    num_unlabelled_turn_ends  those of them without a label
    """

    digest: int | None
    first_tokens: tuple[int, ...]
    num_labelled: int
    leading: tuple[int, int]
    trailing: tuple[int, int]
    ends_unlabelled: bool = False
    num_inner_begins: int = 0
    num_inner_ends: int = 0
    num_tokens: int = 0
    has_end: bool | None = None
    has_prompt: bool = False
    num_labelled_tail: int = 0
    num_turn_ends: int = 0
    num_unlabelled_turn_ends: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTraits:
    """The tokens of one pass.

    rows               those that have a real token, and not one token alone
    has_mask           the job gave an attention mask
    has_actions        the rows are prompts and generated answers, which end where their generation did
    largest_id         the largest id of all tokens, padding included
    num_real           tokens inside the attention mask
    real_ids           the commonest ids of these, with their numbers
    num_padding        tokens outside the attention mask
    num_between        those of them that have real tokens of their row on both sides
    padding_ids        the commonest ids of those outside, with their numbers
    has_shifted_labels the labels are those of `shift_labels`, which stand beside the token that predicts them
    num_labels         labels that count
    num_unlabelled     rows without such a label, where the job gave labels
    label_range        the least and the largest of these
    num_on_padding     labels that are of padding
    num_past_end       those of them that stand beside the real token that predicts them
    num_of_others      labels that the job gave to real tokens, and that are other tokens
    num_rows_of_others rows with such labels, whose labels are the tokens of another row of the pass
    num_other_side     rows with labels whose labels are their own tokens, moved by the length of the row's padding
    num_last_labels    rows whose last token has a shifted label
    num_wrapped        those of them in which that is the row's first token
    num_row_ends       rows whose last place, padding or not, has a target of the job's loss: no token of the row
    num_crossing       those of them in which that is the next row's first token, where the rows are no one text
    label_offset       the labels are the tokens so many places later, all of them; None: that cannot be told
    num_borders        borders between documents of one row that the job named beside position ids
    num_continued      those of them at which positions go on
    num_other_restarts positions that restart where no border is
    first_positions    numbers of rows by the position id of their first real token, where the job gave position ids
    num_late_rows      rows padded on the left whose position ids count the padding
    num_left_to_model  rows padded on the left whose position ids the model makes
    num_not_finite     positions where the gradient that the job's loss gave its logits is not finite
    num_not_finite_on_padding  those of them that predict padding
    first_not_finite   row and position of the first of them
    num_with_gradient  positions that the job's own loss gave a gradient, in a pass with a mask of LOSS_MASKS
    num_outside_mask   those of them that are outside of it, whether it is of the tokens or of those that predict them
    num_actions        tokens of the action mask
    num_idle_actions   those of them outside of the attention mask, or in the padding behind the end of a row's text
    num_left_out       tokens without a gradient of the job's own loss between tokens that have one, where they stand at
                       regular places
    left_out_spacing   every so manieth token is one of them, in each row or in all rows together; None: there are none
    labelled_ends      ids that end rows and have a label somewhere in the pass
    bos_token_id       begins a text; None: not known
    """

    rows: Sequence[RowTraits]
    has_mask: bool
    largest_id: int
    has_actions: bool = False
    num_real: int = 0
    real_ids: Mapping[int, int] = field(default_factory=dict)
    num_padding: int = 0
    num_between: int = 0
    padding_ids: Mapping[int, int] = field(default_factory=dict)
    has_shifted_labels: bool = False
    num_labels: int = 0
    num_unlabelled: int = 0
    label_range: tuple[int, int] | None = None
    num_on_padding: int = 0
    num_past_end: int = 0
    num_of_others: int = 0
    num_rows_of_others: int = 0
    num_other_side: int = 0
    num_last_labels: int = 0
    num_wrapped: int = 0
    num_row_ends: int = 0
    num_crossing: int = 0
    label_offset: int | None = None
    num_borders: int = 0
    num_continued: int = 0
    num_other_restarts: int = 0
    first_positions: Mapping[int, int] = field(default_factory=dict)
    num_late_rows: int = 0
    num_left_to_model: int = 0
    num_not_finite: int = 0
    num_not_finite_on_padding: int = 0
    first_not_finite: tuple[int, int] | None = None
    num_with_gradient: int = 0
    num_outside_mask: int = 0
    num_actions: int = 0
    num_idle_actions: int = 0
    num_left_out: int = 0
    left_out_spacing: int | None = None
    labelled_ends: frozenset[int] = frozenset()
    bos_token_id: int | None = None


def read_token_traits(call: CapturedCall, batch: MicroBatch, special_tokens: SpecialTokens) -> TokenTraits:
    """Read the traits of a pass; `batch` is as captured."""
    ids_BS, real_BS = batch.sequences_BS, batch.attention_mask_BS
    real_T, padding_T = ids_BS[real_BS], ids_BS[~real_BS]
    labels_BS, has_shifted_labels = _find_labels(batch)
    # Each beside the token that it is of.
    token_labels_BS = labels_BS
    if labels_BS is not None and has_shifted_labels:
        token_labels_BS = move_to_tokens(labels_BS)
    documents = _find_documents(batch)
    # The loss of generated answers is of their actions, which may have no gradient.
    row_labels_BS = token_labels_BS if batch.action_mask_BA is None else _label_actions(batch, batch.action_mask_BA)
    rows = _read_rows(batch, row_labels_BS, documents, special_tokens)
    num_borders, num_continued, num_other_restarts = _count_restarts(call, batch, documents)
    first_positions, num_late_rows = _read_first_positions(batch)
    is_not_finite_BS = _find_not_finite(call, real_BS)
    not_finite_places = [(row, column) for row, column in is_not_finite_BS.nonzero().tolist()]
    num_with_gradient, num_outside_mask = _count_outside_mask(call, batch)
    num_left_out, left_out_spacing = _find_left_out(batch, documents, special_tokens)
    num_row_ends, num_crossing = _count_crossing(batch)
    num_of_others = num_rows_of_others = num_other_side = num_unlabelled = 0
    # Which tokens a loss is of is taken from its gradient where the job gave no labels. A reward may give it none.
    if labels_BS is not None and token_labels_BS is not None and labels_BS is not batch.loss_targets_BS:
        num_of_others, num_rows_of_others = _count_labels_of_others(token_labels_BS, ids_BS, real_BS)
        num_other_side = _count_other_side(token_labels_BS, ids_BS, real_BS)
        num_unlabelled = int((real_BS.any(dim=1) & (labels_BS == IGNORED_LABEL).all(dim=1)).sum())
    return TokenTraits(
        rows=rows,
        has_mask="attention_mask" in call.tensors,
        has_actions=batch.action_mask_BA is not None
        or any(name in call.tensors or name in call.notes for name in ADVANTAGES),
        largest_id=int(ids_BS.max()),
        num_real=len(real_T),
        real_ids=_count_commonest_ids(real_T),
        num_padding=len(padding_T),
        num_between=int(find_padding_between_tokens(real_BS).sum()),
        padding_ids=_count_commonest_ids(padding_T),
        has_shifted_labels=has_shifted_labels,
        **({} if labels_BS is None else _describe_labels(labels_BS, ids_BS, real_BS, has_shifted_labels)),
        num_unlabelled=num_unlabelled,
        num_row_ends=num_row_ends,
        num_crossing=num_crossing,
        num_of_others=num_of_others,
        num_rows_of_others=num_rows_of_others,
        num_other_side=num_other_side,
        num_borders=num_borders,
        num_continued=num_continued,
        num_other_restarts=num_other_restarts,
        first_positions=first_positions,
        num_late_rows=num_late_rows,
        num_left_to_model=0 if gives_positions(batch) else int((real_BS.any(dim=1) & ~real_BS[:, 0]).sum()),
        num_not_finite=len(not_finite_places),
        num_not_finite_on_padding=int((is_not_finite_BS & _predicts_padding(real_BS)).sum()),
        first_not_finite=next(iter(not_finite_places), None),
        num_with_gradient=num_with_gradient,
        num_outside_mask=num_outside_mask,
        num_actions=0 if batch.action_mask_BA is None else int(batch.action_mask_BA.sum()),
        num_idle_actions=_count_idle_actions(batch, special_tokens),
        num_left_out=num_left_out,
        left_out_spacing=left_out_spacing,
        labelled_ends=_find_labelled_ends(rows, row_labels_BS),
        bos_token_id=special_tokens.bos_token_id,
    )


def describe_inverted_mask(traits: Sequence[TokenTraits]) -> str | None:
    """Say that the passes' masks call real what is padding; None where they do not, or where that cannot be told.

    No text is of one id alone, and no padding of many.
    """
    masked = [tokens for tokens in traits if tokens.has_mask]
    ids = {id_ for tokens in masked for id_ in tokens.real_ids}
    shown, hidden = sum(tokens.num_real for tokens in masked), sum(tokens.num_padding for tokens in masked)
    hides_texts = any(len(tokens.padding_ids) == _MAX_COMMONEST_IDS for tokens in masked)
    if len(ids) != 1 or shown < _MIN_PADDING or not hides_texts:
        return None
    return (
        f"the attention mask is inverted: the {pluralise(shown, 'token')} that it calls real are all id {ids.pop()}, "
        f"and the {hidden} that it hides are the texts"
    )


def _find_labels(batch: MicroBatch) -> tuple[Tensor | None, bool]:
    """Return the labels of a batch, and whether each stands beside the token that predicts it instead of its own."""
    if batch.shift_labels is not None:
        return batch.shift_labels, True
    if batch.labels_BS is not None:
        return batch.labels_BS, False
    return batch.loss_targets_BS, batch.loss_targets_BS is not None


def _label_actions(batch: MicroBatch, action_mask_BA: Tensor) -> Tensor:
    """Return the ids of the action tokens, [B, S], and IGNORED_LABEL at the others."""
    num_others = batch.sequences_BS.shape[1] - action_mask_BA.shape[1]
    is_action_BS = torch.nn.functional.pad(action_mask_BA, (num_others, 0))
    return batch.sequences_BS.masked_fill(~is_action_BS, IGNORED_LABEL)


def _count_commonest_ids(ids_T: Tensor) -> dict[int, int]:
    """Return the commonest of these ids, at most _MAX_COMMONEST_IDS, with how often each is there."""
    distinct, counts = ids_T.unique(return_counts=True)
    commonest = counts.argsort(descending=True)[:_MAX_COMMONEST_IDS]
    return dict(zip(distinct[commonest].tolist(), counts[commonest].tolist(), strict=True))


def _read_rows(
    batch: MicroBatch, token_labels_BS: Tensor | None, documents: Documents | None, special_tokens: SpecialTokens
) -> list[RowTraits]:
    # Nothing parts a row in which no position begins again, and no border was given.
    is_one_document_B = [False] * batch.num_rows
    if documents is not None:
        is_one_document_B = (documents.is_first_BS.sum(dim=1) <= 1).tolist()
    rows = [
        _read_row(
            batch.sequences_BS[number],
            batch.attention_mask_BS[number],
            None if token_labels_BS is None else token_labels_BS[number],
            special_tokens,
            is_packed=not is_one_document,
        )
        for number, is_one_document in enumerate(is_one_document_B)
    ]
    return [row for row in rows if row is not None]


def _find_labelled_ends(rows: Sequence[RowTraits], token_labels_BS: Tensor | None) -> frozenset[int]:
    if token_labels_BS is None:
        return frozenset()
    return frozenset(token_labels_BS.unique().tolist()).intersection(row.trailing[0] for row in rows)


def _find_not_finite(call: CapturedCall, real_BS: Tensor) -> Tensor:
    """Return [B, S], True at the positions whose gradient of the loss is not finite."""
    gradient_BS = call.notes.get(LOSS_GRADIENTS)
    if not isinstance(gradient_BS, Tensor) or gradient_BS.shape != real_BS.shape:
        return torch.zeros_like(real_BS)
    return ~gradient_BS.isfinite()


def _count_outside_mask(call: CapturedCall, batch: MicroBatch) -> tuple[int, int]:
    """Count the positions that the job's own loss gave a gradient, and those of them outside of the job's mask of it.

    Some masks are of the tokens, others of the tokens that predict them: the one that leaves out fewer counts. An
    action mask is of a row's last tokens. Both are 0 where the job gave no such mask beside the pass.
    """
    targets_BS = batch.loss_targets_BS
    given = {**call.tensors, **call.notes}
    name = next((name for name in LOSS_MASKS if name in given), None)
    if targets_BS is None or name is None:
        return 0, 0
    mask, (rows, num_tokens) = given[name], targets_BS.shape
    least = 1 if name == ACTION_MASK else num_tokens - 1
    fits = mask.ndim == 2 and len(mask) == rows and least <= mask.shape[1] <= num_tokens
    if not fits or not bool(((mask == 0) | (mask == 1)).all()):
        return 0, 0
    has_gradient_BS = targets_BS != IGNORED_LABEL
    of_tokens_BS = torch.nn.functional.pad(mask.bool(), (num_tokens - mask.shape[1], 0))
    # A row's last token predicts none of the row.
    outside = [has_gradient_BS & ~torch.nn.functional.pad(of_tokens_BS[:, 1:], (0, 1))]
    if name != ACTION_MASK:
        outside.append(has_gradient_BS & ~torch.nn.functional.pad(mask.bool(), (0, num_tokens - mask.shape[1])))
    return int(has_gradient_BS.sum()), min(int(outside_BS.sum()) for outside_BS in outside)


def _count_idle_actions(batch: MicroBatch, special_tokens: SpecialTokens) -> int:
    """Count the tokens of the action mask that are no text: masked as padding, or padding behind the end of a text.

    A talk of several turns has several ends; behind the last of them nothing else comes in the row.
    """
    if batch.action_mask_BA is None:
        return 0
    num_actions = batch.action_mask_BA.shape[1]
    ids_BA, real_BA = batch.sequences_BS[:, -num_actions:], batch.attention_mask_BS[:, -num_actions:]
    number = int((batch.action_mask_BA & ~real_BA).sum())
    ends = special_tokens.eos_token_ids
    for ids_A, real_A, actions_A in zip(ids_BA.tolist(), real_BA.tolist(), batch.action_mask_BA.tolist(), strict=True):
        # A config may name no padding, or another one than the tokenizer's.
        is_run = len({*ids_A[-_MIN_PADDING:]}) == 1 and num_actions > _MIN_PADDING
        no_text = {*ends, special_tokens.pad_token_id, *(ids_A[-1:] if is_run else [])}
        first = max((place + 1 for place, id_ in enumerate(ids_A) if id_ not in no_text), default=0)
        end = next((place for place in range(first, num_actions) if ids_A[place] in ends), num_actions)
        behind_end = zip(actions_A[end + 1 :], real_A[end + 1 :], strict=True)
        number += sum(is_action and is_real for is_action, is_real in behind_end)
    return number


def _find_left_out(
    batch: MicroBatch, documents: Documents | None, special_tokens: SpecialTokens
) -> tuple[int, int | None]:
    """Count the targets that the job's loss leaves out between others, and find their spacing; 0 and None without one.

    They are regular in each row where chunks are of a row's tokens, and in all rows where these are joined before. No
    target is missed where one document or turn ends and the next begins.
    """
    targets_BS = batch.loss_targets_BS
    if targets_BS is None or documents is None or targets_BS.shape[1] < 3:
        return 0, None
    has_target_BS = targets_BS != IGNORED_LABEL
    is_between_BS = torch.zeros_like(has_target_BS)
    is_between_BS[:, 1:-1] = has_target_BS[:, :-2] & has_target_BS[:, 2:] & ~documents.is_first_BS[:, 2:]
    is_between_BS &= ~torch.isin(batch.sequences_BS, torch.tensor(sorted(special_tokens.eos_token_ids)))
    rows, columns = is_between_BS.nonzero(as_tuple=True)
    is_left_out = ~has_target_BS[rows, columns]
    length = targets_BS.shape[1]
    for places in (columns, rows * length + columns, rows * (length - 1) + columns):
        left_out = places[is_left_out].unique()
        if len(left_out) < _MIN_LEFT_OUT or int(is_left_out.sum()) <= _MIN_LEFT_OUT:
            continue
        spacing = math.gcd(*torch.diff(left_out).tolist())
        is_regular = (places - left_out[0]) % spacing == 0
        if spacing > 1 and torch.equal(is_regular, is_left_out):
            return int(is_left_out.sum()), spacing
    return 0, None


def _predicts_padding(real_BS: Tensor) -> Tensor:
    """Tell of each position whether the next token is padding. The last one predicts no token of its row."""
    return torch.nn.functional.pad(~real_BS[:, 1:], (0, 1), value=False)


def _find_documents(batch: MicroBatch) -> Documents | None:
    try:
        return find_documents(batch)
    except CaptureError:
        # The pass itself reports what is wrong with its positions or borders.
        return None


def _read_row(
    ids_S: Tensor, real_S: Tensor, labels_S: Tensor | None, special_tokens: SpecialTokens, *, is_packed: bool
) -> RowTraits | None:
    """Read the traits of a row; None without real tokens, or with one token alone."""
    tokens_T = ids_S[real_S]
    if not len(tokens_T) or bool((tokens_T == tokens_T[0]).all()):
        return None
    after_lead = int((tokens_T != tokens_T[0]).nonzero()[0])
    before_tail = int((tokens_T != tokens_T[-1]).nonzero()[-1])
    num_labelled, ends_unlabelled = 0, False
    has_prompt, num_labelled_tail, num_turn_ends, num_unlabelled_turn_ends = False, 0, 0, 0
    if labels_S is not None:
        labels_T = labels_S[real_S]
        has_label_T = labels_T != IGNORED_LABEL
        has_prompt = not bool(has_label_T[1]) and bool(has_label_T.any())
        num_labelled_tail = int(has_label_T[before_tail + 1 :].sum())
        is_end_T = torch.isin(tokens_T, torch.tensor(sorted(special_tokens.eos_token_ids)))
        # The row's last end is no turn's.
        ends_turn_T = (is_end_T[1:] & ~is_end_T[:-1] & has_label_T[:-1])[:before_tail]
        num_turn_ends = int(ends_turn_T.sum())
        num_unlabelled_turn_ends = int((ends_turn_T & ~has_label_T[1 : before_tail + 1]).sum())
        for label in labels_T[1:NUM_FIRST_TOKENS].tolist():
            if label == IGNORED_LABEL:
                break
            num_labelled += 1
        last_label, end_label = labels_T[before_tail : before_tail + 2].tolist()
        ends_unlabelled = end_label == IGNORED_LABEL != last_label
    # Between the documents of a packed row such tokens stand where they belong, so they are not counted.
    bos_token_id = None if is_packed else special_tokens.bos_token_id
    eos_token_ids = frozenset[int]() if is_packed else special_tokens.eos_token_ids
    inner = tokens_T[after_lead : before_tail + 1].tolist() if eos_token_ids else []
    # Without a mask padding on the left looks like tokens, and what begins the text stands behind it.
    is_led_by_padding = int(tokens_T[0]) == special_tokens.pad_token_id or after_lead >= _MIN_PADDING
    first_inner = after_lead + is_led_by_padding
    digest = hashlib.blake2b(tokens_T.contiguous().numpy().tobytes(), digest_size=8).digest()
    return RowTraits(
        digest=int.from_bytes(digest, "little") if len(tokens_T) >= _MIN_ROW_TOKENS else None,
        first_tokens=tuple(tokens_T[:NUM_FIRST_TOKENS].tolist()),
        num_labelled=num_labelled,
        leading=(int(tokens_T[0]), after_lead),
        trailing=(int(tokens_T[-1]), len(tokens_T) - 1 - before_tail),
        ends_unlabelled=ends_unlabelled,
        num_inner_begins=0
        if bos_token_id is None
        else int((tokens_T[first_inner : before_tail + 1] == bos_token_id).sum()),
        num_inner_ends=sum(
            token in eos_token_ids and following not in eos_token_ids for token, following in pairwise(inner)
        ),
        num_tokens=len(tokens_T),
        # A template writes a line's end, or so, behind the end of a text.
        has_end=not eos_token_ids.isdisjoint(tokens_T[-_MAX_BEHIND_END - 1 :].tolist()) if eos_token_ids else None,
        has_prompt=has_prompt,
        num_labelled_tail=num_labelled_tail,
        num_turn_ends=num_turn_ends,
        num_unlabelled_turn_ends=num_unlabelled_turn_ends,
    )


def _describe_labels(labels_BS: Tensor, ids_BS: Tensor, real_BS: Tensor, has_shifted: bool) -> dict[str, Any]:
    counts_BS = labels_BS != IGNORED_LABEL
    values = labels_BS[counts_BS]
    # The model sees nothing of padding between a row's tokens, and computes its labels as any other's.
    row_BS = real_BS | find_padding_between_tokens(real_BS)
    is_padding_BS = _predicts_padding(row_BS) if has_shifted else ~row_BS
    last = [pair for pair in map(_find_last_label, labels_BS, ids_BS, real_BS) if pair is not None and has_shifted]
    return {
        "num_labels": len(values),
        "label_range": (int(values.min()), int(values.max())) if len(values) else None,
        "num_on_padding": int((counts_BS & is_padding_BS).sum()),
        "num_past_end": int((counts_BS & is_padding_BS & real_BS).sum()),
        "num_last_labels": len(last),
        "num_wrapped": sum(label == first for label, first in last),
        "label_offset": _find_label_offset(labels_BS, ids_BS, counts_BS),
    }


def _count_labels_of_others(labels_BS: Tensor, ids_BS: Tensor, real_BS: Tensor) -> tuple[int, int]:
    """Count the labels of real tokens that are other tokens, and the rows of them that have another row's labels."""
    # Another negative number than -100 is no token, which is remarked by itself.
    counts_BS = labels_BS >= 0
    is_other_BS = counts_BS & real_BS & (labels_BS != ids_BS)
    num_rows = 0
    for row in is_other_BS.any(dim=1).nonzero().flatten().tolist():
        counts_S = counts_BS[row]
        is_same_B = (ids_BS[:, counts_S] == labels_BS[row][counts_S]).all(dim=1)
        num_rows += int(counts_S.sum()) >= _MIN_LABELS and bool(is_same_B.any())
    return int(is_other_BS.sum()), num_rows


def _count_other_side(labels_BS: Tensor, ids_BS: Tensor, real_BS: Tensor) -> int:
    """Count the rows whose labels are padded on the other side than their tokens."""
    num_rows = num_labels = 0
    for labels_S, ids_S, real_S in zip(labels_BS, ids_BS, real_BS, strict=True):
        places_L = (labels_S >= 0).nonzero().flatten()
        num_padding = int((~real_S).sum())
        if not num_padding or not len(places_L):
            continue
        # Rows padded on the left have their tokens behind the labels' places, and those padded on the right before.
        moved_L = places_L + (num_padding if not bool(real_S[0]) else -num_padding)
        fits = bool(((moved_L >= 0) & (moved_L < len(ids_S))).all())
        is_own = torch.equal(labels_S[places_L], ids_S[places_L])
        if fits and not is_own and torch.equal(labels_S[places_L], ids_S[moved_L]):
            num_rows, num_labels = num_rows + 1, num_labels + len(places_L)
    return num_rows if num_labels >= _MIN_LABELS else 0


def describe_other_side(traits: Sequence[TokenTraits]) -> str | None:
    """Say that labels are padded on the other side than their rows' tokens; None where they are not."""
    if not (number := sum(tokens.num_other_side for tokens in traits)):
        return None
    return (
        f"labels and tokens are padded on different sides: in {pluralise(number, 'row')} the labels are the row's own "
        "tokens, moved by the length of its padding"
    )


def _count_crossing(batch: MicroBatch) -> tuple[int, int]:
    """Count the rows with a target in their last place, and those of them whose target is the next row's first token.

    Rows that were cut out of one long text have such targets by right, and the last row has one, too: the token behind
    the text. Where joined rows are shifted, it has none; where they are rolled, it has the first row's first token.
    """
    targets_BS = batch.shift_labels if batch.loss_targets_BS is None else batch.loss_targets_BS
    if targets_BS is None or batch.num_rows < 2:
        return 0, 0
    target_B, first_B = targets_BS[:, -1], batch.sequences_BS[:, 0]
    has_target_B = target_B != IGNORED_LABEL
    is_next_B = has_target_B & (target_B == first_B.roll(-1))
    # One roll of each row gives it its own first token, which is the next row's, too, where all texts begin alike.
    is_own = bool((target_B == first_B)[has_target_B].all())
    is_text = bool(has_target_B[-1]) and (is_own or not bool(is_next_B[-1]))
    return int(has_target_B.sum()), 0 if is_text else int(is_next_B.sum())


def describe_crossing(traits: Sequence[TokenTraits]) -> str | None:
    """Say that each row's last place is to predict the next row's first token; None where it is not."""
    number = sum(tokens.num_crossing for tokens in traits)
    if number < _MIN_CROSSING or number != sum(tokens.num_row_ends for tokens in traits):
        return None
    return (
        f"in {pluralise(number, 'row')} the last place is to predict the first token of the next row: labels are "
        "shifted after the rows are joined (`view(-1)`), not before"
    )


def _find_last_label(labels_S: Tensor, ids_S: Tensor, real_S: Tensor) -> tuple[int, int] | None:
    """Return the label beside a row's last token, and the row's first token, which `roll` puts there; None without."""
    tokens_T, labels_T = ids_S[real_S], labels_S[real_S]
    has_label = len(tokens_T) > 1 and bool(labels_T[-1] != IGNORED_LABEL)
    return (int(labels_T[-1]), int(tokens_T[0])) if has_label else None


def _find_label_offset(labels_BS: Tensor, ids_BS: Tensor, counts_BS: Tensor) -> int | None:
    """Find how many places after each label's own the token stands that it is; None unless there is one such number."""
    fitting: list[int] = []
    length = ids_BS.shape[1]
    for offset in _OFFSETS:
        first, last = max(0, -offset), length - max(0, offset)
        counts = counts_BS[:, first:last]
        labels, tokens = labels_BS[:, first:last][counts], ids_BS[:, first + offset : last + offset][counts]
        if len(labels) >= _MIN_LABELS and torch.equal(labels, tokens):
            fitting.append(offset)
    return fitting[0] if len(fitting) == 1 else None


def _count_restarts(call: CapturedCall, batch: MicroBatch, documents: Documents | None) -> tuple[int, int, int]:
    """Count the borders inside rows that the job named, those at which positions go on, and restarts elsewhere."""
    has_both = "position_ids" in call.tensors and any(name in call.tensors for name in BORDER_NAMES)
    if documents is None or not has_both:
        return 0, 0, 0
    borders = continued = other_restarts = 0
    for position_S, is_first_S, real_S in zip(
        documents.position_BS, documents.is_first_BS, batch.attention_mask_BS, strict=True
    ):
        step_T, is_border_T = torch.diff(position_S[real_S]), is_first_S[real_S][1:]
        borders += int(is_border_T.sum())
        continued += int((is_border_T & (step_T == 1)).sum())
        other_restarts += int((~is_border_T & (step_T <= 0)).sum())
    return borders, continued, other_restarts


def _read_first_positions(batch: MicroBatch) -> tuple[Mapping[int, int], int]:
    """Count the rows by the position id of their first real token, and those padded on the left where it counts that.

    Nothing is counted where the job gave no position ids, or some of another shape.
    """
    position_ids, real_BS = batch.extra_tensors.get("position_ids"), batch.attention_mask_BS
    if position_ids is None or position_ids.shape != real_BS.shape:
        return {}, 0
    rows = real_BS.any(dim=1).nonzero().flatten()
    columns = real_BS[rows].long().argmax(dim=1)
    positions = position_ids[rows, columns]
    return Counter(positions.tolist()), int(((columns > 0) & (positions == columns)).sum())
