"""Ranks come in the order of their numbers wherever a folder's files are listed: rank 10 is not before rank 2."""

import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from capture.file_format.capture_file import CapturedCall
from capture.file_format.end_record import EndRecord, read_end_records, write_end_record
from capture.file_format.folder_layout import find_ranks, list_capture_folders
from capture.file_format.folder_recordings import list_recordings
from capture.file_format.listing import list_captures, list_segment_files, list_single_pass_files
from capture.file_format.micro_batch import Origin
from capture.file_format.model_facts import ModelFacts, read_model_facts, write_model_facts
from capture.folder_tools.convert import FolderWriter
from capture.folder_tools.pack import pack_folder

# Later ranks wrote earlier, so neither names nor times have the order that is expected.
RANKS_AS_WRITTEN = (10, 2, 0)
IN_ORDER = [0, 2, 10]
MONDAY = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)


@pytest.fixture(params=["files", "folders", "segments"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A recording of three ranks: in one folder, in a folder for each of many ranks, or in segments."""
    torch.manual_seed(0)
    path = tmp_path / "run"
    path.mkdir()
    with FolderWriter(path, segment=2**20 if request.param == "segments" else None) as writer:
        for minute, rank in enumerate(RANKS_AS_WRITTEN):
            origin = Origin(
                source="",
                rank=rank,
                world_size=64 if request.param == "folders" else 12,
                step=0,
                time=(MONDAY + timedelta(minutes=minute)).isoformat(timespec="microseconds"),
            )
            ids_BS = torch.randint(2**31, (1, 2048))
            call = CapturedCall(
                tensors={"input_ids": ids_BS},
                call_facts={},
                left_out={},
                trains=True,
                origin=origin,
                recording=MONDAY.isoformat(),
            )
            writer.write(call)
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
