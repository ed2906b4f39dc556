"""The id of a recording: the same on all ranks of a job, another one in each recording."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from capture.record.recording_id import choose_recording_id

FOLDER = Path("inputs/my-run")


def choose_on_ranks(*opened: str, store: Any, already: int = 0) -> list[str]:
    """The ids that ranks choose one after the other, each in a process of its own."""
    return [
        choose_recording_id(
            time,
            FOLDER,
            rank=rank,
            world_size=len(opened),
            store=store,
            num_agreed=Counter({FOLDER.name: already}),
        )
        for rank, time in enumerate(opened)
    ]


def test_all_ranks_have_the_id_that_the_first_one_offers() -> None:
    ids = choose_on_ranks("10:00:01", "10:00:00", "10:00:02", store=dist.HashStore())
    assert ids == ["10:00:01"] * 3


@pytest.mark.usefixtures("world")
def test_the_store_is_that_of_the_process_group(tmp_path: Path) -> None:
    ids = [
        choose_recording_id(time, tmp_path, rank=rank, world_size=2, num_agreed=Counter())
        for rank, time in enumerate(("10:00:01", "10:00:02"))
    ]
    assert ids == ["10:00:01"] * 2


@pytest.mark.usefixtures("no_process_group")
def test_ranks_without_a_process_group_have_ids_of_their_own() -> None:
    assert choose_on_ranks("10:00:01", "10:00:02", store=None) == ["10:00:01 of rank 0", "10:00:02 of rank 1"]


def test_the_next_recording_into_a_folder_and_a_job_that_is_started_again_have_other_ids() -> None:
    store = dist.HashStore()
    first = choose_on_ranks("10:00:01", "10:00:02", store=store)
    assert choose_on_ranks("10:30:01", "10:30:02", store=store, already=1) == ["10:30:01"] * 2
    assert choose_on_ranks("11:00:01", "11:00:02", store=dist.HashStore()) == ["11:00:01"] * 2 != first


def test_a_process_counts_its_recordings_into_a_folder() -> None:
    store, num_agreed = dist.HashStore(), Counter[str]()
    ids = [
        choose_recording_id(time, FOLDER, rank=0, world_size=2, store=store, num_agreed=num_agreed)
        for time in ("10:00:01", "10:30:01")
    ]
    assert (ids, num_agreed) == (["10:00:01", "10:30:01"], {FOLDER.name: 2})


def test_ranks_that_cannot_agree_say_so_in_their_ids() -> None:
    said = ["10:00:01 of rank 0", "10:00:02 of rank 1"]
    # A store of another kind has no such question.
    assert choose_on_ranks("10:00:01", "10:00:02", store=object()) == said
    assert choose_on_ranks("10:00:01", store=None) == ["10:00:01"]
