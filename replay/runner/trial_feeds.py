"""List what a pass can be fed otherwise: other positions, other attention masks. Hypotheses as data.

Shape letters: B rows, S tokens a row (as captured, padding included), twice in masks: queries and keys, N log-probs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from actor_init.attention.exact_mask import MaskTable
from actor_init.inputs.documents import find_documents
from actor_init.inputs.packing import ActorInputs, prepare_inputs
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import MicroBatch
from replay.verdict.causes.cause import CauseName


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedRows:
    """A micro-batch in rows as the job had them.

    position_BS  what the model was given; None: it made its own
    document_BS  the number of each token's document, of padding too
    real_BS      False where the job's mask marks padding
    has_mask     the job gave a mask
    prepared     the log-probs that the replay computes, by place in these rows
    """

    ids_BS: Tensor
    real_BS: Tensor
    has_mask: bool
    position_BS: Tensor | None
    counted_BS: Tensor
    document_BS: Tensor
    prepared: ActorInputs

    @classmethod
    def from_call(cls, call: CapturedCall, batch: MicroBatch) -> "CapturedRows":
        """Lay out `batch`, with the loss's action mask. Raises CaptureError as `prepare_inputs` does."""
        documents = find_documents(batch)
        prepared = prepare_inputs(batch, packing=documents.has_shared_rows)
        if documents.has_shared_rows:
            # The predictor's place in the packed row becomes its place in the captured rows.
            places_T = prepared.captured_index.flatten()
            prepared = replace(prepared, predictor_N=places_T[prepared.predictor_N])
        real_BS = batch.attention_mask_BS
        given = batch.extra_tensors.get("position_ids")
        position_BS = None if given is None else given.long().expand(batch.sequences_BS.shape)
        counted_BS = documents.position_BS.masked_fill(~real_BS, 1)
        if batch.action_mask_BA is not None and not batch.has_noted_mask and position_BS is None:
            # A trainer's own actor around the model counts real tokens.
            position_BS = counted_BS
        return cls(
            ids_BS=batch.sequences_BS,
            real_BS=real_BS,
            has_mask="attention_mask" in call.tensors or not bool(real_BS.all()),
            position_BS=position_BS,
            counted_BS=counted_BS,
            # Padding on the left belongs to the first document.
            document_BS=documents.is_first_BS.long().cumsum(dim=1).clamp(min=1),
            prepared=prepared,
        )

    @property
    def has_documents(self) -> bool:
        return bool((self.document_BS.max(dim=1).values > 1).any())

    def see(self, *, padding: bool = False, documents: bool = False, ahead: int = 0, all_keys: bool = False) -> Tensor:
        """Return what each token sees [B, S, S]: itself and the tokens before it, real ones, of its document.

        padding    padding is seen, too
        documents  other documents are seen, too
        ahead      so many tokens more on the right are seen; -1: not the token itself
        all_keys   the tokens behind it are seen
        """
        place_S = torch.arange(self.ids_BS.shape[1])
        before_SS = place_S[None, :] <= place_S[:, None] + ahead
        visible_BSS = (before_SS | torch.tensor(all_keys))[None].expand(len(self.ids_BS), -1, -1)
        if not padding:
            visible_BSS = visible_BSS & self.real_BS[:, None, :]
        if not documents:
            visible_BSS = visible_BSS & (self.document_BS[:, :, None] == self.document_BS[:, None, :])
        # A token that sees nothing would be nan.
        is_blind_BS = ~visible_BSS.any(dim=2)
        return visible_BSS | torch.diag_embed(is_blind_BS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """What one forward is fed, beside token ids.

    table        None: the mask is the captured one
    position_BS  None: the model makes its own
    """

    table: MaskTable | None = None
    position_BS: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedTrial:
    """A hypothesis about what the job's forward was fed; `says` is the sentence of its cause."""

    name: str
    cause: CauseName
    says: str
    try_next: str
    feed: Feed


def feed_as_captured(rows: CapturedRows) -> Feed:
    """Feed the mask and the positions of the job.

    Documents are kept apart by a table: a job's kernel may have been told their borders otherwise than by positions.
    """
    table = MaskTable(visible_BSS=rows.see()) if rows.has_documents else None
    return Feed(table=table, position_BS=rows.position_BS)


def feed_by_table(rows: CapturedRows) -> Feed:
    """Feed what the model should see as an explicit table: to learn whether the model reads tables."""
    return Feed(table=MaskTable(visible_BSS=rows.see()), position_BS=rows.position_BS)


MEND_MASK = "mend the attention mask that the job's model makes or is given"
MEND_DOCUMENTS = (
    "give the job's model position_ids that restart and no attention_mask, with use_cache=False (a cache hides the "
    "documents from transformers), or a kernel that reads cu_seq_lens"
)


def list_mask_trials(rows: CapturedRows, config: PretrainedConfig) -> Iterator[FeedTrial]:
    """Yield hypotheses about what tokens see, those that these rows can tell from the pass as it is."""

    def make(name: str, cause: CauseName, says: str, try_next: str, table: MaskTable) -> FeedTrial:
        return FeedTrial(
            name=name, cause=cause, says=says, try_next=try_next, feed=Feed(table=table, position_BS=rows.position_BS)
        )

    usual_BSS = rows.see()
    variants: list[tuple[str, CauseName, str, str, Tensor]] = [
        (
            "padding is seen",
            CauseName.MASK,
            "in the job tokens see the padding: the attention mask is not heeded",
            "give the job's model the attention mask, and look for what drops it",
            rows.see(padding=True),
        ),
        (
            "documents see each other",
            CauseName.DOCUMENTS_MEET,
            "in the job packed documents see each other",
            MEND_DOCUMENTS,
            rows.see(documents=True),
        ),
        (
            "the next token is seen",
            CauseName.MASK,
            "in the job each token sees the next one: the causal mask is off by one",
            MEND_MASK,
            rows.see(ahead=1),
        ),
        (
            "itself is not seen",
            CauseName.MASK,
            "in the job each token sees those before it and not itself: the causal mask is off by one",
            MEND_MASK,
            rows.see(ahead=-1),
        ),
        ("not causal", CauseName.MASK, "the job's attention is not causal", MEND_MASK, rows.see(all_keys=True)),
        (
            "not causal, with padding",
            CauseName.MASK,
            "the job's attention is not causal, and sees padding",
            MEND_MASK,
            rows.see(all_keys=True, padding=True),
        ),
    ]
    seen = [usual_BSS]
    for name, cause, says, try_next, visible_BSS in variants:
        # Without padding, what sees that too is known already.
        if not any(torch.equal(visible_BSS, seen_BSS) for seen_BSS in seen):
            seen.append(visible_BSS)
            yield make(name, cause, says, try_next, MaskTable(visible_BSS=visible_BSS))
    if rows.has_documents:
        columns_BS = torch.arange(rows.ids_BS.shape[1]).expand(rows.ids_BS.shape)
        yield FeedTrial(
            name="one document",
            cause=CauseName.DOCUMENTS_MEET,
            says="the job takes a packed row as one document: positions go on, and documents see each other",
            try_next=MEND_DOCUMENTS,
            feed=Feed(table=MaskTable(visible_BSS=rows.see(documents=True)), position_BS=columns_BS),
        )
    window = getattr(config.get_text_config(), "sliding_window", None)
    if isinstance(window, int) and window < rows.ids_BS.shape[1]:
        for name, says, table in (
            (
                "no sliding window",
                f"the job ignores the sliding window of {window} tokens",
                MaskTable(visible_BSS=usual_BSS, ignores_window=True),
            ),
            (
                "wider window",
                f"the job's sliding window is one token wider than the config's {window}",
                MaskTable(visible_BSS=usual_BSS, window_change=1),
            ),
            (
                "narrower window",
                f"the job's sliding window is one token narrower than the config's {window}",
                MaskTable(visible_BSS=usual_BSS, window_change=-1),
            ),
        ):
            yield make(name, CauseName.MASK, says, MEND_MASK, table)


MEND_POSITIONS = "mend the position_ids that the job's model is given or makes"


def list_position_trials(
    rows: CapturedRows, config: PretrainedConfig, parting_column: int | None = None
) -> Iterator[FeedTrial]:
    """Yield hypotheses about positions, each another one; what tokens see stays as it should be.

    Positions beyond the model's longest are left out: a learned table has no such row.

    parting_column  the first column of these rows whose prediction is wrong, if those before it are right
    """
    columns_BS = torch.arange(rows.ids_BS.shape[1]).expand(rows.ids_BS.shape)
    usual_BS = columns_BS if rows.position_BS is None else rows.position_BS
    in_row_BS = (rows.real_BS.long().cumsum(dim=1) - 1).clamp(min=0)
    variants: list[tuple[str, str, Tensor]] = [
        ("columns", "the job's positions count a row's columns, padding and all documents included", columns_BS),
        ("real tokens", "the job's positions count a row's real tokens, on from document to document", in_row_BS),
        ("documents", "the job's positions begin again at each document, and count no padding", rows.counted_BS),
        ("from 1", "the job's positions begin at 1", usual_BS + 1),
        ("from 2", "the job's positions begin at 2", usual_BS + 2),
        ("all 0", "the job's positions are all 0", torch.zeros_like(usual_BS)),
        ("halved", "the job's positions are interpolated by 2", usual_BS / 2),
        ("reversed", "the job's positions count down", usual_BS.amax(dim=1, keepdim=True) - usual_BS),
    ]
    if parting_column is not None:
        says = f"the job's positions begin again every {parting_column} tokens"
        variants.append(("begin again", says, usual_BS % parting_column))
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    seen = [usual_BS] if rows.position_BS is not None else []
    for name, says, position_BS in variants:
        is_known = any(torch.equal(other_BS, position_BS) for other_BS in seen)
        if is_known or (isinstance(longest, int) and float(position_BS.max()) >= longest):
            continue
        seen.append(position_BS)
        yield FeedTrial(
            name=f"positions: {name}",
            cause=CauseName.POSITIONS,
            says=says,
            try_next=MEND_POSITIONS,
            feed=Feed(table=MaskTable(visible_BSS=rows.see()), position_BS=position_BS),
        )
