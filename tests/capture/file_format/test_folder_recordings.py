"""The recordings in one folder, told apart by the ids in the heads of their captures."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from capture.file_format.capture_file import CapturedCall
from capture.file_format.folder_recordings import FolderRecording, list_recordings
from capture.file_format.micro_batch import Origin
from capture.file_format.segment import Segment, index_path_of
from capture.folder_tools.convert import FolderWriter

MONDAY = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)


def make_call(recording: str | None, *, rank: int = 0, minute: int = 0, number: int = 0) -> CapturedCall:
    time = (MONDAY + timedelta(minutes=minute)).isoformat(timespec="microseconds")
    return CapturedCall(
        tensors={"input_ids": torch.arange(4)[None], "attention_mask": torch.ones(1, 4, dtype=torch.int64)},
        call_facts={},
        left_out={},
        trains=True,
        origin=Origin(source="", rank=rank, world_size=2, step=number, time=time, model_name="tiny", versions={}),
        recording=recording,
    )


def write(folder: Path, recording: str | None, **values: int) -> Path:
    return make_call(recording, **values).write(folder)


def summarize(recordings: list[FolderRecording]) -> list[tuple[int, str | None, list[int], int]]:
    return [(recording.number, recording.began, recording.ranks, recording.num_passes) for recording in recordings]


@pytest.mark.parametrize("in_segments", [False, True])
def test_two_runs_of_a_job_are_two_recordings_in_the_order_in_which_they_began(
    tmp_path: Path, in_segments: bool
) -> None:
    with FolderWriter(tmp_path, segment=2**20 if in_segments else None) as writer:
        for rank in (0, 1):
            for minute, (recording, number) in enumerate([("10:00", 0), ("10:00", 1), ("09:00", 0)]):
                writer.write(make_call(recording, rank=rank, minute=minute, number=number))
    assert summarize(list_recordings(tmp_path)) == [(1, "10:00", [0, 1], 4), (2, "09:00", [0, 1], 2)]


def test_captures_without_an_id_are_one_recording(tmp_path: Path) -> None:
    for rank in (0, 1):
        for minute in range(3):
            write(tmp_path, None, rank=rank, minute=minute)
    assert summarize(list_recordings(tmp_path)) == [(1, None, [0, 1], 6)]
    write(tmp_path, "10:00", minute=5)
    assert summarize(list_recordings(tmp_path)) == [(1, None, [0, 1], 6), (2, "10:00", [0], 1)]


def test_ranks_that_could_not_agree_on_an_id_are_one_recording_until_one_begins_again(tmp_path: Path) -> None:
    for minute in (0, 10):
        for rank in (0, 1):
            write(tmp_path, f"{minute} of rank {rank}", rank=rank, minute=minute + rank)
    recordings = list_recordings(tmp_path)
    assert summarize(recordings) == [(1, "0", [0, 1], 2), (2, "10", [0, 1], 2)]
    assert recordings[1].ids == {"10 of rank 0", "10 of rank 1"}
    assert [capture.rank for capture in recordings[0].list_captures()] == [0, 1]


def test_recordings_of_other_ranks_are_not_put_together_where_they_had_an_id_in_common(tmp_path: Path) -> None:
    write(tmp_path, "10:00", rank=0, minute=0)
    write(tmp_path, "11:00", rank=1, minute=5)
    assert summarize(list_recordings(tmp_path)) == [(1, "10:00", [0], 1), (2, "11:00", [1], 1)]


def test_the_files_of_ranks_that_could_not_agree_come_by_rank_whichever_began_first(tmp_path: Path) -> None:
    for minute, rank in enumerate((10, 2, 0)):
        write(tmp_path, f"0{minute} of rank {rank}", rank=rank, minute=minute)
    [recording] = list_recordings(tmp_path)
    assert (recording.ranks, recording.began) == ([0, 2, 10], "00")
    assert [capture.rank for capture in recording.list_captures()] == [0, 2, 10]


@pytest.mark.parametrize("ids", [("10:00 of rank 0", "11:00"), ("10:00", "11:00 of rank 1")])
def test_an_id_of_one_ranks_own_is_not_put_together_with_one_that_ranks_had_in_common(
    tmp_path: Path, ids: tuple[str, str]
) -> None:
    for rank, recording in enumerate(ids):
        write(tmp_path, recording, rank=rank, minute=rank)
    assert summarize(list_recordings(tmp_path)) == [(1, "10:00", [0], 1), (2, "11:00", [1], 1)]


def test_a_recording_began_with_its_first_capture_on_any_rank(tmp_path: Path) -> None:
    """Rank 1 was slow: its captures of the first recording are later than the second recording's."""
    for recording, rank, minute in (("b", 0, 0), ("a", 0, 10), ("b", 1, 50), ("a", 1, 60)):
        write(tmp_path, recording, rank=rank, minute=minute)
    assert summarize(list_recordings(tmp_path)) == [(1, "b", [0, 1], 2), (2, "a", [0, 1], 2)]


def test_a_recording_that_has_written_no_pass_yet_is_none(tmp_path: Path) -> None:
    with FolderWriter(tmp_path, segment=2**20) as writer:
        writer.write(make_call("10:00", rank=0))
        writer.write(make_call("10:00", rank=1))
    [segment] = (tmp_path / "rank1").glob("*.seg")
    whole = Segment.open(segment)
    index_path_of(segment).unlink()
    segment.write_bytes(replace(whole.head, recording="11:00").pack())
    assert Segment.open(segment).num_passes == 0
    assert summarize(list_recordings(tmp_path)) == [(1, "10:00", [0], 1)]


def test_a_recording_says_when_it_began_if_its_captures_do(tmp_path: Path) -> None:
    write(tmp_path, None, minute=0)
    write(tmp_path, "2026-03-02T10:00:00+00:00 of rank 0", minute=1)
    assert [recording.describe_begin() for recording in list_recordings(tmp_path)] == [
        "begun at a time that is not known",
        "begun 2026-03-02T10:00:00+00:00",
    ]


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_file_belongs_to_the_recording_of_its_neighbour(tmp_path: Path, damaged: int) -> None:
    paths = [write(tmp_path, "10:00", minute=minute) for minute in range(3)]
    paths[damaged].write_bytes(b"")
    assert summarize(list_recordings(tmp_path)) == [(1, "10:00", [0], 3)]


def test_of_a_rank_with_one_recording_two_files_are_opened(tmp_path: Path) -> None:
    """What lies between two files of one recording is of that recording, whatever is in it."""
    for minute in range(9):
        write(tmp_path, "10:00" if minute in (0, 8) else "11:00", minute=minute)
    assert summarize(list_recordings(tmp_path)) == [(1, "10:00", [0], 9)]
