"""Append passes to one rank's segments, and cut what killed processes left at the end of theirs."""

import errno
import fcntl
import os
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from capture.file_format.atomic_write import HOST_DIGEST, OTHER_HOST_SECONDS, write_atomically
from capture.file_format.folder_layout import SEGMENT_SUFFIX, make_rank_folder, parse_rank
from capture.file_format.micro_batch import CaptureError
from capture.file_format.segment import (
    MAX_HEAD_BYTES,
    Segment,
    SegmentHead,
    format_pass_name,
    index_path_of,
    list_segments,
)
from capture.file_format.segment_record import RECORD_BYTES, SegmentRecord

# A host that goes down may take along what was written since the last sync; a killed process takes nothing.
SECONDS_BETWEEN_SYNCS = 1.0
# Descriptors of the segments and indexes that this process writes. Those of segments hold locks.
_open_descriptors: set[int] = set()
_SEGMENT, _INDEX = 0, 1


class SegmentWriter:
    """Appends to one segment after the other, from one thread. Every method raises OSError where the disk fails.

    A segment ends before the pass that would make it larger than `max_bytes`, before a pass whose number is not above
    the last one's, and where what its head says changes. A process that writes a segment holds a lock on it.

    stamp      part of the files' names, which tells recordings into one folder apart
    num_bytes  of the segment and index that are being written; 0 if there is none
    """

    def __init__(self, home: Path, *, rank: int, stamp: str, max_bytes: int) -> None:
        self.path: Path | None = None
        self._home = home
        self._rank = rank
        self._stamp = stamp
        self._max_bytes = max_bytes
        self._number = 0
        self._head: SegmentHead | None = None
        self._descriptors: tuple[int, int] = (-1, -1)
        self._sizes = [0, 0]
        self._last_number = -1
        self._last_sync = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    def will_begin(self, head: SegmentHead, num_bytes: int, number: int) -> bool:
        """Tell whether a pass of `num_bytes` bytes goes into a new segment."""
        is_full = self._last_number >= 0 and self._sizes[_SEGMENT] + RECORD_BYTES + num_bytes > self._max_bytes
        return self.path is None or is_full or number <= self._last_number or head != self._head

    def append(self, parts: Sequence[bytes], record: SegmentRecord, head: SegmentHead) -> Path:
        """Append a pass and return its path. `record` need not know its offset, length and checksum."""
        num_bytes = sum(map(len, parts))
        if self.will_begin(head, num_bytes, record.number):
            self._begin(head)
        assert self.path is not None
        crc32 = 0
        for part in parts:
            crc32 = zlib.crc32(part, crc32)
        complete = replace(record, offset=self._sizes[_SEGMENT], num_bytes=num_bytes, crc32=crc32)
        packed = complete.pack()
        self._add(_SEGMENT, packed, *parts)
        try:
            self._add(_INDEX, packed)
        except BaseException:
            # An append that fails leaves nothing: the pass is counted as lost, so a reader must not find it.
            with suppress(OSError):
                self._cut(_SEGMENT, complete.offset)
            raise
        self._last_number = record.number
        if time.monotonic() - self._last_sync > SECONDS_BETWEEN_SYNCS:
            self.sync()
        return self.path / format_pass_name(self._rank, record.time, record.number)

    def sync(self) -> None:
        """Have the disk write what was appended. The index is not waited for: it can be made anew."""
        if self.path is not None:
            if not os.fstat(self._descriptors[_SEGMENT]).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the segment that is being written was deleted", str(self.path))
            os.fdatasync(self._descriptors[_SEGMENT])
            self._last_sync = time.monotonic()

    def end_segment(self) -> None:
        """Have the next pass begin a new segment."""
        try:
            self.sync()
        finally:
            self.close()

    def close(self) -> None:
        for descriptor in self._descriptors:
            if descriptor in _open_descriptors:
                _open_descriptors.remove(descriptor)
                os.close(descriptor)
        self.path, self._head, self._descriptors, self._sizes, self._last_number = None, None, (-1, -1), [0, 0], -1

    def _begin(self, head: SegmentHead) -> None:
        self.end_segment()
        make_rank_folder(self._home)
        while True:
            self._number += 1
            path = self._home / f"segment_rank{self._rank}_{self._stamp}_{self._number:06d}{SEGMENT_SUFFIX}"
            with suppress(FileExistsError):
                segment = _create(path)
                break
        self.path, self._head, self._descriptors = path, head, (segment, -1)
        # A file system may have no locks. Then `repair_segments` leaves the segment alone.
        with suppress(OSError):
            fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._descriptors = segment, _create(index_path_of(path))
        for file in (_SEGMENT, _INDEX):
            self._add(file, head.pack())

    def _add(self, file: int, *parts: bytes) -> None:
        """Append to the segment or the index: all or nothing."""
        size_before = self._sizes[file]
        try:
            for part in parts:
                remaining = memoryview(part)
                while remaining:
                    remaining = remaining[os.write(self._descriptors[file], remaining) :]
        except BaseException:
            with suppress(OSError):
                self._cut(file, size_before)
            raise
        self._sizes[file] = size_before + sum(map(len, parts))

    def _cut(self, file: int, num_bytes: int) -> None:
        os.ftruncate(self._descriptors[file], num_bytes)
        self._sizes[file] = num_bytes


def _create(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    _open_descriptors.add(descriptor)
    return descriptor


def repair_segments(home: Path, rank: int) -> int:
    """Cut torn tails of this rank's segments that nobody writes, and rewrite indexes that lack passes.

    Returns the number of segments that it changed. Raises OSError.
    """
    num_changed = 0
    for path in list_segments(home) if home.is_dir() else []:
        if parse_rank(path) != rank:
            continue
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _is_unused(descriptor):
                num_changed += _repair(path, descriptor)
        finally:
            os.close(descriptor)
    return num_changed


def _is_unused(descriptor: int) -> bool:
    """Tell whether nobody writes the segment; False too on a file system without locks, which could not tell."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _repair(path: Path, descriptor: int) -> bool:
    try:
        segment = Segment.open(path)
    except CaptureError:
        # A head without its end was left by a process that was killed while it wrote the head: there is no pass after
        # it. Any other damage stays as it is, and `capture check` reports it.
        if b"\n" not in os.pread(descriptor, MAX_HEAD_BYTES, 0) and os.fstat(descriptor).st_size < MAX_HEAD_BYTES:
            path.unlink()
            index_path_of(path).unlink(missing_ok=True)
            return True
        return False
    if segment.num_cut_off or segment.gaps or (segment.has_whole_index and not segment.num_torn_bytes):
        return False
    may_be_written = segment.head.host != HOST_DIGEST and time.time() - path.stat().st_mtime < OTHER_HOST_SECONDS
    if may_be_written:
        return False
    if segment.num_torn_bytes:
        os.ftruncate(descriptor, segment.end)
    write_atomically(index_path_of(path), segment.head.pack(), bytes(segment.records))
    return True


def _close_in_child() -> None:
    """Close the descriptors, and with them the locks, in a child such as a data loader.

    The child may outlive the process that writes, and its copy of a lock would keep the segment from being repaired.
    """
    while _open_descriptors:
        os.close(_open_descriptors.pop())


os.register_at_fork(after_in_child=_close_in_child)
