"""Read segments: files that hold many passes of one rank, each with its checksum, and an index beside each.

    segment_rank<rank>_<time>_<number>.seg    a head; then for each pass its record and the bytes of its capture
    segment_rank<rank>_<time>_<number>.idx    the same head; then the records alone

A segment is only ever appended to, and a pass goes into the segment before its record goes into the index. So the
index may lag behind, and what a kill leaves at the end of a segment, a torn tail, is no pass. A missing or damaged
index is made anew from the segment's own records. In a segment, numbers of forwards rise from pass to pass.

A pass has a path as if the segment were a folder: `<segment>.seg/actor_inputs_rank<rank>_<time>_<number>.pkl`.
"""

import json
import os
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from capture.file_format.folder_layout import SEGMENT_SUFFIX, is_in_segment, parse_rank
from capture.file_format.micro_batch import CaptureError
from capture.file_format.segment_record import (
    COLUMN,
    MAGIC,
    RECORD_BYTES,
    SegmentRecord,
    are_records,
    as_table,
    from_microseconds,
)

SEGMENT_FORMAT = 1
INDEX_SUFFIX = ".idx"
MAX_HEAD_BYTES = 64 * 1024
_USUAL_HEAD_BYTES = 1024
_SCANNED_BYTES = 2**20
_SEGMENT = re.compile(rf"segment_rank\d{{1,9}}_\w+\{SEGMENT_SUFFIX}")
_NAME = re.compile(r"actor_inputs_rank\d{1,9}_\d{8}_\d{6}_\d{6}_(\d{8,16})\.pkl")


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentHead:
    """What all passes of a segment share. What is not known is None.

    The names of the fields are keys in the file.

    host       a digest of the name of the host that writes it
    recording  the id of the passes' recording
    """

    rank: int | None
    world_size: int | None
    model_name: str | None
    versions: Mapping[str, str]
    host: str
    recording: str | None = None

    def pack(self) -> bytes:
        """Return a line of JSON, padded to whole records."""
        values = {name: getattr(self, name) for name in self.__slots__}
        text = json.dumps({"format": SEGMENT_FORMAT, **values}).encode()
        return text.ljust(-(-(len(text) + 1) // RECORD_BYTES) * RECORD_BYTES - 1) + b"\n"

    @classmethod
    def read(cls, descriptor: int, source: str) -> tuple["SegmentHead", int]:
        """Read the head at the beginning of a file, and return it with its length. Raises CaptureError, OSError."""
        data = os.pread(descriptor, _USUAL_HEAD_BYTES, 0)
        if b"\n" not in data:
            data = os.pread(descriptor, MAX_HEAD_BYTES, 0)
        end = data.find(b"\n") + 1
        try:
            content: Any = json.loads(data[:end])
            if not end or end % RECORD_BYTES or not isinstance(content, dict):
                raise ValueError
        except (ValueError, RecursionError):
            raise CaptureError(f"{source}: no segment: its head is damaged. Delete the file or copy it again") from None
        if (format := content.pop("format", None)) != SEGMENT_FORMAT:
            raise CaptureError(
                f"{source}: segment format {repr(format)[:20]}; this version reads format {SEGMENT_FORMAT}. "
                "Upgrade micro-replay to read it"
            )
        numbers = (content.get("rank"), content.get("world_size"))
        content.setdefault("recording", None)
        texts = (content.get("model_name"), content["recording"])
        if (
            content.keys() != set(cls.__slots__)
            or not all(number is None or (type(number) is int and 0 <= number < 10**9) for number in numbers)
            or not all(text is None or type(text) is str for text in texts)
            or not isinstance(content["versions"], dict)
            or not all(isinstance(text, str) for text in (content["host"], *content["versions"].values()))
        ):
            raise CaptureError(f"{source}: no segment: its head is {str(content)[:80]}")
        return cls(**content), end


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The passes of one segment, by their records alone.

    begin           offset at which the first record may be
    records         one packed SegmentRecord after the other; all of these passes are there in full length
    end             offset at which the last whole pass ends
    num_torn_bytes  bytes after `end`, of a pass that was being written
    num_indexed     number of records that came from the index; the others came from the segment
    gaps            offset and length of each stretch of the segment without a readable record
    num_cut_off     number of passes that the index has and the segment is too short for
    """

    path: Path
    head: SegmentHead
    begin: int
    records: bytearray
    end: int
    num_torn_bytes: int = 0
    num_indexed: int = 0
    gaps: Sequence[tuple[int, int]] = field(default_factory=tuple)
    num_cut_off: int = 0

    @classmethod
    def open(cls, path: Path) -> "Segment":
        """Read a segment's index, and of the segment what the index does not have. Raises CaptureError."""
        try:
            with open(path, "rb") as file:
                head, begin = SegmentHead.read(file.fileno(), path.name)
                indexed = _read_index(path, begin)
                # The size is read after the index: both may be growing, and a pass is in the segment before it is in
                # the index, so no indexed pass can seem to be cut off.
                num_bytes = os.fstat(file.fileno()).st_size
                records, num_cut_off = _drop_passes_beyond_end(indexed, num_bytes)
                num_indexed = len(records) // RECORD_BYTES
                end = _find_end(records, begin)
                scanned, end, gaps = _scan(file.fileno(), end, num_bytes, last_number=_find_last_number(records))
        except OSError as error:
            raise CaptureError(f"{path}: cannot be read: {error.strerror}") from None
        return cls(
            path=path,
            head=head,
            begin=begin,
            records=records + scanned if scanned else records,
            end=end,
            num_torn_bytes=num_bytes - end,
            num_indexed=num_indexed,
            gaps=gaps,
            num_cut_off=num_cut_off,
        )

    @property
    def num_passes(self) -> int:
        return len(self.records) // RECORD_BYTES

    @property
    def has_whole_index(self) -> bool:
        return self.num_indexed == self.num_passes and index_path_of(self.path).exists()

    def record_at(self, index: int) -> SegmentRecord:
        return SegmentRecord.unpack(self.records[index * RECORD_BYTES : (index + 1) * RECORD_BYTES])

    def name_at(self, index: int) -> str:
        row = as_table(self.records[index * RECORD_BYTES : (index + 1) * RECORD_BYTES])[0]
        return format_pass_name(parse_rank(self.path), int(row[COLUMN["time"]]), int(row[COLUMN["number"]]))

    def path_at(self, index: int) -> Path:
        return self.path / self.name_at(index)

    def read_passes(self) -> Iterator[tuple[SegmentRecord, bytes]]:
        """Read one pass after the other, unchecked. Raises OSError."""
        with open(self.path, "rb") as file:
            for index in range(self.num_passes):
                record = self.record_at(index)
                file.seek(record.offset + RECORD_BYTES)
                yield record, file.read(record.num_bytes)


def list_segments(folder: Path) -> list[Path]:
    """List the segments in one folder, in recorded order. Raises OSError."""
    return sorted(path for path in folder.iterdir() if _SEGMENT.fullmatch(path.name))


def index_path_of(segment: Path) -> Path:
    return segment.with_suffix(INDEX_SUFFIX)


def format_pass_name(rank: int, microseconds: int, number: int) -> str:
    """Name the capture of a pass, in a segment as in a file of its own."""
    return f"actor_inputs_rank{rank}_{from_microseconds(microseconds):%Y%m%d_%H%M%S_%f}_{number:08d}.pkl"


def capture_exists(path: Path) -> bool:
    """Tell whether there is a capture of this path, in a file of its own or in a segment."""
    return path.is_file() or (is_in_segment(path) and path.parent.is_file() and _NAME.fullmatch(path.name) is not None)


def read_pass_bytes(path: Path, max_bytes: int) -> bytes:
    """Read one pass of a segment, and nothing of its neighbours. Raises CaptureError."""
    try:
        record = _find_record(path)
        if record.num_bytes > max_bytes:
            raise CaptureError(f"{path.name}: larger than {max_bytes} bytes, which no capture is")
        with open(path.parent, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), record.num_bytes, record.offset + RECORD_BYTES)
    except OSError as error:
        raise CaptureError(f"{path}: cannot be read: {error.strerror}") from None
    if not matches_checksum(record, data):
        raise CaptureError(f"{path.name}: the checksum is wrong: this pass of {path.parent.name} is damaged")
    return data


def matches_checksum(record: SegmentRecord, data: bytes) -> bool:
    return len(data) == record.num_bytes and zlib.crc32(data) == record.crc32


def _find_record(path: Path) -> SegmentRecord:
    """Find a pass's record by binary search in the index, or, if that fails, in the whole segment."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CaptureError(f"{path}: no name of a pass, such as actor_inputs_rank0_20261122_233513_992223_00000004.pkl")
    number = int(match[1])
    record = _search_index(path.parent, number)
    if record is None:
        segment = Segment.open(path.parent)
        index = bisect_left(range(segment.num_passes), number, key=lambda index: segment.record_at(index).number)
        record = segment.record_at(index) if index < segment.num_passes else None
    if record is None or format_pass_name(parse_rank(path.parent), record.time, record.number) != path.name:
        raise CaptureError(f"{path}: no such pass in the segment. Try: replay inspect, with its folder")
    return record


def _search_index(segment: Path, number: int) -> SegmentRecord | None:
    """Find the record with a number by reading a few records of the index; None where that fails."""
    try:
        with open(index_path_of(segment), "rb", buffering=0) as file:
            _, begin = SegmentHead.read(file.fileno(), segment.name)
            low, high = 0, (os.fstat(file.fileno()).st_size - begin) // RECORD_BYTES
            while low < high:
                middle = (low + high) // 2
                record = SegmentRecord.unpack_checked(
                    os.pread(file.fileno(), RECORD_BYTES, begin + middle * RECORD_BYTES)
                )
                if record.number == number:
                    return record
                low, high = (middle + 1, high) if record.number < number else (low, middle)
    except (OSError, CaptureError):
        pass
    return None


def _read_index(path: Path, begin: int) -> bytearray:
    """Read the records in the index; of a damaged one, none. The last one may be torn."""
    try:
        with open(index_path_of(path), "rb") as file:
            _, index_begin = SegmentHead.read(file.fileno(), path.name)
            records = bytearray(max(0, os.fstat(file.fileno()).st_size - index_begin))
            file.seek(index_begin)
            num_read = file.readinto(records)
    except (OSError, CaptureError):
        return bytearray()
    del records[num_read // RECORD_BYTES * RECORD_BYTES :]
    if not are_records(records):
        return bytearray()
    begins, ends, numbers = _pass_columns(records)
    is_in_order = bool((begins[1:] >= ends[:-1]).all() and (numbers[1:] > numbers[:-1]).all())
    return records if is_in_order and (not len(begins) or int(begins[0]) >= begin) else bytearray()


def _drop_passes_beyond_end(records: bytearray, num_bytes: int) -> tuple[bytearray, int]:
    """Return the records of passes that end within the segment's bytes, and the number of the others."""
    num_cut_off = int((_pass_columns(records)[1] > num_bytes).sum())
    return records[: len(records) - num_cut_off * RECORD_BYTES] if num_cut_off else records, num_cut_off


def _pass_columns(records: bytearray) -> tuple[Tensor, Tensor, Tensor]:
    """Return where passes begin and end, and their numbers."""
    table = as_table(records)
    begins, lengths, numbers = (table[:, COLUMN[name]] for name in ("offset", "num_bytes", "number"))
    return begins, begins + lengths + RECORD_BYTES, numbers


def _find_end(records: bytearray, begin: int) -> int:
    return SegmentRecord.unpack(records[-RECORD_BYTES:]).end if records else begin


def _find_last_number(records: bytearray) -> int:
    return SegmentRecord.unpack(records[-RECORD_BYTES:]).number if records else -1


def _scan(
    descriptor: int, begin: int, num_bytes: int, *, last_number: int
) -> tuple[bytearray, int, list[tuple[int, int]]]:
    """Walk from record to record. Returns those of whole passes, where the last one ends, and gaps between them.

    Where no record reads, it goes on at the next bytes that could begin one. The last pass counts only if its checksum
    is right: a host that went down may have written its length alone.
    """
    records, gaps, offset, end = bytearray(), [], begin, begin
    while offset + RECORD_BYTES <= num_bytes:
        record = _read_record(descriptor, offset)
        if record is None or record.end > num_bytes or record.number <= last_number:
            next_magic = _find_magic(descriptor, offset + 1, num_bytes)
            if next_magic is None:
                break
            offset = next_magic
            continue
        is_last = record.end + RECORD_BYTES > num_bytes
        if is_last and not matches_checksum(record, os.pread(descriptor, record.num_bytes, offset + RECORD_BYTES)):
            break
        if offset > end:
            gaps.append((end, offset - end))
        records += record.pack()
        offset = end = record.end
        last_number = record.number
    return records, end, gaps


def _read_record(descriptor: int, offset: int) -> SegmentRecord | None:
    data = os.pread(descriptor, RECORD_BYTES, offset)
    if not data.startswith(MAGIC):
        return None
    try:
        record = SegmentRecord.unpack_checked(data)
    except CaptureError:
        return None
    return record if record.offset == offset else None


def _find_magic(descriptor: int, offset: int, num_bytes: int) -> int | None:
    while offset < num_bytes:
        block = os.pread(descriptor, _SCANNED_BYTES + len(MAGIC), offset)
        if (index := block.find(MAGIC)) >= 0:
            return offset + index
        offset += _SCANNED_BYTES
    return None
