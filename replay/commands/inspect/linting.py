"""Run the checks of `replay/lint` on the first passes of a recording."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actor_init.dropout_settings import find_acting_dropouts
from capture.file_format.actor_config import (
    read_actor_config,
    read_adapter_configs,
    read_frozen_names,
    read_parameter_names,
)
from capture.file_format.end_record import read_end_records
from capture.file_format.folder_layout import parse_rank
from capture.file_format.folder_recordings import FolderRecording
from capture.file_format.listing import CaptureLocation, format_ranges, locate_captures
from capture.file_format.micro_batch import CaptureError
from capture.file_format.segment import Segment
from replay.lint.lint import has_router_loss, lint, read_unreplayed_pass, read_vocab_size
from replay.lint.remark import LintRemark, LintSubject
from replay.lint.token_checks import leaves_positions_to_model
from replay.lint.training_checks import drew_masks_without_gradient, is_in_eval_mode
from replay.output.text import pluralise
from replay.verdict.recorded_pass import RecordedPass
from replay.verdict.special_tokens import SpecialTokens

# The checks read at most so many passes.
MAX_CHECKED = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Linting:
    """What the checks say of a recording.

    recording  its number
    read       which of its passes they read, in words
    """

    recording: int
    remarks: Sequence[LintRemark]
    read: str


def lint_recording(
    folder: Path, recording: FolderRecording, not_recorded: Mapping[str, int], *, has_failed: bool
) -> Linting:
    """Check the first passes of each rank, MAX_CHECKED in all.

    not_recorded  numbers of training passes that the recording could not keep, by the reason
    has_failed    an error or a signal ended a job of the folder
    """
    ids = set(recording.ids)
    captures = _choose_captures(recording)
    try:
        config = read_actor_config(folder) or {}
        frozen, adapters = read_frozen_names(folder), read_adapter_configs(folder)
        parameter_names = read_parameter_names(folder)
        ends = [end for end in read_end_records(folder) if end.recording in ids]
    except CaptureError:
        # The inspection names the file that cannot be read.
        config, frozen, adapters, parameter_names, ends = {}, [], {}, [], []
    special_tokens = SpecialTokens.from_config(config)
    # What cannot be read the inspection names.
    read = (read_unreplayed_pass(capture, special_tokens) for capture in captures)
    passes = [recorded for recorded in read if recorded is not None]
    # Which settings act is asked only if it matters, since it builds the model.
    does_matter = any(is_in_eval_mode(recorded) or drew_masks_without_gradient(recorded) for recorded in passes)
    subject = LintSubject(
        passes=passes,
        # A job that failed may not have come to its first step.
        is_whole=len(passes) == recording.num_passes and not has_failed,
        pad_token_id=special_tokens.pad_token_id,
        eos_token_ids=special_tokens.eos_token_ids,
        vocabulary=read_vocab_size(config),
        dropout=find_acting_dropouts(config) if does_matter and config else (),
        parameter_names=parameter_names,
        frozen=frozen,
        counts_padding=_counts_padding(passes, config),
        has_router_loss=has_router_loss(config),
        has_adapter=bool(adapters),
        not_recorded=not_recorded,
        ends=ends,
    )
    return Linting(recording=recording.number, remarks=lint(subject), read=_describe_passes(captures, recording))


def _choose_captures(recording: FolderRecording) -> list[CaptureLocation]:
    """Choose the first passes of each rank, as many of one rank as of another."""
    by_rank: dict[int, list[Path | Segment]] = defaultdict(list)
    for file in recording.files:
        by_rank[parse_rank(file.path if isinstance(file, Segment) else file)].append(file)
    num_each = max(1, MAX_CHECKED // len(by_rank))
    chosen: list[CaptureLocation] = []
    for files in list(by_rank.values())[:MAX_CHECKED]:
        # Each file has a pass at least.
        chosen += locate_captures(files[:num_each])[:num_each]
    return chosen


def _counts_padding(passes: Sequence[RecordedPass], config: Mapping[str, object]) -> bool:
    """Ask a small copy of the model, if any row leaves its positions to it."""
    if not leaves_positions_to_model(passes):
        return False
    # transformers takes seconds to import, and few recordings need it here.
    from actor_init.model_positions import counts_padding

    return counts_padding(config)


def _describe_passes(captures: Sequence[CaptureLocation], recording: FolderRecording) -> str:
    if len(captures) == recording.num_passes:
        return f"all {pluralise(len(captures), 'pass')}"
    ranks = format_ranges({capture.rank for capture in captures if capture.rank >= 0})
    of_ranks = f", the first of ranks {ranks}" if ranks else ""
    return f"{len(captures)} of {pluralise(recording.num_passes, 'pass')}{of_ranks}"
