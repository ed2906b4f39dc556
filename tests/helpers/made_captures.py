"""Captures with known contents, for the tests that need a folder of them."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch

from capture import capture_files, read_micro_batch
from capture.file_format.actor_config import write_actor_config
from capture.file_format.capture_file import CapturedCall, read_call, write_call
from capture.file_format.end_record import EndRecord, write_end_record
from capture.file_format.micro_batch import Origin
from replay.options.spec import find_sample_folder

BEGINNING = datetime(2026, 3, 1, 9, 12, 44, tzinfo=UTC)
# A full hour: the step of a call that `make_call` makes is the minute of its time.
MONDAY = datetime(2026, 3, 2, 9, tzinfo=UTC)
# A config for write_actor_config, of a model that is opened in no time.
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}

# Training passes of the sample of at most 252 tokens, five of each rank; the others have ten times as many.
SHORT_PASSES = (8, 11, 16, 18, 19, 29, 30, 31, 33, 38)


def make_call(ids_BS: torch.Tensor, *, rank: int = 0, world_size: int = 1, step: int = 0, **more: Any) -> CapturedCall:
    """Make a training pass of these token ids, and of no other tensor. A later step is of a later minute."""
    time = (MONDAY + timedelta(minutes=step)).isoformat(timespec="microseconds")
    origin = Origin(source="", rank=rank, world_size=world_size, step=step, time=time)
    return CapturedCall(tensors={"input_ids": ids_BS}, call_facts={}, left_out={}, trains=True, origin=origin, **more)


def write_pass(
    folder: Path,
    *,
    rank: int = 0,
    step: int = 0,
    trains: bool = True,
    num_rows: int = 2,
    length: int = 10,
    num_real: int = 8,
    num_actions: int = 3,
    vocabulary: int | None = None,
) -> Path:
    """Write a pass of rows of `length` tokens: the first `num_real` are real, the last `num_actions` are actions.

    The tokens are token 7, or random ones of a vocabulary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mask_BS = torch.zeros(num_rows, length, dtype=torch.bool)
    mask_BS[:, :num_real] = True
    origin = Origin(
        source="",
        rank=rank,
        world_size=2,
        step=step,
        time=(BEGINNING + timedelta(seconds=step)).isoformat(timespec="microseconds"),
        model_name="tiny",
        versions={"torch": "2.13.0"},
    )
    size, generator = (num_rows, length), torch.Generator().manual_seed(step)
    tensors = {
        "sequences": torch.randint(vocabulary, size, generator=generator) if vocabulary else torch.full(size, 7),
        "attention_mask": mask_BS,
        "action_mask": torch.ones(num_rows, num_actions, dtype=torch.bool),
    }
    return write_call(folder, tensors, {}, trains=trains, origin=origin)


def write_passes(folder: Path, kinds: dict[int, str]) -> dict[int, list[Path]]:
    """Write passes in order by captured rank: t is a training pass, r a rollout pass, as in {0: "ttr", 1: "ttr"}."""
    return {
        rank: [write_pass(folder, rank=rank, step=step, trains=kind == "t") for step, kind in enumerate(passes)]
        for rank, passes in kinds.items()
    }


def write_recordings(folder: Path, kinds: dict[str, str]) -> dict[str, list[Path]]:
    """Write the passes of rank 0 of several recordings, by their ids, one after another: t trains, r is a rollout."""
    paths: dict[str, list[Path]] = {recording: [] for recording in kinds}
    steps = count()
    for recording, passes in kinds.items():
        for kind in passes:
            unmarked = write_pass(folder, step=next(steps), trains=kind == "t")
            call = replace(read_call(unmarked), recording=recording)
            unmarked.unlink()
            paths[recording].append(call.write(folder))
    return paths


def write_end(folder: Path, recording: str, **values: Any) -> None:
    """Write how rank 0 of a recording ended."""
    end: dict[str, Any] = {"rank": 0, "world_size": 1, "num_passes": 1, "num_steps": 1, "place": "", **values}
    time = BEGINNING.isoformat()
    write_end_record(folder, EndRecord(**end, opened=time, time=time, recording=recording), stamp=recording)


def write_config(folder: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 1000}
    write_actor_config(folder, config, "tiny")


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def copy_short_inputs(folder: Path, number: int, *, min_tokens: int = 1, of_each_rank: bool = False) -> Path:
    """Make `folder` of the shortest training passes of the sample with `min_tokens` real tokens, and its config.

    They are `number` of all of them, or of each rank's.

    The sample's first passes have ten times as many tokens, and a replay of them takes ten times as long.
    """
    sample = find_sample_folder()
    batches = {path: read_micro_batch(path) for path in capture_files(sample)}
    sizes = {
        path: batch.sequences_BS.numel()
        for path, batch in batches.items()
        if batch.trains and batch.attention_mask_BS.sum() >= min_tokens
    }
    ordered = sorted(sizes, key=sizes.__getitem__)
    if of_each_rank:
        rank_of = {path: batches[path].origin.rank for path in ordered}
        each = [[path for path in ordered if rank_of[path] == rank] for rank in set(rank_of.values())]
        return copy_captures(folder, [path for paths in each for path in paths[:number]])
    return copy_captures(folder, ordered[:number])


def copy_captures(folder: Path, captures: Sequence[Path]) -> Path:
    """Make `folder` of captures of the sample, and its config."""
    folder.mkdir(parents=True)
    for path in [*captures, find_sample_folder() / "actor.json"]:
        shutil.copy(path, folder)
    return folder
