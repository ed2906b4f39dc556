"""Redact a folder of captures: its text goes; lengths, masks, positions and timing stay, so it can be shared."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capture.file_format.actor_config import (
    read_actor_config,
    read_adapter_configs,
    read_frozen_names,
    read_parameter_names,
    write_actor_config,
)
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.listing import list_captures, list_segment_files
from capture.file_format.micro_batch import (
    IGNORED_LABEL,
    LOSS_GRADIENTS,
    LOSS_MISFIT,
    LOSS_TARGETS,
    SHIFT_LABELS,
    CaptureError,
)
from capture.file_format.optimizer_step import OptimizerStep
from capture.folder_tools.convert import FolderWriter, make_empty_folder

# Tensors whose names begin with these are kept: they say where tokens are and not which.
GEOMETRY_NAMES = (
    "attention_mask",
    "action_mask",
    "position_ids",
    "cu_seq_lens",
    "cu_seqlens",
    "max_length",
    "token_type_ids",
)
TOKEN_NAMES = ("sequences", "input_ids", "labels")
# What configs, those inside another one and those of adapters have the model's name by.
_MODEL_NAMES = ("_name_or_path", "base_model_name_or_path")


class TokenRedaction(str, Enum):
    """What `redact_folder` does with token ids."""

    PERMUTE = "permute"
    ZERO = "zero"


@dataclass(frozen=True, kw_only=True, slots=True)
class Redaction:
    """What `redact_folder` wrote, refused and blanked.

    refused  reason by name of each capture that was refused
    blanked  names of the arguments whose values are all 0 now
    """

    num_written: int
    refused: dict[str, CaptureError] = field(default_factory=dict)
    blanked: set[str] = field(default_factory=set)


def redact_folder(source: Path, target: Path, tokens: TokenRedaction) -> Redaction:
    """Write every capture of `source` into `target` without its text.

    permute  a micro-batch's real tokens change places among themselves, and every id becomes another one, by a
             permutation of the vocabulary that is drawn anew for each file and kept nowhere; how often the commonest
             token occurs can still be seen
    zero     every token id is 0

    Other tensors than masks, positions and borders become 0; call facts keep numbers and lose texts. Removed are the
    model's name, what the model was beside its config, what was computed from the text (outputs, routes of experts,
    random states, gradients and their norms), and the samples of the weights. An optimizer's step keeps its passes,
    their shares and the settings.

    A source with segments becomes segments, of at most its largest one's size.

    Raises CaptureError without a source, or for a target that holds something already; OSError.
    """
    captures = list_captures(source)
    segment = max((path.stat().st_size for path in list_segment_files(source)), default=None)
    make_empty_folder(target)
    config = read_actor_config(source)
    if config is not None:
        adapters = _without_paths(read_adapter_configs(source))
        write_actor_config(
            target, _without_paths(config), None, adapters, read_frozen_names(source), read_parameter_names(source)
        )
    num_written, refused, blanked = 0, dict[str, CaptureError](), set[str]()
    with FolderWriter(target, segment=segment) as writer:
        for capture in captures:
            try:
                writer.write(_redact_call(read_call(capture.path), tokens, config, blanked))
                num_written += 1
            except CaptureError as error:
                refused[capture.path.name] = error
    return Redaction(num_written=num_written, refused=refused, blanked=blanked)


def _redact_call(
    call: CapturedCall, tokens: TokenRedaction, config: Mapping[str, Any] | None, blanked: set[str]
) -> CapturedCall:
    """Return the call without its text, and add the names of the arguments that became 0 to `blanked`."""
    batch = call.micro_batch()
    ids_name = "sequences" if "sequences" in call.tensors else "input_ids"
    largest_id = int(batch.sequences_BS.max())
    if batch.labels_BS is not None:
        largest_id = max(largest_id, int(batch.labels_BS.max()))
    vocabulary_size = max(largest_id + 1, int((config or {}).get("vocab_size") or 0))
    redacted: dict[str, Tensor] = {}
    for name, tensor in call.tensors.items():
        if name in TOKEN_NAMES or name.startswith(GEOMETRY_NAMES):
            redacted[name] = tensor
        else:
            redacted[name] = torch.zeros_like(tensor)
            blanked.add(name)
    ids_BS, labels_BS = _replace_tokens(
        batch.sequences_BS, batch.attention_mask_BS, batch.labels_BS, tokens, vocabulary_size
    )
    blanked |= {name for name in call.notes if not name.startswith(GEOMETRY_NAMES)}
    redacted[ids_name] = ids_BS.to(call.tensors[ids_name].dtype)
    if labels_BS is not None:
        redacted["labels"] = labels_BS.to(call.tensors["labels"].dtype)
    # Which tokens have a label is kept, as of `labels`: 0 stands for each label.
    if (next_BS := batch.shift_labels) is not None:
        redacted[SHIFT_LABELS] = next_BS.clamp(IGNORED_LABEL, 0).to(call.tensors[SHIFT_LABELS].dtype)
    return replace(
        call,
        tensors=redacted,
        call_facts=_without_texts(call.call_facts),
        notes={
            name: note if name.startswith(GEOMETRY_NAMES) else torch.zeros_like(note)
            for name, note in call.notes.items()
            if name not in (LOSS_TARGETS, LOSS_GRADIENTS, LOSS_MISFIT)
        },
        origin=replace(call.origin, model_name=None),
        outputs={},
        random={},
        random_after={},
        weights=None,
        routes={},
        step=None if call.step is None else _without_gradients(call.step),
    )


def _without_gradients(step: OptimizerStep) -> OptimizerStep:
    """Remove the gradients, which tell the text: its tokens are the embedding's rows with a gradient."""
    return replace(
        step, gradients=None, signatures=(), state=(), without_gradient=(), grad_norm=None, is_part_of_norm=False
    )


def _replace_tokens(
    ids_BS: Tensor, real_BS: Tensor, labels_BS: Tensor | None, tokens: TokenRedaction, vocabulary_size: int
) -> tuple[Tensor, Tensor | None]:
    """Replace token ids and labels; padding becomes 0.

    A label that was the token at its own position, or at the next one, still is.
    """
    labelled_BS = None if labels_BS is None else labels_BS != IGNORED_LABEL
    if tokens is TokenRedaction.ZERO:
        zeros = torch.zeros_like(ids_BS)
        return zeros, None if labelled_BS is None else torch.where(labelled_BS, 0, IGNORED_LABEL)
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    new_ids = torch.randperm(vocabulary_size, generator=generator)
    order = torch.randperm(int(real_BS.sum()), generator=generator)
    new_BS = torch.zeros_like(ids_BS)
    new_BS[real_BS] = new_ids[ids_BS[real_BS]][order]
    if labels_BS is None or labelled_BS is None:
        return new_BS, None
    next_BS, new_next_BS = ids_BS.roll(-1, dims=1), new_BS.roll(-1, dims=1)
    random_BS = torch.randint(vocabulary_size, labels_BS.shape, generator=generator)
    new_labels_BS = torch.where(labels_BS == next_BS, new_next_BS, random_BS)
    new_labels_BS = torch.where(labels_BS == ids_BS, new_BS, new_labels_BS)
    return new_BS, torch.where(labelled_BS, new_labels_BS, IGNORED_LABEL)


def _without_texts(value: Any) -> Any:
    """Keep numbers and switches, and make all texts empty: a text may be anything."""
    if isinstance(value, Mapping):
        return {key: _without_texts(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_texts(member) for member in value]
    return "" if isinstance(value, (str, bytes)) else value


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the model's name, and make texts of a config empty that may be paths of the host.

    Other texts name architectures and functions.
    """

    def empty_paths(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: empty_paths(member) for key, member in value.items() if key not in _MODEL_NAMES}
        if isinstance(value, list):
            return [empty_paths(member) for member in value]
        return "" if isinstance(value, str) and ("/" in value or "\\" in value) else value

    cleaned: dict[str, Any] = empty_paths(json.loads(json.dumps(dict(config), default=str)))
    return cleaned
