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

from capture.file_format.atomic_write import HOST, OTHER_HOSTS_SECONDS, write_atomically
from capture.file_format.folder_layout import SEGMENT_SUFFIX, make_home, rank_in_name
from capture.file_format.micro_batch import CaptureError
from capture.file_format.segment import MAX_HEAD_BYTES, Head, Segment, index_of, pass_name, segments_in
from capture.file_format.segment_record import RECORD_BYTES, SegmentRecord

SECONDS_BETWEEN_SYNCS = 1.0  # what a host that goes down may take along; a killed process takes nothing
_open_here: set[int] = set()  # descriptors, each with a lock on its segment


class SegmentWriter:
    """Appends to one segment after the other, for one thread. Every method raises OSError where the disk fails.

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
        self._head: Head | None = None
        self._descriptors: tuple[int, int] = (-1, -1)
        self._sizes = [0, 0]
        self._last_number = -1
        self._synced = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    def will_begin(self, head: Head, num_bytes: int, number: int) -> bool:
        """Tell whether a pass of so many bytes goes into a new segment."""
        is_full = self._last_number >= 0 and self._sizes[0] + RECORD_BYTES + num_bytes > self._max_bytes
        return self.path is None or is_full or number <= self._last_number or head != self._head

    def append(self, parts: Sequence[bytes], record: SegmentRecord, head: Head) -> Path:
        """Append a pass and return its path. `record` need not know its place, length and checksum."""
        num_bytes = sum(map(len, parts))
        if self.will_begin(head, num_bytes, record.number):
            self._begin(head)
        assert self.path is not None
        crc32 = 0
        for part in parts:
            crc32 = zlib.crc32(part, crc32)
        placed = replace(record, offset=self._sizes[0], num_bytes=num_bytes, crc32=crc32)
        packed = placed.pack()
        self._add(0, packed, *parts)
        try:
            self._add(1, packed)
        except BaseException:
            with suppress(OSError):
                self._cut(0, placed.offset)
            raise
        self._last_number = record.number
        if time.monotonic() - self._synced > SECONDS_BETWEEN_SYNCS:
            self.sync()
        return self.path / pass_name(self._rank, record.time, record.number)

    def sync(self) -> None:
        """Have the disk write what was appended. The index is not waited for: it can be made anew."""
        if self.path is not None:
            if not os.fstat(self._descriptors[0]).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the segment that is being written was deleted", str(self.path))
            os.fdatasync(self._descriptors[0])
            self._synced = time.monotonic()

    def end_segment(self) -> None:
        """Have the next pass begin a new segment."""
        try:
            self.sync()
        finally:
            self.close()

    def close(self) -> None:
        for descriptor in self._descriptors:
            if descriptor in _open_here:
                _open_here.remove(descriptor)
                os.close(descriptor)
        self.path, self._head, self._descriptors, self._sizes, self._last_number = None, None, (-1, -1), [0, 0], -1

    def _begin(self, head: Head) -> None:
        self.end_segment()
        make_home(self._home)
        while True:
            self._number += 1
            path = self._home / f"segment_rank{self._rank}_{self._stamp}_{self._number:06d}{SEGMENT_SUFFIX}"
            with suppress(FileExistsError):
                segment = _create(path)
                break
        self.path, self._head, self._descriptors = path, head, (segment, -1)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._descriptors = segment, _create(index_of(path))
        for which in (0, 1):
            self._add(which, head.pack())

    def _add(self, which: int, *parts: bytes) -> None:
        """Append all or nothing."""
        before = self._sizes[which]
        try:
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[os.write(self._descriptors[which], left) :]
        except BaseException:
            with suppress(OSError):
                self._cut(which, before)
            raise
        self._sizes[which] = before + sum(map(len, parts))

    def _cut(self, which: int, num_bytes: int) -> None:
        os.ftruncate(self._descriptors[which], num_bytes)
        self._sizes[which] = num_bytes


def _create(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    _open_here.add(descriptor)
    return descriptor


def repair_segments(home: Path, rank: int) -> int:
    """Cut torn tails of this rank's segments that nobody writes, and write indexes that lack passes anew.

    Returns the number of segments that it changed. Raises OSError.
    """
    num_changed = 0
    for path in segments_in(home) if home.is_dir() else []:
        if rank_in_name(path) != rank:
            continue
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _is_unused(descriptor):
                num_changed += _repair(path, descriptor)
        finally:
            os.close(descriptor)
    return num_changed


def _is_unused(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is being written, or the file system has no locks that would say so
        return False
    return True


def _repair(path: Path, descriptor: int) -> bool:
    try:
        segment = Segment.open(path)
    except CaptureError:  # `capture check` reports it
        if b"\n" not in os.pread(descriptor, MAX_HEAD_BYTES, 0) and os.fstat(descriptor).st_size < MAX_HEAD_BYTES:
            path.unlink()  # killed while it wrote the head
            index_of(path).unlink(missing_ok=True)
            return True
        return False
    if segment.num_cut_off or segment.gaps or (segment.has_whole_index and not segment.num_torn_bytes):
        return False
    may_be_written = segment.head.host != HOST and time.time() - path.stat().st_mtime < OTHER_HOSTS_SECONDS
    if may_be_written:
        return False
    if segment.num_torn_bytes:
        os.ftruncate(descriptor, segment.end)
    write_atomically(index_of(path), segment.head.pack(), bytes(segment.records))
    return True


def _let_go_in_child() -> None:
    """Close the locks in a child, such as a data loader: it may outlive the process that writes."""
    while _open_here:
        os.close(_open_here.pop())


os.register_at_fork(after_in_child=_let_go_in_child)
