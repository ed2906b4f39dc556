"""What a rank may take of the disk: the limits are its own, for all its recordings, and the oldest goes first."""

from pathlib import Path
from typing import Any

import pytest
import torch

from capture.file_format.capture_file import EncodedCall
from capture.file_format.listing import capture_files, list_segment_files
from capture.file_format.manifest import MAX_ENTRIES, check_folder, read_manifest
from capture.record.rank_writer import MANIFEST_BYTES_PER_FILE, RankFiles, RankWriter, open_rank_writer
from capture.record.retention import check_retention
from tests.helpers.made_captures import make_call

IDS_BS = torch.arange(1000, 1064)[None]


def encode(step: int, *, rank: int = 1, world_size: int = 2, ids_BS: torch.Tensor = IDS_BS) -> EncodedCall:
    """Encode a pass. A later step is of a later time; all are about as large."""
    return make_call(ids_BS, rank=rank, world_size=world_size, step=step).encode()


# A checksum takes five bytes or seven.
SIZES = [sum(map(len, encode(step).pickle_parts())) for step in range(100, 136)]
SIZE, MOST, LEAST = max(SIZES), max(SIZES) + MANIFEST_BYTES_PER_FILE, min(SIZES) + MANIFEST_BYTES_PER_FILE


def open_writer(
    folder: Path, *, rank: int = 1, world_size: int = 2, stamp: str = "10:00", **settings: Any
) -> RankWriter:
    return open_rank_writer(folder, check_retention(**settings), rank=rank, world_size=world_size, stamp=stamp)


def write(folder: Path, steps: range, *, rank: int = 1, world_size: int = 2, **settings: Any) -> tuple[RankWriter, int]:
    """Write passes, and return the writer and how many there was room for."""
    writer = open_writer(folder, rank=rank, world_size=world_size, **settings)
    written = [writer.write(encode(step, rank=rank, world_size=world_size)) for step in steps]
    writer.commit()
    writer.close()
    return writer, sum(path is not None for path in written)


def list_steps(folder: Path) -> list[int]:
    return [int(path.stem.rpartition("_")[2]) for path in capture_files(folder)]


@pytest.mark.parametrize(
    ("settings", "num_fitting"),
    [
        ({"max_files": 3}, 3),
        ({"max_bytes": 3 * MOST}, 3),
        ({"max_bytes": 3 * LEAST - 1}, 2),
        ({"max_bytes": 3 * MOST, "max_files": 2}, 2),
        ({"max_bytes": 2 * MOST, "max_files": 3}, 2),
        ({}, 6),
    ],
)
@pytest.mark.parametrize("keep", ["first", "last"])
def test_a_limit_is_reached_and_not_passed_and_each_limit_holds(
    settings: dict[str, Any], num_fitting: int, keep: str, tmp_path: Path
) -> None:
    if not settings:
        keep = "first"
    writer, num_written = write(tmp_path, range(100, 106), **settings, keep=keep)
    assert len(capture_files(tmp_path)) == num_fitting
    steps = list(range(100, 106))
    assert list_steps(tmp_path) == (steps[:num_fitting] if keep == "first" else steps[-num_fitting:])
    assert (num_written, writer.num_deleted) == ((num_fitting, 0) if keep == "first" else (6, 6 - num_fitting))
    checked = check_folder(tmp_path)
    assert (checked.is_whole, checked.uncommitted) == (True, [])


@pytest.mark.parametrize("num_fitting", [1, 3])
@pytest.mark.parametrize("num_lacking", [0, 1])
def test_a_limit_in_bytes_may_be_used_to_its_last_byte(num_fitting: int, num_lacking: int, tmp_path: Path) -> None:
    limit = sum(SIZES[:num_fitting]) + num_fitting * MANIFEST_BYTES_PER_FILE - num_lacking
    _, num_written = write(tmp_path, range(100, 100 + num_fitting), max_bytes=limit)
    assert num_written == num_fitting - num_lacking


@pytest.mark.parametrize("settings", [{"max_files": 4}, {"max_bytes": 4 * MOST}])
def test_passes_of_an_earlier_recording_count_and_are_the_oldest(settings: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, range(100, 103))
    first, num_written = write(tmp_path, range(110, 113), **settings, stamp="11:00")
    assert (first.had_passes, first.num_deleted, num_written) == (True, 0, 1)
    assert list_steps(tmp_path) == [100, 101, 102, 110]
    # Those that the earlier recordings lose are none of the latest one's.
    last, num_written = write(tmp_path, range(120, 123), **settings, stamp="12:00", keep="last")
    assert (num_written, last.num_deleted) == (3, 0)
    assert list_steps(tmp_path) == [110, 120, 121, 122]
    last, num_written = write(tmp_path, range(130, 136), **settings, stamp="13:00", keep="last")
    assert (num_written, last.num_deleted) == (6, 2)
    assert list_steps(tmp_path) == [132, 133, 134, 135]
    checked = check_folder(tmp_path)
    # A manifest whose files are all gone is gone too.
    assert (checked.is_whole, checked.uncommitted, checked.num_manifests) == (True, [], 1)


@pytest.mark.parametrize("keep", ["first", "last"])
@pytest.mark.parametrize("segment", [None, 10 * SIZE])
def test_other_ranks_passes_take_no_room(keep: str, segment: int | None, tmp_path: Path) -> None:
    for rank in (0, 10, 11):
        write(tmp_path, range(100, 103), rank=rank)
        write(tmp_path, range(100, 103), rank=rank, segment=10 * SIZE)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    writer, num_written = write(tmp_path, range(100, 102), max_bytes=30 * SIZE, keep=keep, segment=segment)
    assert (writer.had_passes, writer.num_deleted, num_written) == (False, 0, 2)
    assert set(before) <= set(tmp_path.rglob("*"))


def test_passes_of_a_rank_count_wherever_an_earlier_recording_put_them(tmp_path: Path) -> None:
    """The job ran with two ranks, then with many, which have folders of their own, and then with two again."""
    write(tmp_path, range(100, 102))
    many, num_written = write(tmp_path, range(110, 114), world_size=64, max_files=3)
    assert (many.had_passes, num_written, many.rank_folder) == (True, 1, tmp_path / "rank1")
    few, num_written = write(tmp_path, range(120, 122), max_files=4, keep="last")
    assert (few.had_passes, num_written, few.rank_folder) == (True, 2, tmp_path)
    assert sorted(list_steps(tmp_path)) == [101, 110, 120, 121]


@pytest.mark.parametrize("keep", ["first", "last"])
def test_a_pass_that_no_limit_has_room_for_deletes_no_other(keep: str, tmp_path: Path) -> None:
    writer = open_writer(tmp_path, max_bytes=2 * MOST, keep=keep)
    assert writer.write(encode(100)) is not None
    assert writer.write(encode(101, ids_BS=torch.randint(2**31, (1, 4096)))) is None
    assert writer.write(encode(102)) is not None
    assert (list_steps(tmp_path), writer.num_deleted) == ([100, 102], 0)


def test_a_full_folder_loses_its_oldest_segment_as_a_whole_and_never_the_one_that_is_written(tmp_path: Path) -> None:
    write(tmp_path, range(100, 102), segment=5 * SIZE)
    [earlier] = list_segment_files(tmp_path)

    def count_bytes() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*") if path.suffix in (".seg", ".idx"))

    limit = 10 * SIZE
    writer = open_writer(tmp_path, stamp="11:00", segment=2 * SIZE + 900, max_bytes=limit, keep="last")
    num_deleted: list[int] = []
    for step in range(110, 122):
        assert writer.write(encode(step)) is not None
        num_deleted.append(writer.num_deleted)
        assert count_bytes() <= limit
    writer.commit()
    writer.close()
    assert not earlier.exists()
    steps = list_steps(tmp_path)
    assert steps == list(range(steps[0], 122))
    # The two passes of the earlier recording are not counted.
    assert num_deleted[-1] == steps[0] - 110 > 0
    assert num_deleted == sorted(num_deleted)
    alone = open_writer(tmp_path / "alone", segment=5 * SIZE, max_bytes=3 * SIZE)
    (tmp_path / "alone").mkdir()
    written = [alone.write(encode(step)) is not None for step in range(4)]
    alone.close()
    assert written == [True] * sum(written) + [False] * (4 - sum(written))
    assert 0 < sum(written) < 4


def test_manifests_are_written_while_a_recording_goes_on_and_each_has_a_limit(tmp_path: Path) -> None:
    assert MAX_ENTRIES == 1024
    writer = RankFiles(tmp_path, tmp_path, check_retention(), rank=1, stamp="10:00", max_entries=20)
    encoded = encode(100)
    num_listed: list[int] = []
    for _ in range(45):
        writer.write(encoded)
        num_listed.append(sum(len(read_manifest(path)) for path in tmp_path.glob("manifest_*.json")))
    # At first after 16 files, so that a killed job loses little, and never more than a file behind where one is full.
    assert [num_listed[number] for number in (14, 15, 18, 19)] == [0, 16, 16, 20]
    assert [num_listed[number] for number in (34, 35, 39)] == [20, 36, 40]
    writer.commit()
    assert sorted(len(read_manifest(path)) for path in tmp_path.glob("manifest_*.json")) == [5, 20, 20]
    checked = check_folder(tmp_path)
    assert (checked.is_whole, checked.uncommitted, len(checked.good)) == (True, [], 45)


def test_what_takes_the_place_of_a_listed_pass_is_listed_by_the_next_commit(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, keep="last", max_files=3)
    for steps in (range(100, 103), range(103, 104), range(104, 106)):
        for step in steps:
            writer.write(encode(step))
        writer.commit()
        checked = check_folder(tmp_path)
        assert (checked.is_whole, checked.uncommitted, len(checked.good)) == (True, [], 3)
    assert list_steps(tmp_path) == [103, 104, 105]
