"""The system is told what of a file of weights is needed next, each part once."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actor_init.weights import FolderWeights, ReadAhead, find_tensor_offsets

TENSORS = {f"layers.{number}.weight": torch.arange(256.0) + number for number in range(8)}
TWO_TENSORS = 2048


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the system is asked to read: begin and end."""
    requests: list[tuple[int, int]] = []

    def note_request(descriptor: int, begin: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        requests.append((begin, begin + length))

    monkeypatch.setattr(os, "posix_fadvise", note_request)
    return requests


def test_places_are_those_of_the_values(path: Path) -> None:
    offsets, content = find_tensor_offsets(path), path.read_bytes()
    assert offsets.keys() == TENSORS.keys()
    for name, (begin, end) in offsets.items():
        assert content[begin:end] == TENSORS[name].numpy().tobytes()


def test_in_the_files_order_each_byte_is_asked_for_once_and_before_it_is_needed(
    path: Path, requests: list[tuple[int, int]]
) -> None:
    ahead, offsets = ReadAhead(num_bytes=TWO_TENSORS), find_tensor_offsets(path)
    for name, (begin, end) in sorted(offsets.items(), key=lambda name_and_offsets: name_and_offsets[1]):
        ahead.request(path, name)
        assert requests[0][0] <= begin
        assert requests[-1][1] >= end + 1024
    assert all(first[1] == second[0] for first, second in pairwise(requests))
    assert len(requests) < len(offsets)


def test_a_tensor_elsewhere_is_asked_for_too(path: Path, requests: list[tuple[int, int]]) -> None:
    ahead, offsets = ReadAhead(num_bytes=TWO_TENSORS), find_tensor_offsets(path)
    for name in ("layers.6.weight", "layers.1.weight"):
        ahead.request(path, name)
        assert requests[-1] == (offsets[name][0], offsets[name][1] + TWO_TENSORS)


def test_a_folder_is_read_ahead_as_parameters_are_filled_and_not_for_a_sample(
    path: Path, requests: list[tuple[int, int]]
) -> None:
    weights = FolderWeights.open(path.parent, None)
    weights.sample("layers.3.weight", (256,), 5, 2)
    assert requests == []
    parameter = torch.empty(256)
    weights.fill("layers.3.weight", parameter)
    assert torch.equal(parameter, TENSORS["layers.3.weight"])
    assert len(requests) == 1
