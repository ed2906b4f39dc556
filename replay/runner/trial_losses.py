"""List other losses that a job may have computed of the same log-probs. Hypotheses as data.

Shape letters: B rows, S tokens a row, as captured.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actor_init.inputs.documents import find_documents
from capture.file_format.micro_batch import IGNORED_LABEL, MicroBatch, move_to_tokens
from replay.output.text import pluralise
from replay.verdict.causes.cause import CauseName

# Relative: two losses that are no further apart are the same one.
SAME_LOSS = 1e-12


def is_same_loss(value: float, other: float) -> bool:
    return abs(value - other) <= SAME_LOSS * abs(other)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRows:
    """The tokens that losses may ask log-probs of.

    target_BS    the label of each place where there is one, else the token itself
    is_label_BS  the place has a label; not shifted
    real_BS      False for padding
    has_shared_rows  a row holds several documents
    """

    target_BS: Tensor
    is_label_BS: Tensor
    real_BS: Tensor
    has_shared_rows: bool = False

    @classmethod
    def from_batch(cls, batch: MicroBatch) -> "TargetRows":
        ids_BS, labels_BS = batch.sequences_BS, batch.labels_BS
        real_BS = batch.attention_mask_BS
        has_shared_rows = find_documents(batch).has_shared_rows
        if batch.shift_labels is not None:
            labels_BS = move_to_tokens(batch.shift_labels)
        if labels_BS is None:
            return cls(target_BS=ids_BS, is_label_BS=real_BS, real_BS=real_BS, has_shared_rows=has_shared_rows)
        is_label_BS = labels_BS != IGNORED_LABEL
        target_BS = torch.where(is_label_BS, labels_BS, ids_BS)
        return cls(target_BS=target_BS, is_label_BS=is_label_BS, real_BS=real_BS, has_shared_rows=has_shared_rows)

    def list_targets(self) -> tuple[Tensor, Tensor]:
        """List predictors and targets of three tables of log-probs: each token predicts itself, the next, the second.

        Returns indices into the flattened [B, S], and token ids; 3 B S of both. Where a row ends the target is any.
        """
        places = torch.arange(self.target_BS.numel())
        targets = [self.target_BS.roll(-shift, dims=1).flatten() for shift in range(3)]
        return places.repeat(3), torch.cat(targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitStatistics:
    """What the replay's tokens have of whole logits, as means over them.

    uniform  the log-prob of the vocabulary, all tokens of it alike
    square   of the logarithm of the sum of the logits' exponentials
    """

    uniform: float
    square: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTables:
    """Log-probs of each place's own, next and second token, and what the job's loss is divided by.

    tables_3BS  in double precision, on the host
    logits      None where whole logits do not fit
    divisor     what the job's model was told to divide the sum by; None: it takes the mean
    num_tokens  that the replay's loss is the mean over
    """

    rows: TargetRows
    tables_3BS: Tensor
    logits: LogitStatistics | None
    divisor: float | None
    num_tokens: int

    @property
    def num_job_labels(self) -> int:
        """Count the labels over which the job's loss is taken to be the mean, where it was told to divide otherwise."""
        return int(self.rows.is_label_BS[:, 1:].sum()) or self.num_tokens

    def sum_over(self, shift: int, is_counted_BS: Tensor) -> tuple[float, int]:
        """Sum the losses of the counted targets, each predicted `shift` places before itself; and count them."""
        num_columns = is_counted_BS.shape[1]
        is_target_BS = is_counted_BS[:, shift:]
        losses_BS = -self.tables_3BS[shift][:, : num_columns - shift]
        return float(losses_BS[is_target_BS].sum()), int(is_target_BS.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTrial:
    """Another loss.

    loss   of the pass, on the scale of the job's: what a job with a divisor gives is a mean over `num_job_labels`
    says   what it is of, for `the job's loss ...`
    """

    name: str
    cause: CauseName
    loss: float
    says: str
    try_next: str


MEND_LABELS = "mend the job's labels, or where its model shifts them"
MEND_LOSS = "compare the job's loss function with the mean of its labels' cross entropies"


def list_loss_trials(tables: LossTables) -> Iterator[LossTrial]:
    """Yield other losses of the pass: over other tokens, then other functions."""
    yield from _list_other_tokens(tables)
    yield from _list_unshifted(tables)
    yield from _list_other_functions(tables)


def _list_other_tokens(tables: LossTables) -> Iterator[LossTrial]:
    rows = tables.rows
    is_label_BS, real_BS = rows.is_label_BS, rows.real_BS
    everything_BS = torch.ones_like(real_BS)
    begins_BS = is_label_BS & ~F.pad(is_label_BS[:, :-1], (1, 0))
    before_BS = F.pad(begins_BS[:, 1:], (0, 1)) & real_BS
    ends_BS = is_label_BS & ~F.pad(is_label_BS[:, 1:], (0, 1))
    variants = (
        ("all labels", 1, is_label_BS, f"counts {_describe_further_labels(tables)}: {{tokens}}"),
        ("all real tokens", 1, real_BS, "counts prompts too: it is over all {tokens} of the rows"),
        ("padding too", 1, everything_BS, "counts padding and prompts too: it is over all {tokens}"),
        ("shifted twice", 2, is_label_BS, "has labels that are shifted twice: {tokens}, each predicted two places on"),
        ("own tokens", 0, is_label_BS, "has labels that are not shifted: each of {tokens} predicts itself"),
        ("one label more", 1, is_label_BS | before_BS, "counts the last token of each prompt too: {tokens}"),
        ("one label less", 1, is_label_BS & ~begins_BS, "leaves out the first label of each text: {tokens}"),
        ("last label left out", 1, is_label_BS & ~ends_BS, "leaves out the last label of each text: {tokens}"),
        ("labels and padding", 1, is_label_BS | ~real_BS, "counts padding too: {tokens}"),
        ("prompts alone", 1, real_BS & ~is_label_BS, "counts the prompts, and not the labels: {tokens}"),
    )
    counted: list[tuple[int, Tensor]] = []
    for name, shift, is_counted_BS, says in variants:
        total, count = tables.sum_over(shift, is_counted_BS)
        place = (shift, is_counted_BS[:, shift:])
        # One loss has one name: where no token lacks a label, all tokens are the labels.
        is_known = any(place[0] == other[0] and torch.equal(place[1], other[1]) for other in counted)
        is_own = shift == 1 and is_counted_BS is is_label_BS and count == tables.num_tokens
        if not count or is_known or is_own:
            continue
        counted.append(place)
        divisor = count if tables.divisor is None else tables.num_job_labels
        yield LossTrial(
            name=name,
            cause=CauseName.OTHER_TOKENS,
            loss=total / divisor,
            says=says.format(tokens=pluralise(count, "token")),
            try_next=MEND_LABELS,
        )


def _describe_further_labels(tables: LossTables) -> str:
    """Describe the labels that a model which only shifts them counts, and the replay's loss does not."""
    rows = tables.rows
    is_label_BS, real_BS = rows.is_label_BS[:, 1:], rows.real_BS[:, 1:]
    num_of_padding = int((is_label_BS & ~real_BS).sum())
    num_after_padding = int((is_label_BS & real_BS & ~rows.real_BS[:, :-1]).sum())
    num_further = int(is_label_BS.sum()) - tables.num_tokens
    kinds = [f"{pluralise(num_of_padding, 'label')} of padding"] if num_of_padding else []
    if rows.has_shared_rows and num_further > num_of_padding:
        kinds.append("the first token of each packed document, which the document before predicts")
    elif num_after_padding:
        kinds.append(f"{pluralise(num_after_padding, 'label')} that padding predicts")
    return " and ".join(kinds) or f"all {pluralise(num_further + tables.num_tokens, 'label')}"


def _list_unshifted(tables: LossTables) -> Iterator[LossTrial]:
    """Yield the loss of labels that were moved on by one place, so that a model that shifts them predicts itself."""
    is_counted_BS = tables.rows.is_label_BS[:, :-1]
    losses_BS = -tables.tables_3BS[0][:, :-1]
    count = int(is_counted_BS.sum())
    if count:
        total = float(losses_BS[is_counted_BS].sum())
        yield LossTrial(
            name="not shifted",
            cause=CauseName.OTHER_TOKENS,
            loss=total / (count if tables.divisor is None else tables.num_job_labels),
            says=f"is over {pluralise(count, 'token')} that predict themselves: its labels are not shifted",
            try_next=MEND_LABELS,
        )


def _list_other_functions(tables: LossTables) -> Iterator[LossTrial]:
    is_label_BS = tables.rows.is_label_BS[:, 1:]
    losses_BS = -tables.tables_3BS[1][:, :-1].masked_fill(~is_label_BS, 0.0)
    total, count = float(losses_BS.sum()), int(is_label_BS.sum())
    if not count:
        return
    counts_B = is_label_BS.sum(dim=1)
    sums_B = losses_BS.sum(dim=1)
    means_B = sums_B[counts_B > 0] / counts_B[counts_B > 0]
    # What a job with a divisor gives is multiplied by the divisor and divided by the number of labels before it is
    # compared.
    scale = 1.0 if tables.divisor is None else tables.divisor / tables.num_job_labels
    num_rows, num_places = is_label_BS.shape[0], is_label_BS.numel()
    variants = [
        ("mean of rows' means", float(means_B.mean()), "is the mean of its rows' means, not of its tokens"),
        ("sum", scale * total, "is the sum over its labels, not their mean"),
        ("sum by rows", scale * total / num_rows, f"is the sum over its labels divided by its {num_rows} rows"),
        (
            "mean over all places",
            scale * total / num_places,
            f"is divided by all {num_places} places of the rows, not by its {pluralise(count, 'label')}",
        ),
    ]
    mean = total / count
    variants += [
        (f"times {factor:g}", factor * mean, f"is {factor:g} times the mean over its labels")
        for factor in (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
    ]
    if (logits := tables.logits) is not None:
        variants += [
            (
                f"smoothed by {share:g}",
                (1 - share) * mean - share * logits.uniform,
                f"is smoothed: {share:g} of each label's weight goes to all tokens of the vocabulary",
            )
            for share in (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
        ]
        variants += [
            (f"z-loss of {weight:g}", mean + weight * logits.square, f"has a z-loss, of weight {weight:g}, added to it")
            for weight in (1e-5, 1e-4, 1e-3, 1e-2)
        ]
    for name, loss, says in variants:
        yield LossTrial(name=name, cause=CauseName.OBJECTIVE, loss=loss, says=says, try_next=MEND_LOSS)
    if tables.divisor is not None and tables.divisor != tables.num_job_labels:
        yield LossTrial(
            name="own mean",
            cause=CauseName.OBJECTIVE,
            loss=scale * mean,
            says=f"is the mean over its own {pluralise(count, 'label')}, though it was told to divide by "
            f"{tables.divisor:g}: num_items_in_batch is not heeded",
            try_next="let the job's model heed num_items_in_batch",
        )
