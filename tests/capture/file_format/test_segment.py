"""Segments: many passes in one file of a rank, read one by one, and what a kill, a bad byte or a full disk leaves."""

import json
import os
import signal
import subprocess
import time
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import CaptureError, capture_files, read_actor_config, read_micro_batch, recording
from capture.black_box.incidents import read_incidents
from capture.cli import main
from capture.file_format.atomic_write import OTHER_HOST_SECONDS
from capture.file_format.capture_file import encode_call, read_call, read_capture_bytes
from capture.file_format.folder_layout import MAX_RANKS_IN_ONE_FOLDER
from capture.file_format.manifest import check_folder, read_manifest
from capture.file_format.micro_batch import Origin
from capture.file_format.segment import Segment, index_path_of
from capture.file_format.segment_record import RECORD_BYTES
from capture.file_format.segment_writer import repair_segments
from capture.record.rank_writer import RankFiles
from capture.record.retention import RetentionSettings, check_retention, parse_num_bytes
from tests.helpers.small_jobs import TinyModel, steps_in
from tests.warm import warm_bin

IDS_BS = torch.tensor([[0, 5, 9, 7], [3, 3, 0, 0]])
SAMPLE = Path(__file__).resolve().parents[3] / "inputs" / "sample"


def record(folder: Path, num_passes: int = 6, segment: int | str | None = "1MB", **settings: Any) -> Any:
    model = TinyModel()
    with recording(model, folder, segment=segment, **settings) as recorder:
        for step in range(num_passes):
            model((IDS_BS + step) % 16)
    return recorder


def list_segments(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.seg"))


@pytest.fixture
def segment_path(tmp_path: Path) -> Path:
    """Return the path of a segment of six passes."""
    record(tmp_path / "run")
    [segment] = list_segments(tmp_path / "run")
    return segment


@pytest.fixture
def as_rank(no_process_group: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    def become(rank: int, world_size: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return become


def test_a_segment_holds_what_files_of_one_pass_hold(tmp_path: Path) -> None:
    """Byte for byte, under the names that the files have."""
    assert main(["convert", str(SAMPLE), str(tmp_path / "segments"), "--segment", "100kB"]) == 0
    assert main(["convert", str(SAMPLE), str(tmp_path / "files")]) == 0
    assert main(["convert", str(tmp_path / "segments"), str(tmp_path / "back")]) == 0
    expected = {path.name: path.read_bytes() for path in sorted((tmp_path / "files").glob("*.pkl"))}
    written = [path for path in (tmp_path / "segments").rglob("*") if path.is_file()]
    assert {path.suffix for path in written} == {".json", ".seg", ".idx"}
    assert {path.parent.name for path in written if path.suffix == ".seg"} == {"rank0", "rank1"}
    assert len(list_segments(tmp_path / "segments")) > 2
    assert max(path.stat().st_size for path in list_segments(tmp_path / "segments")) <= 100_000
    for folder in ("segments", "files", "back"):
        captures = {path.name: read_capture_bytes(path) for path in capture_files(tmp_path / folder)}
        assert captures == expected
        assert list(captures) == [path.name for path in capture_files(SAMPLE)]
        assert read_actor_config(tmp_path / folder) == read_actor_config(SAMPLE)
    assert read_actor_config(tmp_path / "segments" / "rank1") == read_actor_config(SAMPLE)


def test_a_recording_in_segments_is_a_folder_a_rank(tmp_path: Path, as_rank: Any) -> None:
    for rank in range(2):
        as_rank(rank, 2)
        recorder = record(tmp_path, 5)
        assert (recorder.num_written, recorder.failure) == (5, None)
    assert sorted(path.relative_to(tmp_path).parts[0] for path in list_segments(tmp_path)) == ["rank0", "rank1"]
    assert steps_in(tmp_path) == sorted(2 * list(range(5)))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.*") if path.is_file()} == {0o600}
    checked = check_folder(tmp_path)
    assert (checked.is_whole, checked.num_good, checked.num_torn_bytes, checked.without_index) == (True, 10, {}, [])


@pytest.mark.parametrize(
    ("world_size", "has_folder"), [(MAX_RANKS_IN_ONE_FOLDER, False), (MAX_RANKS_IN_ONE_FOLDER + 1, True)]
)
def test_many_ranks_have_a_folder_each(world_size: int, has_folder: bool, tmp_path: Path, as_rank: Any) -> None:
    as_rank(3, world_size)
    record(tmp_path, 2, segment=None)
    home = tmp_path / "rank3" if has_folder else tmp_path
    assert len(list(home.glob("actor_inputs_rank3_*.pkl"))) == len(capture_files(tmp_path)) == 2
    checked = check_folder(tmp_path)
    assert (checked.is_whole, checked.uncommitted, len(checked.good)) == (True, [], 2)


def test_a_pass_is_read_without_its_neighbours(segment_path: Path) -> None:
    """All other passes are overwritten, so a reader that looked at them would fail."""
    segment = Segment.open(segment_path)
    record_2 = segment.record_at(2)
    expected = read_micro_batch(segment.path_at(2)).sequences_BS
    data = segment_path.read_bytes()
    pass_2 = data[record_2.offset + RECORD_BYTES : record_2.end]
    segment_path.write_bytes(bytes(record_2.offset + RECORD_BYTES) + pass_2 + bytes(len(data) - record_2.end))
    assert read_micro_batch(segment.path_at(2)).sequences_BS.equal(expected)
    assert expected.equal((IDS_BS + 2) % 16)
    for other in (0, 1, 3, 5):
        with pytest.raises(CaptureError, match="checksum is wrong"):
            read_micro_batch(segment.path_at(other))


def test_a_bad_byte_costs_one_pass(segment_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = Segment.open(segment_path)
    data = bytearray(segment_path.read_bytes())
    data[segment.record_at(3).end - 5] ^= 1
    segment_path.write_bytes(data)
    assert main(["check", str(segment_path.parents[1])]) == 1
    out = capsys.readouterr().out
    assert "5 passes in 1 segment\n" in out
    assert f"damaged    {segment.name_at(3)}: the checksum is wrong" in out
    readable = [path for path in capture_files(segment_path.parents[1]) if is_readable(path)]
    assert [path.name for path in readable] == [segment.name_at(index) for index in (0, 1, 2, 4, 5)]


def is_readable(path: Path) -> bool:
    try:
        read_micro_batch(path)
    except CaptureError:
        return False
    return True


def test_a_segment_that_is_cut_anywhere_in_a_pass_loses_that_pass_alone(segment_path: Path) -> None:
    """A killed process leaves a part of a record or pass at the end, without an entry in the index."""
    segment, data = Segment.open(segment_path), segment_path.read_bytes()
    index = index_path_of(segment_path).read_bytes()
    before, last = segment.record_at(4), segment.record_at(5)
    index_path_of(segment_path).write_bytes(index[:-RECORD_BYTES])
    for end in [*range(before.end, before.end + RECORD_BYTES + 2), *range(before.end, last.end, 41), last.end - 1]:
        segment_path.write_bytes(data[:end])
        torn = Segment.open(segment_path)
        assert (torn.num_passes, torn.end, torn.num_torn_bytes) == (5, before.end, end - before.end)
        assert (torn.gaps, torn.num_cut_off) == ([], 0)
    # A host that went down may have written the length of the file and not the bytes.
    for behind in (b"", b"a part of the next record"):
        segment_path.write_bytes(data[: before.end + RECORD_BYTES] + bytes(last.num_bytes) + behind)
        assert (Segment.open(segment_path).num_passes, Segment.open(segment_path).end) == (5, before.end)
    segment_path.write_bytes(data)
    assert Segment.open(segment_path).num_passes == 6


@pytest.mark.parametrize("how", ["gone", "torn", "damaged", "empty"])
def test_an_index_is_made_anew_from_its_segment(
    how: str, segment_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, index = (
        [path.name for path in capture_files(segment_path.parents[1])],
        index_path_of(segment_path).read_bytes(),
    )
    match how:
        case "gone":
            index_path_of(segment_path).unlink()
        case "torn":
            index_path_of(segment_path).write_bytes(index[: -RECORD_BYTES - 50])
        case "damaged":
            index_path_of(segment_path).write_bytes(index[:-300] + b"x" + index[-299:])
        case _:
            index_path_of(segment_path).write_bytes(b"")
    assert [path.name for path in capture_files(segment_path.parents[1])] == names
    assert all(is_readable(path) for path in capture_files(segment_path.parents[1]))
    assert main(["check", str(segment_path.parents[1])]) == 0
    assert f"no index   {segment_path.name}" in capsys.readouterr().out
    assert main(["salvage", str(segment_path.parents[1])]) == 0
    assert "repaired   1 segments" in capsys.readouterr().out
    assert index_path_of(segment_path).read_bytes() == index


def test_records_of_a_segment_without_index_are_found_behind_a_gap(segment_path: Path) -> None:
    segment, data = Segment.open(segment_path), bytearray(segment_path.read_bytes())
    index_path_of(segment_path).unlink()
    # The record itself is damaged, so the length of its pass is unknown.
    damaged = segment.record_at(2)
    data[damaged.offset + 20] ^= 1
    segment_path.write_bytes(data)
    scanned = Segment.open(segment_path)
    names = [scanned.name_at(index) for index in range(scanned.num_passes)]
    assert names == [segment.name_at(index) for index in (0, 1, 3, 4, 5)]
    assert scanned.gaps == [(damaged.offset, damaged.end - damaged.offset)]
    assert not check_folder(segment_path.parents[1]).is_whole


def test_a_copy_that_is_too_short_is_damaged(segment_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment_path.write_bytes(segment_path.read_bytes()[:-10])
    assert main(["check", str(segment_path.parents[1])]) == 1
    assert "truncated: its index has 1 passes more than are here" in capsys.readouterr().out
    segment_path.unlink()
    assert main(["check", str(segment_path.parents[1])]) == 1
    assert f"missing    {segment_path.name}" in capsys.readouterr().out


def test_a_pass_that_is_not_there_is_refused(segment_path: Path) -> None:
    [first, *_] = capture_files(segment_path.parents[1])
    for name in (first.name.replace("_00000000", "_00000099"), first.name.replace("rank0", "rank7"), "x.pkl"):
        with pytest.raises(CaptureError, match=r"no such pass|no name of a pass"):
            read_call(segment_path / name)
    segment_path.write_bytes(b'{"format": 9}' + b" " * 114 + b"\n")
    with pytest.raises(CaptureError, match="segment format 9"):
        Segment.open(segment_path)
    segment_path.write_bytes(b"{")
    with pytest.raises(CaptureError, match="its head is damaged"):
        Segment.open(segment_path)


@pytest.mark.parametrize("write", range(9))
def test_kill_9_in_the_middle_of_a_write_loses_that_pass_alone(write: int, tmp_path: Path) -> None:
    """The process is killed after half of a write: heads are writes 0 and 1, then come record, two pickles, entry."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        model, os_write, count = TinyModel(), os.write, iter(range(100))

        def die_in_the_middle(descriptor: int, data: Any) -> int:
            if next(count) == write:
                os_write(descriptor, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return os_write(descriptor, data)

        os.write = die_in_the_middle
        recorder = recording(model, tmp_path, segment="1MB")
        for step in range(4):
            model((IDS_BS + step) % 16)
            recorder.flush()
        os_write(writing, b"not killed")
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b""
    os.close(reading)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    # A pass is whole once its second pickle is written: the index may lag.
    num_whole = max(0, (write - 2 + 1) // 4)
    assert steps_in(tmp_path) == list(range(num_whole))
    assert check_folder(tmp_path).is_whole == (write > 0)
    # The rank's next recording mends what the killed one left.
    record(tmp_path, 3)
    assert steps_in(tmp_path) == sorted([*range(num_whole), *range(3)])
    checked = check_folder(tmp_path)
    assert (checked.is_whole, checked.num_torn_bytes, checked.without_index) == (True, {}, [])


def test_a_segment_that_is_being_written_is_read_and_left_alone(tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path, segment="1MB") as recorder:
        for _ in range(3):
            model(IDS_BS)
        recorder.flush()
        [segment] = list_segments(tmp_path)
        # The file looks as if a pass were half written.
        with open(segment, "ab") as file:
            file.write(b"half")
        assert main(["salvage", str(tmp_path)]) == 0
        assert segment.read_bytes().endswith(b"half")
        assert steps_in(tmp_path) == [0, 1, 2]
    assert main(["salvage", str(tmp_path)]) == 0
    assert not segment.read_bytes().endswith(b"half")


@pytest.mark.parametrize(
    ("seconds_ago", "is_mended"), [(OTHER_HOST_SECONDS - 600, False), (OTHER_HOST_SECONDS + 600, True)]
)
def test_a_segment_of_another_host_is_mended_once_that_no_longer_writes_it(
    seconds_ago: float, is_mended: bool, segment_path: Path
) -> None:
    """A disk that hosts share may have no locks. Then the time of the last write alone tells."""
    segment = Segment.open(segment_path)
    for path in (segment_path, index_path_of(segment_path)):
        path.write_bytes(replace(segment.head, host="00000000").pack() + path.read_bytes()[segment.begin :])
    whole = segment_path.read_bytes()
    segment_path.write_bytes(whole + b"half")
    written = time.time() - seconds_ago
    os.utime(segment_path, (written, written))
    assert repair_segments(segment_path.parent, 0) == is_mended
    assert segment_path.read_bytes() == whole + b"half" * (not is_mended)


@pytest.mark.parametrize("last", [9, 10, 11, 12], ids=["record", "head", "body", "entry in the index"])
def test_a_disk_that_is_full_costs_the_passes_after_it(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os_write, num_written = os.write, iter(range(100))

    def write_until_full(descriptor: int, data: Any) -> int:
        if next(num_written) > last:
            if len(data) > 10:
                return os_write(descriptor, data[:10])
            raise OSError(28, "No space left on device")
        return os_write(descriptor, data)

    monkeypatch.setattr(os, "write", write_until_full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        recorder = record(tmp_path)
    monkeypatch.undo()
    assert (recorder.num_written, recorder.num_dropped) == (2, 4)
    assert steps_in(tmp_path) == [0, 1]
    assert check_folder(tmp_path).num_torn_bytes == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"segment": "64 megabytes"}, "segment must be a size, such as 64MB"),
        ({"segment": 0}, "segment must be a size"),
        ({"segment": True}, "segment must be a size"),
        ({"max_bytes": "10 gigabytes"}, "max_bytes must be a size, such as 64MB"),
        ({"max_bytes": 0}, "max_bytes must be a size"),
        ({"segment": "1MB", "max_files": 3}, "max_files counts files of one pass each"),
        ({"segment": 600, "max_bytes": 1000, "keep": "last"}, "at most half of max_bytes"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_retention(**settings)


def test_sizes_are_read_with_their_units() -> None:
    sizes: dict[int | str, int] = {"64MB": 64 * 10**6, "1 GiB": 2**30, "4kb": 4000, 77: 77, "12": 12}
    assert [parse_num_bytes("segment", typed) for typed in sizes] == list(sizes.values())
    assert check_retention(segment="1MB", max_bytes="2MB", keep="last").max_bytes == 2 * 10**6


@pytest.mark.parametrize("keep", ["first", "last"])
def test_segments_never_exceed_the_limit(keep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, largest, os_write = 20_000, 0, os.write

    def write_and_measure(descriptor: int, data: Any) -> int:
        nonlocal largest
        num_written = os_write(descriptor, data)
        largest = max(largest, sum(path.stat().st_size for path in (tmp_path / "rank0").iterdir()))
        return num_written

    monkeypatch.setattr(os, "write", write_and_measure)
    # The second recording is that of a job that was started again.
    for _ in range(2):
        recorder = record(tmp_path, 100, segment=4000, max_bytes=limit, keep=keep, max_queued=1000)
        ends = recorder.num_written + recorder.num_dropped + recorder.num_not_kept
        assert (recorder.num_seen, recorder.failure) == (ends, None)
    assert limit // 2 < largest <= limit
    steps = steps_in(tmp_path)
    assert check_folder(tmp_path).is_whole
    if keep == "first":
        assert steps == list(range(len(steps)))
    else:
        assert (steps, len(steps)) == (list(range(100 - len(steps), 100)), recorder.num_written)


def test_a_flight_recorder_writes_its_passes_into_a_segment(tmp_path: Path) -> None:
    model = TinyModel()
    with suppress(RuntimeError), recording(model, tmp_path, flight_recorder=3, segment="1MB"):
        for _ in range(5):
            model(IDS_BS)
        raise RuntimeError("broke")
    [incident_record] = read_incidents(tmp_path)
    assert incident_record.incidents[0].files == [path.name for path in capture_files(tmp_path)]
    assert steps_in(tmp_path) == [2, 3, 4]
    assert [path.parent.name for path in list_segments(tmp_path)] == ["rank0"]


def test_64_processes_record_into_one_folder_without_a_loss(tmp_path: Path) -> None:
    writers = [str(warm_bin() / "python"), "-m", "tests.helpers.many_writers", str(tmp_path), "64", "4"]
    subprocess.run(writers, check=True, cwd=SAMPLE.parents[1], timeout=1800)
    assert len(list_segments(tmp_path)) == 64
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []
    batches = [read_micro_batch(path) for path in capture_files(tmp_path)]
    expected = [(rank, step) for rank in range(64) for step in range(4)]
    assert [(batch.origin.rank, batch.origin.step) for batch in batches] == expected
    assert all(batch.sequences_BS.equal((IDS_BS + (batch.origin.step or 0)) % 16) for batch in batches)


def test_a_recording_holds_no_more_than_one_manifest(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, tmp_path, RetentionSettings(), rank=0, stamp="2026", max_entries=20)
    remembered = []
    for step in range(70):
        origin = Origin(source="", rank=0, step=step)
        files.write(encode_call({"input_ids": IDS_BS}, {}, trains=True, origin=origin))
        remembered.append(files.num_remembered)
    files.commit()
    files.close()
    manifests = sorted(tmp_path.glob("manifest_*.json"))
    assert [len(read_manifest(path)) for path in manifests] == [20, 20, 20, 10]
    checked = check_folder(tmp_path)
    assert (checked.is_whole, checked.uncommitted, len(checked.good)) == (True, [], 70)
    assert (max(remembered), remembered[-1]) == (19, 10)


def test_redact_writes_segments_for_segments(tmp_path: Path) -> None:
    main(["convert", str(SAMPLE), str(tmp_path / "in"), "--segment", "100kB"])
    assert main(["redact", str(tmp_path / "in"), str(tmp_path / "out"), "--tokens", "zero"]) == 0
    assert list_segments(tmp_path / "out")
    assert list((tmp_path / "out").rglob("*.pkl")) == []
    before, after = ([read_micro_batch(path) for path in capture_files(tmp_path / name)] for name in ("in", "out"))
    assert [batch.origin.step for batch in after] == [batch.origin.step for batch in before]
    assert not any(batch.sequences_BS.any() for batch in after)
    assert check_folder(tmp_path / "out").is_whole


@pytest.mark.parametrize("max_bytes", [25 * 2**20, 60_000])
def test_pack_takes_as_many_passes_of_segments_as_fit(
    max_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["convert", str(SAMPLE), str(tmp_path / "in"), "--segment", "100kB"])
    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "a.zip"), "--max-bytes", str(max_bytes)]) == 0
    assert (tmp_path / "a.zip").stat().st_size <= max_bytes
    with zipfile.ZipFile(tmp_path / "a.zip") as package:
        package.extractall(tmp_path / "out")
    folder, captures = tmp_path / "out" / "a", capture_files(tmp_path / "in")
    packed = [(path.name, read_capture_bytes(path)) for path in capture_files(folder)]
    assert packed == [(path.name, read_capture_bytes(path)) for path in captures[: len(packed)]]
    checked = check_folder(folder)
    assert (checked.is_whole, checked.without_index, checked.num_torn_bytes) == (True, [], {})
    if max_bytes == 60_000:
        assert (tmp_path / "a.zip").stat().st_size > max_bytes // 2
        assert f"{40 - len(packed)} passes, from {captures[len(packed)].name} on" in capsys.readouterr().out
    else:
        assert len(packed) == 40


def test_the_head_of_a_segment_says_what_its_passes_share(segment_path: Path) -> None:
    head = json.loads(segment_path.read_bytes().split(b"\n")[0])
    origin = read_call(capture_files(segment_path.parents[1])[0]).origin
    assert (head["rank"], head["world_size"], head["versions"]) == (origin.rank, origin.world_size, origin.versions)
