"""Define a micro-batch: the tensors that went into a model's forward, and where they came from.

Shape letters: B rows, S tokens a row (padding included), A columns of the action mask (the last tokens of each row).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

# Where what reads captures imports it from. The command line refuses what was typed wrong without torch.
from capture.facts import CaptureError as CaptureError

# The most tokens of a micro-batch, padding included: a bound for readers, far above what a device holds.
MAX_TOKENS = 2**24
# The default `ignore_index` of torch.nn.functional.cross_entropy.
IGNORED_LABEL = -100

EMBEDDINGS_REASON = (
    "the model was called with inputs_embeds, without token ids. The call is kept whole "
    "(capture.file_format.capture_file.read_call), but a replay needs token ids"
)
ID_NAMES = ("sequences", "input_ids")
EMBEDDINGS_NAME = "inputs_embeds"
SHIFT_LABELS = "shift_labels"
# What a recording notes of a loss that the model does not compute: the token that the loss is of at each position that
# predicts one, int32 [rows, tokens], IGNORED_LABEL where it has no gradient; the gradient of that token's logit, fp32
# [rows, tokens]; and which share of the logits' gradient is not of a log-prob's form, one number.
LOSS_TARGETS, LOSS_GRADIENTS, LOSS_MISFIT = "loss_targets", "loss_gradients", "loss_misfit"
NOTED_SHAPES = "a number, [rows], [rows / 2] for pairs, or [rows, up to as many as a row has tokens]"


class NotReplayableError(CaptureError):
    """A capture that is whole, and of a call that no replay can make. The message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a micro-batch was seen. What a capture does not say is None.

    source  file name within its folder
    step    number of the forward, as this rank's recorder counted them
    time    ISO 8601: in UTC for format 1, as it was written for older dumps
    """

    source: str
    rank: int | None = None
    world_size: int | None = None
    step: int | None = None
    time: str | None = None
    model_name: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def forward_number(self) -> int | None:
        """The number of the forward, which the file's format calls `step`."""
        return self.step


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One forward's inputs. Construction checks shapes, dtypes and mask values.

    sequences_BS      token ids, int64
    attention_mask_BS True where a token is real
    action_mask_BA    True where one of a row's last A tokens was generated; A < S. None if the model was not given one
    labels_BS         int64 target ids, -100 where none; not shifted. None if the model was not given any
    loss_targets_BS   ids that the job's loss is of, int64, each at the token that predicts it, -100 where none: taken
                      from the gradient of the logits; None if that was not recorded
    extra_tensors     every other tensor argument by name, as it came
    call_facts        every other argument by name: None, bool, int, float, str, or lists and dicts of these
    left_out          arguments that could not be kept: name to type, as `processor: mine.ImageProcessor`
    trains            whether autograd was on
    has_noted_mask    the action mask was noted beside the call, whose arguments were the model's own
    padding_predicts_label  a label of a row's first token counts where padding stands before it, as in a model's own
                      loss: what the model computes at that padding predicts it

    Raises CaptureError where these do not fit together.
    """

    sequences_BS: Tensor
    attention_mask_BS: Tensor
    action_mask_BA: Tensor | None = None
    labels_BS: Tensor | None = None
    loss_targets_BS: Tensor | None = None
    extra_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    call_facts: Mapping[str, object] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    trains: bool
    origin: Origin
    has_noted_mask: bool = False
    padding_predicts_label: bool = False

    def __post_init__(self) -> None:
        shape = tuple(self.sequences_BS.shape)
        if self.sequences_BS.dtype != torch.int64 or len(shape) != 2 or 0 in shape:
            raise CaptureError(
                f"{self.origin.source}: token ids must be int64 of shape [rows, tokens], "
                f"not {self.sequences_BS.dtype} of shape {list(shape)}"
            )
        if int(self.sequences_BS.min()) < 0:
            raise CaptureError(f"{self.origin.source}: token id {int(self.sequences_BS.min())} is negative")
        self._check_mask("attention_mask", self.attention_mask_BS, shape)
        if self.action_mask_BA is not None:
            num_actions = self.action_mask_BA.shape[-1] if self.action_mask_BA.ndim == 2 else 0
            if not 0 < num_actions < shape[1]:
                raise CaptureError(
                    f"{self.origin.source}: action_mask has shape {list(self.action_mask_BA.shape)}; "
                    f"allowed is [{shape[0]}, 1 to {shape[1] - 1}] for token ids of shape {list(shape)}"
                )
            self._check_mask("action_mask", self.action_mask_BA, (shape[0], num_actions))
        if self.labels_BS is not None and (tuple(self.labels_BS.shape) != shape or self.labels_BS.dtype != torch.int64):
            raise CaptureError(
                f"{self.origin.source}: labels must be int64 of shape {list(shape)}, "
                f"not {self.labels_BS.dtype} of shape {list(self.labels_BS.shape)}"
            )

    def _check_mask(self, name: str, mask: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(mask.shape) != shape or mask.dtype != torch.bool:
            raise CaptureError(
                f"{self.origin.source}: {name} must be a mask of shape {list(shape)}, "
                f"not {mask.dtype} of shape {list(mask.shape)}"
            )

    @property
    def num_rows(self) -> int:
        return self.sequences_BS.shape[0]

    @property
    def shift_labels(self) -> Tensor | None:
        """Return the ids that the tokens are to predict, int64, -100 where none; None if the model was not given any.

        The last one of a row is no token of the row. They count before `labels_BS`, as in transformers.
        """
        labels_BS = self.extra_tensors.get(SHIFT_LABELS)
        if labels_BS is None or labels_BS.shape != self.sequences_BS.shape or labels_BS.dtype not in _ID_DTYPES:
            return None
        # Any negative id is no label: nanoGPT has -1 there, transformers -100.
        return labels_BS.long().masked_fill(labels_BS < 0, IGNORED_LABEL)

    @property
    def num_padded_tokens(self) -> int:
        """Count real and padding tokens together: rows x the longest row."""
        return self.sequences_BS.numel()

    @property
    def num_real_tokens(self) -> int:
        return int(self.attention_mask_BS.sum())

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Return the same micro-batch with every tensor on `device`."""
        return self.with_each(lambda tensor: tensor.to(device))

    def with_each(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Return the same micro-batch with every tensor changed."""
        changed: dict[str, Any] = {
            field.name: change(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        extra = {name: change(tensor) for name, tensor in self.extra_tensors.items()}
        return replace(self, extra_tensors=extra, **changed)


def find_padding_between_tokens(real_BS: Tensor) -> Tensor:
    """Find padding [B, S] that has real tokens of its row on both sides."""
    num_before_BS = real_BS.cumsum(dim=1)
    return ~real_BS & (num_before_BS > 0) & (num_before_BS < num_before_BS[:, -1:])


def move_to_tokens(next_BS: Tensor) -> Tensor:
    """Move ids from the tokens that predict them to their own tokens; a row's last one has no place there."""
    return torch.nn.functional.pad(next_BS[:, :-1], (1, 0), value=IGNORED_LABEL)


def with_shift_labels_as_labels(batch: MicroBatch) -> MicroBatch:
    """Return the same micro-batch with its `shift_labels` as labels, which have no place for a row's last one."""
    if (next_BS := batch.shift_labels) is None:
        return batch
    extra = {name: tensor for name, tensor in batch.extra_tensors.items() if name != SHIFT_LABELS}
    return replace(batch, labels_BS=move_to_tokens(next_BS), extra_tensors=extra)


def with_loss_targets_as_labels(batch: MicroBatch) -> MicroBatch:
    """Return the same micro-batch with the targets of the job's loss as its labels, and without its action mask.

    They are `shift_labels`, each at the token that predicts it: a target may be padding, or come after a row's last.
    """
    if (next_BS := batch.loss_targets_BS) is None:
        return batch
    extra = {**batch.extra_tensors, SHIFT_LABELS: next_BS}
    return replace(batch, labels_BS=None, action_mask_BA=None, extra_tensors=extra)


def with_rows_reversed(batch: MicroBatch) -> MicroBatch:
    """Return the same micro-batch with its last row first; so are extra tensors with as many rows."""

    def reverse_rows(tensor: Tensor) -> Tensor:
        return tensor.flip(0) if tensor.ndim > 1 and len(tensor) == batch.num_rows else tensor

    return batch.with_each(reverse_rows)


_ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MASK_DTYPES = (torch.bool, *_ID_DTYPES, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_mask(name: str, tensor: Tensor, source: str) -> Tensor:
    """Turn bool, int or float values of 0 and 1 into a bool mask. Raises CaptureError on any other value."""
    _check_shape_and_dtype(name, tensor, _MASK_DTYPES, source)
    mask = tensor != 0
    if not torch.equal(tensor, mask.to(tensor.dtype)):
        raise CaptureError(f"{source}: {name} must hold only 0 and 1, but holds other values ({tensor.dtype})")
    return mask


def micro_batch_from_call(
    tensors: Mapping[str, Tensor],
    call_facts: Mapping[str, object],
    *,
    trains: bool,
    origin: Origin,
    left_out: Mapping[str, str] | None = None,
) -> MicroBatch:
    """Name a forward's arguments: `sequences` or `input_ids`, `attention_mask`, `action_mask`, `labels`.

    The other tensors are kept as they came. Without an attention mask every token is real. Raises CaptureError if there
    are no token ids.
    """
    remaining = dict(tensors)
    names = [name for name in ID_NAMES if name in remaining]
    if has_only_embeddings(tensors):
        raise NotReplayableError(f"{origin.source}: {EMBEDDINGS_REASON}")
    if not names:
        raise CaptureError(
            f"{origin.source}: no token ids: expected an argument `sequences` or `input_ids`, "
            f"got {sorted(remaining)[:20] or 'no tensors'}. Where one of these is the token ids, record with "
            f"--arguments {next(iter(remaining), 'idx')}=input_ids, or arguments= of `recording`"
        )
    sequences = remaining.pop(names[0])
    _check_shape_and_dtype(names[0], sequences, _ID_DTYPES, origin.source)
    sequences_BS = sequences.long()
    attention_mask = remaining.pop("attention_mask", None)
    action_mask = remaining.pop("action_mask", None)
    labels = remaining.pop("labels", None)
    if labels is not None:
        _check_shape_and_dtype("labels", labels, _ID_DTYPES, origin.source)
    return MicroBatch(
        sequences_BS=sequences_BS,
        attention_mask_BS=torch.ones_like(sequences_BS, dtype=torch.bool)
        if attention_mask is None
        else as_mask("attention_mask", attention_mask, origin.source),
        action_mask_BA=None if action_mask is None else as_mask("action_mask", action_mask, origin.source),
        labels_BS=None if labels is None else labels.long(),
        extra_tensors=remaining,
        call_facts=dict(call_facts),
        left_out=dict(left_out or {}),
        trains=trains,
        origin=origin,
    )


def has_only_embeddings(tensors: Mapping[str, Tensor]) -> bool:
    return EMBEDDINGS_NAME in tensors and not any(name in tensors for name in ID_NAMES)


def check_call(
    tensors: Mapping[str, Tensor], call_facts: Mapping[str, object], *, trains: bool, origin: Origin
) -> MicroBatch | None:
    """Check that a capture may hold the call: a micro-batch, or one with embeddings in the place of token ids.

    Returns the micro-batch; None of embeddings. Raises CaptureError for any other call.
    """
    # Embeddings are checked on their own. The other arguments are checked beside stand-in token ids, as many as there
    # are embeddings.
    checked = dict(tensors)
    if has_only_embeddings(tensors):
        embeddings = checked.pop(EMBEDDINGS_NAME)
        if embeddings.ndim != 3 or not embeddings.dtype.is_floating_point:
            raise CaptureError(
                f"{origin.source}: {EMBEDDINGS_NAME} must be floats of shape [rows, tokens, width], "
                f"not {embeddings.dtype} of shape {list(embeddings.shape)}"
            )
        checked["input_ids"] = torch.zeros((), dtype=torch.int64, device="cpu").expand(embeddings.shape[:2])
    batch = micro_batch_from_call(checked, call_facts, trains=trains, origin=origin)
    return None if has_only_embeddings(tensors) else batch


def _check_shape_and_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], source: str) -> None:
    if tensor.ndim != 2 or tensor.dtype not in dtypes or tensor.numel() > MAX_TOKENS:
        raise CaptureError(
            f"{source}: {name} must be of shape [rows, tokens] with at most {MAX_TOKENS} elements and one of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}, "
            f"not {tensor.dtype} of shape {list(tensor.shape)}"
        )


def explain_misfit(shape: Sequence[int], *, rows: int, row_length: int) -> str | None:
    """Say why a job may not note a tensor of `shape` for a pass with `rows` of `row_length` tokens; None if it may.

    It belongs to the pass's rows of token ids [B, S]: one number, one for each row or each pair of rows, or one for
    each of a row's last tokens (the token's own advantage or log-prob, in the token's own place).
    """
    match tuple(shape):
        case () | (1,):
            return None
        case (length,) if length in (rows, rows / 2) or (rows == 1 and length <= row_length):
            return None
        case (length, width) if length == rows and 0 < width <= row_length:
            return None
    return f"noted with shape {list(shape)}; allowed for token ids of shape {[rows, row_length]}: {NOTED_SHAPES}"
