"""Compute digests of inputs and weights, so that a comparison can tell whether two runs used the same ones."""

import hashlib
from pathlib import Path

from torch import Tensor

from actor_init.custom.checkpoint import CheckpointWeights
from actor_init.weights import FolderWeights, Weights
from capture.file_format.micro_batch import MicroBatch
from capture.file_format.tensor_codec import bytes_of
from replay.runner.checkpoint import StateWeights

BLOCK_BYTES = 2**12
BLOCKS_PER_FILE = 64  # at least
MOST_BYTES_BETWEEN = 2**22


def digest_of_inputs(batch: MicroBatch) -> str:
    """Return a digest of every tensor in a capture, independent of its file name."""
    named: dict[str, Tensor | None] = {
        "sequences": batch.sequences_BS,
        "attention_mask": batch.attention_mask_BS,
        "action_mask": batch.action_mask_BA,
        "labels": batch.labels_BS,
        **dict(sorted(batch.extra_tensors.items())),
    }
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in named.items():
        if tensor is not None:
            flat = tensor.contiguous().reshape(-1)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(bytes_of(flat))
    return digest.hexdigest()


def digest_of_weights(weights: Weights) -> str:
    """Return the name of random weights, or a digest of a model folder's files, independent of where it lies."""
    if isinstance(weights, FolderWeights):
        return _digest_of_files(sorted(weights.folder.glob("*.safetensors")))
    if isinstance(weights, CheckpointWeights):
        return _digest_of_files(list(weights.files))
    if isinstance(weights, StateWeights):
        return _digest_of_files(sorted(path for path in weights.folder.rglob("*") if path.is_file()))
    return weights.describe()


def _digest_of_files(paths: list[Path]) -> str:
    """Digest the names, the sizes and evenly spaced blocks of files.

    Training changes every tensor, and reading whole files would take minutes.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in range(0, size, min(max(size // BLOCKS_PER_FILE, BLOCK_BYTES), MOST_BYTES_BETWEEN)):
                file.seek(start)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
