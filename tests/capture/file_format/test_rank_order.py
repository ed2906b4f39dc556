"""Ranks come in the order of their numbers wherever a folder's files are listed: rank 10 is not before rank 2."""

import zipfile
from pathlib import Path

import pytest
import torch

from capture.black_box.incidents import make_incident, write_incidents
from capture.file_format.actor_config import read_actor_config, write_actor_config
from capture.file_format.capture_file import CapturedCall
from capture.file_format.end_record import EndRecord, read_end_records, write_end_record
from capture.file_format.folder_layout import find_ranks, find_recording_folder, list_capture_folders, strip_rank_folder
from capture.file_format.folder_recordings import list_recordings
from capture.file_format.listing import list_captures, list_segment_files, list_single_pass_files
from capture.file_format.manifest import FolderCheck
from capture.file_format.model_facts import ModelFacts, read_model_facts, write_model_facts
from capture.folder_tools.convert import FolderWriter
from capture.folder_tools.pack import pack_folder
from tests.helpers.made_captures import MONDAY, make_call

# Later ranks wrote earlier, so neither names nor times have the order that is expected.
RANKS_AS_WRITTEN = (10, 2, 0)
IN_ORDER = [0, 2, 10]


def make_call_of_rank(rank: int, minute: int, *, world_size: int) -> CapturedCall:
    ids_BS = torch.randint(2**31, (1, 2048))
    return make_call(ids_BS, rank=rank, world_size=world_size, step=minute, recording=MONDAY.isoformat())


@pytest.fixture(params=["files", "folders", "segments"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A recording of three ranks: in one folder, in a folder for each of many ranks, or in segments."""
    torch.manual_seed(0)
    path = tmp_path / "run"
    path.mkdir()
    with FolderWriter(path, segment=2**20 if request.param == "segments" else None) as writer:
        for minute, rank in enumerate(RANKS_AS_WRITTEN):
            writer.write(make_call_of_rank(rank, minute, world_size=64 if request.param == "folders" else 12))
    return path


def test_captures_and_recordings_are_listed_by_rank(folder: Path) -> None:
    assert [capture.rank for capture in list_captures(folder)] == IN_ORDER
    [recording] = list_recordings(folder)
    assert [capture.rank for capture in recording.list_captures()] == IN_ORDER
    assert (recording.ranks, recording.num_passes) == (IN_ORDER, 3)
    files = [*list_single_pass_files(folder), *list_segment_files(folder)]
    assert [path.name.split("_")[1 if path.suffix == ".seg" else 2] for path in files] == ["rank0", "rank2", "rank10"]
    homes = [path.name for path in list_capture_folders(folder)[1:]]
    assert homes in ([], ["rank0", "rank2", "rank10"])
    assert find_ranks(folder) == set(IN_ORDER)


def test_files_and_segments_of_one_folder_are_listed_together_by_rank_and_time(tmp_path: Path) -> None:
    for segment, minutes in ((None, (1, 4)), (2**20, (2, 3))):
        with FolderWriter(tmp_path, segment=segment) as writer:
            for minute in minutes:
                for rank in (10, 2):
                    writer.write(make_call_of_rank(rank, minute, world_size=12))
    captures = list_captures(tmp_path)
    assert [capture.rank for capture in captures] == [2, 2, 2, 2, 10, 10, 10, 10]
    minutes_in_order = [int(capture.path.name.split("_")[4][2:4]) for capture in captures]
    assert minutes_in_order == 2 * [1, 2, 3, 4]
    [recording] = list_recordings(tmp_path)
    assert [capture.path for capture in recording.list_captures()] == [capture.path for capture in captures]


def test_a_package_that_is_full_has_the_first_ranks(folder: Path, tmp_path: Path) -> None:
    """Token ids drawn at random do not shrink in a zip, so one and a half files leave room for one."""
    [size, *_] = [path.stat().st_size for path in folder.rglob("*") if path.suffix in (".pkl", ".seg")]
    packed = pack_folder(folder, tmp_path / "out.zip", max_bytes=size * 3 // 2 + 6000)
    assert (packed.num_passes, packed.num_left_out) == (1, 2)
    assert packed.left_out is not None
    assert packed.left_out.startswith("actor_inputs_rank2_")
    with zipfile.ZipFile(packed.path) as package:
        names = [name for name in package.namelist() if name.endswith((".pkl", ".seg"))]
    assert len(names) == 1
    assert "_rank0_" in names[0]
    whole = pack_folder(folder, tmp_path / "all.zip", max_bytes=10 * size)
    assert (whole.num_passes, whole.num_left_out, whole.left_out) == (3, 0, None)


def test_a_package_has_what_lies_beside_the_captures_and_no_incident(folder: Path, tmp_path: Path) -> None:
    write_actor_config(folder, {"model_type": "tiny"}, None)
    home = folder / "rank10" if (folder / "rank10").exists() else folder
    facts = ModelFacts(rank=10, recording="10:00", forward=0, trains=True, python="cpython 3.11.7")
    end = EndRecord(rank=10, world_size=12, num_passes=1, num_steps=1, place="after forward", opened="", time="")
    write_model_facts(home, facts, stamp="x")
    write_end_record(home, end, stamp="x")
    write_incidents(home, [make_incident("signal", "SIGTERM", 0)], num_others=0, rank=10, stamp="x")
    (folder / "notes.txt").write_text("mine")
    packed = pack_folder(folder, tmp_path / "out.zip", max_bytes=10**7)
    with zipfile.ZipFile(packed.path) as package:
        package.extractall(tmp_path)
    copy = tmp_path / "out"
    names = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    left_out = {path for path in names if path.name.startswith(("incidents", "notes"))}
    assert len(left_out) == 2
    assert {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()} == names - left_out
    assert all((copy / name).read_bytes() == (folder / name).read_bytes() for name in names - left_out)
    assert (read_end_records(copy), [facts.rank for facts in read_model_facts(copy)]) == ([end], [10])


def test_the_config_of_a_rank_s_folder_is_in_the_folder_above_unless_it_has_its_own(tmp_path: Path) -> None:
    home = tmp_path / "rank3"
    home.mkdir()
    write_actor_config(tmp_path, {"model_type": "above"}, None)
    assert strip_rank_folder(home) == tmp_path
    assert read_actor_config(home) == {"model_type": "above"}
    segment = home / "segment_rank3_x_000001.seg"
    for capture in (home / "actor_inputs_rank3_x.pkl", segment / "actor_inputs_rank3_x.pkl"):
        assert find_recording_folder(capture) == tmp_path
    # Somebody may call a recording's own folder so.
    write_actor_config(home, {"model_type": "own"}, None)
    assert strip_rank_folder(home) == home
    assert read_actor_config(home) == {"model_type": "own"}
    assert strip_rank_folder(tmp_path / "rank3b") == tmp_path / "rank3b"


def test_what_ranks_left_beside_their_captures_is_listed_by_rank(tmp_path: Path) -> None:
    for recording in ("11:00", "10:00"):
        for rank in RANKS_AS_WRITTEN:
            facts = ModelFacts(rank=rank, recording=recording, forward=0, trains=True, python="cpython 3.11.7")
            write_model_facts(tmp_path, facts, stamp=recording.replace(":", "_"))
    assert [(facts.recording, facts.rank) for facts in read_model_facts(tmp_path)] == [
        (recording, rank) for recording in ("10:00", "11:00") for rank in IN_ORDER
    ]
    for rank in RANKS_AS_WRITTEN:
        end = EndRecord(rank=rank, world_size=64, num_passes=1, num_steps=1, place="after forward", opened="", time="")
        write_end_record(tmp_path / f"rank{rank}", end, stamp="10_00")
    assert [end.rank for end in read_end_records(tmp_path)] == IN_ORDER


def test_ranks_are_missed_where_others_are_known() -> None:
    assert FolderCheck(ranks={1}, world_sizes={2, 4}).missing_ranks == [0, 2, 3]
    assert FolderCheck(ranks={0, 1}, world_sizes={2}).missing_ranks == []
    assert FolderCheck(ranks={5}, world_sizes={2}).missing_ranks == [0, 1]
    # Dumps of other projects name no rank.
    assert FolderCheck(ranks=set(), world_sizes={4}).missing_ranks == []
    assert (FolderCheck(ranks={0}).world_size, FolderCheck(ranks={0}).missing_ranks) == (0, [])


@pytest.mark.parametrize("segment", [None, 2**20])
def test_the_bytes_of_captures_alone_are_counted_in_every_folder(segment: int | None, tmp_path: Path) -> None:
    with FolderWriter(tmp_path, segment=segment) as writer:
        for rank in IN_ORDER:
            writer.write(make_call_of_rank(rank, 0, world_size=64))
    captures = [path for path in tmp_path.rglob("*") if path.suffix in (".pkl", ".seg")]
    assert len(captures) == 3
    assert writer.num_bytes == sum(path.stat().st_size for path in captures)
