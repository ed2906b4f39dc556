"""Capture file format 1: what a file holds, writing one and reading it.

A file is two pickles, one after the other, that name no class (protocol 5):

    {"format": 1, "num_bytes": ..., "crc32": ...}    of the second pickle
    {"tensors": {name: {dtype, shape, encoding, data, crc32}}, "call_facts": {name: value},
     "left_out": {name: type}, "trains": bool, "origin": {rank, world_size, step, time, model_name, versions}}

The second may also have what it takes to do the pass again (`capture/record/rng_and_outputs.py`): "outputs": {name: value},
"random": {generator: {name: value}}, "environment": {name: text}, "weights": samples of them, as JSON
(`capture/record/parameter_sampler.py`), "optimizer_step": the number of the optimizer step that the pass went into, and "step": in
the last pass before it what that step was given, as JSON (`capture/file_format/optimizer_step.py`).

Arguments keep the names that the model's forward gave them. Beside the files, `actor.json` holds the model's config.
Both are written under a temporary name, fsynced and renamed, with mode 0600: captured tokens are user data.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from capture.file_format.atomic_write import read_bytes, write_atomically
from capture.file_format.encode import FORMAT, encode_call
from capture.file_format.micro_batch import (
    CaptureError,
    MicroBatch,
    Origin,
    check_call,
    micro_batch_from_call,
)
from capture.file_format.openrlhf_dump import read_legacy
from capture.file_format.optimizer_step import OptimizerStep
from capture.file_format.safe_unpickler import NamesAClassError, load_plain
from capture.file_format.tensor_codec import MAX_TENSOR_BYTES, decode_tensors
from capture.file_format.validate import checked_body
from capture.record.parameter_sampler import Fingerprint

MAX_FILE_BYTES = MAX_TENSOR_BYTES + 16 * 2**20


def write_call(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    call_facts: Mapping[str, Any],
    *,
    trains: bool,
    origin: Origin,
    left_out: Mapping[str, str] | None = None,
) -> Path:
    """One forward's arguments as a new file `actor_inputs_rank<rank>_<time>_<step>.pkl`. Returns its path.

    tensors and call_facts by the names of the forward's arguments, tensors on the CPU. `origin.source` is not written:
    it is the file's name. What `origin` does not say, time apart, is written as None.

    Raises CaptureError for a call that `read_call` would refuse, TypeError for a call fact that is not plain data, and
    OSError; then there is no file.
    """
    call = Call(tensors=tensors, call_facts=call_facts, left_out=left_out or {}, trains=trains, origin=origin)
    return call.write(folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One forward's arguments, by the names that the model gave them. `format` is None for an older dump.

    outputs      what came of it: `loss` (the forward's), `noted_loss` (the loop's), `grad_norm`, `token_log_probs` of
                 `sampled_tokens`, and of longer ones `<name>_row_sums` and `<name>_crc32`, for `log_probs` and
                 `output` also `<name>_values`, flat, of `<name>_shape`; `logits_dtype`, `loss_dtype`
    random       the generators' states before it, for `restore_random_states`
    environment  settings that change numbers
    weights      samples of those that it was done with
    optimizer_step  steps that the job's optimizer had taken before it, counted by this rank's recorder
    step         what the optimizer was given after it, if it was the last pass before a step
    """

    format: int | None = FORMAT
    tensors: Mapping[str, Tensor]
    call_facts: Mapping[str, Any]
    left_out: Mapping[str, str]
    trains: bool
    origin: Origin
    outputs: Mapping[str, Any] = field(default_factory=dict)
    random: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    weights: Fingerprint | None = None
    optimizer_step: int | None = None
    step: OptimizerStep | None = None

    def micro_batch(self) -> MicroBatch:
        return micro_batch_from_call(
            self.tensors, self.call_facts, trains=self.trains, origin=self.origin, left_out=self.left_out
        )

    def write(self, folder: str | Path) -> Path:
        """All of it as a new file of format 1; returns its path. Raises what `write_call` does."""
        encoded = encode_call(
            self.tensors,
            self.call_facts,
            trains=self.trains,
            origin=self.origin,
            left_out=self.left_out,
            random=self.random,
            environment=self.environment,
            weights=None if self.weights is None else self.weights.text(),
            optimizer_step=self.optimizer_step,
        )
        if self.outputs:
            encoded.body["outputs"] = dict(self.outputs)
        if self.step is not None:
            encoded.body["step"] = self.step.text()
        path = encoded.new_path(Path(folder))
        write_atomically(path, *encoded.parts())
        return path


def read_micro_batch(path: str | Path) -> MicroBatch:
    """A file of format 1 or a dump of OpenRLHF's actor; CPU tensors, dtypes as captured.

    Nothing in the file can run code. Raises CaptureError, and nothing else, for a file that is missing, truncated,
    damaged, hostile, foreign or of a later format.
    """
    read = _read(path)
    return read if isinstance(read, MicroBatch) else read.micro_batch()


def read_call(path: str | Path) -> Call:
    """The same as it was called, also with embeddings in the place of token ids.

    Raises what `read_micro_batch` does, also where the call is neither.
    """
    read = _read(path)
    if isinstance(read, Call):
        check_call(read.tensors, read.call_facts, trains=read.trains, origin=read.origin)
        return read
    named = {
        "sequences": read.sequences_BS,
        "attention_mask": read.attention_mask_BS,
        "action_mask": read.action_mask_BA,
        "labels": read.labels_BS,
    }
    return Call(
        format=None,
        tensors={name: tensor for name, tensor in named.items() if tensor is not None} | dict(read.extra_tensors),
        call_facts=read.call_facts,
        left_out=read.left_out,
        trains=read.trains,
        origin=read.origin,
    )


def _read(path: str | Path) -> Call | MicroBatch:
    """A call of format 1, or the micro-batch of a dump."""
    source = Path(path).name
    data = read_bytes(Path(path), MAX_FILE_BYTES)
    try:
        head, end = load_plain(data, source=source)
    except NamesAClassError:
        return read_legacy(data, source)
    body = checked_body(head, data, end, source)
    del data
    return Call(
        tensors=decode_tensors(body["tensors"], source),
        call_facts=body["call_facts"],
        left_out=body["left_out"],
        trains=body["trains"],
        origin=Origin(source=source, **body["origin"]),
        outputs=body.get("outputs", {}),
        random=body.get("random", {}),
        environment=body.get("environment", {}),
        weights=Fingerprint.of_text(body["weights"], source) if "weights" in body else None,
        optimizer_step=body.get("optimizer_step"),
        step=OptimizerStep.of_text(body["step"], source) if "step" in body else None,
    )


def capture_files(folder: str | Path) -> list[Path]:
    """The folder's captured files by rank, in recorded order within a rank. Raises CaptureError without a folder."""
    if not Path(folder).is_dir():
        raise CaptureError(f"{folder}: no such folder. Give a folder that a recording was written to")

    found = (path for path in Path(folder).glob("*.pkl") if not path.name.startswith("."))
    return sorted(found, key=lambda path: (rank_in_name(path), path.name))


def rank_in_name(path: Path) -> int:
    """The rank that a capture's file name says; -1 where it says none."""
    rank = re.search(r"rank(\d{1,9})", path.name)
    return int(rank[1]) if rank else -1
