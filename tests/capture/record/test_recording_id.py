"""The id of a recording: the same on all ranks of a job, another one in each recording."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from capture.record import recording_id
from capture.record.recording_id import choose_recording_id

FOLDER = Path("inputs/my-run")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> torch.distributed.HashStore:
    """The store of a process group, as all ranks see it."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(recording_id, "is_in_process_group", lambda: True)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    return store


def choose_on_ranks(monkeypatch: pytest.MonkeyPatch, *opened: str, already: int = 0) -> list[str]:
    """The ids that ranks choose one after the other, each in a process of its own."""
    ids = []
    for rank, time in enumerate(opened):
        monkeypatch.setattr(recording_id, "_num_agreed", Counter({FOLDER.name: already}))
        ids.append(choose_recording_id(time, FOLDER, rank=rank, world_size=len(opened)))
    return ids


def test_all_ranks_have_the_id_that_the_first_one_offers(
    monkeypatch: pytest.MonkeyPatch, store: torch.distributed.HashStore
) -> None:
    assert choose_on_ranks(monkeypatch, "10:00:01", "10:00:00", "10:00:02") == ["10:00:01"] * 3


def test_the_next_recording_into_a_folder_and_a_job_that_is_started_again_have_other_ids(
    monkeypatch: pytest.MonkeyPatch, store: torch.distributed.HashStore
) -> None:
    first = choose_on_ranks(monkeypatch, "10:00:01", "10:00:02")
    assert choose_on_ranks(monkeypatch, "10:30:01", "10:30:02", already=1) == ["10:30:01"] * 2
    other_store = torch.distributed.HashStore()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: other_store)
    assert choose_on_ranks(monkeypatch, "11:00:01", "11:00:02") == ["11:00:01"] * 2 != first


def test_ranks_that_cannot_agree_say_so_in_their_ids(
    monkeypatch: pytest.MonkeyPatch, store: torch.distributed.HashStore
) -> None:
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: None)
    said = ["10:00:01 of rank 0", "10:00:02 of rank 1"]
    assert choose_on_ranks(monkeypatch, "10:00:01", "10:00:02") == said
    monkeypatch.setattr(recording_id, "is_in_process_group", lambda: False)
    assert choose_on_ranks(monkeypatch, "10:00:01", "10:00:02") == said
    assert choose_on_ranks(monkeypatch, "10:00:01") == ["10:00:01"]
