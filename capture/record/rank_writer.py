"""Write one rank's passes within its limits, as files of one pass each or into segments; first make room."""

import os
import re
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from capture.file_format.atomic_write import remove_stale_temporaries, write_atomically
from capture.file_format.capture_file import EncodedCall
from capture.file_format.folder_layout import SEGMENT_SUFFIX, choose_rank_folder, make_rank_folder, parse_rank
from capture.file_format.manifest import (
    MAX_ENTRIES,
    ManifestEntry,
    format_stamp,
    read_manifest,
    rewrite_manifest,
    write_manifest,
)
from capture.file_format.micro_batch import CaptureError
from capture.file_format.segment import INDEX_SUFFIX, index_path_of
from capture.file_format.segment_record import RECORD_BYTES
from capture.file_format.segment_writer import SegmentWriter, repair_segments
from capture.record.retention import RetentionSettings

MANIFEST_BYTES_PER_FILE = 1024  # set aside for its entry
_MIN_FILES_BETWEEN_MANIFESTS = 16


class RankWriter(Protocol):
    """Writes one rank's passes, for one thread. Every method raises OSError where the disk fails.

    home          the folder that they go to
    num_given_up  passes of this recording that made room for later ones
    had_passes    this rank's passes of another recording were there before
    """

    home: Path
    num_given_up: int
    had_passes: bool

    def write(self, encoded: EncodedCall) -> Path | None:
        """Write a pass. Returns None if there is no room: under `keep="first"`, or for a pass of this size."""

    def commit(self) -> None:
        """List what was written in manifests, and have the disk hold it."""

    def close(self) -> None:
        """Let go of open files. It raises nothing."""


def open_rank_writer(
    folder: Path, keep: RetentionSettings, *, rank: int, world_size: int | None, stamp: str
) -> RankWriter:
    """Prepare the folder for a rank's passes. `stamp`, a time, tells recordings apart. Raises OSError."""
    home = choose_rank_folder(folder, rank=rank, world_size=world_size, in_segments=keep.segment is not None)
    for place in {folder, home}:
        if place.is_dir():
            remove_stale_temporaries(place, rank)
    repair_segments(home, rank)
    if keep.segment is None:
        return RankFiles(folder, home, keep, rank=rank, stamp=stamp)
    return RankSegments(folder, home, keep, segment=keep.segment, rank=rank, stamp=stamp)


class RankFiles:
    """Writes a file for each pass. What it holds in memory does not grow with the passes, or is within the limit."""

    def __init__(self, folder: Path, home: Path, keep: RetentionSettings, *, rank: int, stamp: str) -> None:
        self.home = home
        self.num_given_up = 0
        self._folder = folder
        self._rank = rank
        self._keep = keep
        self._stamp = stamp
        self._entries: dict[str, str] = {}  # texts in the manifest, by name of the file: they are written many times
        self._num_listed = 0
        self._num_manifests = 0
        own = re.compile(rf"actor_inputs_rank{rank}_.*\.pkl")
        own_files = sorted(
            (entry.name, Path(entry.path), entry.stat().st_size)
            for entry in _entries_in({folder, home})
            if own.fullmatch(entry.name)
        )
        self._num_files = len(own_files)
        self._num_bytes = sum(self._charge(size) for _, _, size in own_files)
        self._num_bytes += sum(size for _, size in _segments_of(rank, {folder, home}))
        self.had_passes = self._num_bytes > 0
        self._oldest_first = deque(
            (path, self._charge(size)) for _, path, size in own_files if self._keep.keep == "last"
        )
        self._listed = self._listed_before() if keep.keep == "last" else set()

    def _charge(self, num_bytes: int) -> int:
        return num_bytes + MANIFEST_BYTES_PER_FILE

    def _has_room(self, num_bytes: int) -> bool:
        max_files, max_bytes = self._keep.max_files, self._keep.max_bytes
        return (max_files is None or self._num_files < max_files) and (
            max_bytes is None or self._num_bytes + self._charge(num_bytes) <= max_bytes
        )

    def write(self, encoded: EncodedCall) -> Path | None:
        parts = encoded.pickle_parts()
        num_bytes = sum(len(part) for part in parts)
        max_bytes = self._keep.max_bytes
        if max_bytes is not None and self._charge(num_bytes) > max_bytes:
            return None
        while not self._has_room(num_bytes):
            if not self._oldest_first:
                return None
            self._give_up_oldest()
        if self.home != self._folder:
            make_rank_folder(self.home)
        path = encoded.choose_path(self.home)
        write_atomically(path, *parts)
        self._num_files += 1
        self._num_bytes += self._charge(num_bytes)
        self._entries[path.name] = ManifestEntry(
            name=path.name,
            num_bytes=num_bytes,
            crc32=zlib.crc32(parts[1], zlib.crc32(parts[0])),
            rank=encoded.rank,
            step=encoded.step,
            trains=encoded.body["trains"],
            shapes={name: list(record["shape"]) for name, record in encoded.body["tensors"].items()},
        ).to_json()
        if self._keep.keep == "last":
            self._oldest_first.append((path, self._charge(num_bytes)))
            return path
        num_new = len(self._entries) - self._num_listed
        if num_new >= max(_MIN_FILES_BETWEEN_MANIFESTS, self._num_listed // 4):
            self.commit()
        if len(self._entries) >= MAX_ENTRIES:
            self._begin_manifest()
        return path

    def commit(self) -> None:
        if not self._entries or self._num_listed == len(self._entries):
            return
        names = list(self._entries)
        for begin in range(0, len(names), MAX_ENTRIES):
            entries = [self._entries[name] for name in names[begin : begin + MAX_ENTRIES]]
            number = self._num_manifests + begin // MAX_ENTRIES
            write_manifest(self.home, entries, rank=self._rank, time=self._stamp, number=number)
        self._num_listed = len(self._entries)
        self._listed.update(self._entries if self._keep.keep == "last" else ())

    def _begin_manifest(self) -> None:
        self.commit()
        self._num_manifests += 1
        self._entries.clear()
        self._num_listed = 0

    def close(self) -> None:
        pass

    def _listed_before(self) -> set[str]:
        names: set[str] = set()
        for manifest in self._manifests():
            names.update(entry.name for entry in _entries_of(manifest))
        return names

    def _manifests(self) -> list[Path]:
        own = re.compile(rf"manifest_rank{self._rank}_.*\.json")
        return [Path(entry.path) for entry in _entries_in({self._folder, self.home}) if own.fullmatch(entry.name)]

    def _give_up_oldest(self) -> None:
        """Delete the oldest file, out of the manifest first: so a recording that is cut short misses no file."""
        path, charge = self._oldest_first[0]
        if path.name in self._listed:
            for manifest in self._manifests():
                self._unlist(manifest, path.name)
            self._listed.remove(path.name)
        path.unlink(missing_ok=True)
        self._oldest_first.popleft()
        self._num_files -= 1
        self._num_bytes -= charge
        if self._entries.pop(path.name, None) is not None:
            self.num_given_up += 1

    def _unlist(self, manifest: Path, name: str) -> None:
        entries = _entries_of(manifest)
        rest = [entry for entry in entries if entry.name != name]
        if len(rest) == len(entries):
            return
        if rest:
            rewrite_manifest(manifest, rest)
        else:
            manifest.unlink()
        self._num_listed = 0


@dataclass(kw_only=True, slots=True)
class _SegmentUsage:
    """What a segment and its index take of the disk; `num_passes` are those of this recording."""

    path: Path
    num_bytes: int = 0
    num_passes: int = 0


class RankSegments:
    """Writes passes into segments. Where room has to be made, the oldest segment is deleted as a whole.

    Files of one pass each, of earlier recordings, count for the limit, and stay.
    """

    def __init__(
        self, folder: Path, home: Path, keep: RetentionSettings, *, segment: int, rank: int, stamp: str
    ) -> None:
        self.home = home
        self.num_given_up = 0
        self._keep = keep
        self._writer = SegmentWriter(home, rank=rank, stamp=format_stamp(stamp), max_bytes=segment)
        own_files = re.compile(rf"actor_inputs_rank{rank}_.*\.pkl")
        files = (entry for entry in _entries_in({folder, home}) if own_files.fullmatch(entry.name))
        segments = sorted(_segments_of(rank, {folder, home}))
        self._num_bytes = sum(entry.stat().st_size for entry in files) + sum(size for _, size in segments)
        self.had_passes = self._num_bytes > 0
        kept: list[tuple[Path, int]] = segments if keep.keep == "last" else []
        self._oldest_first: deque[_SegmentUsage] = deque(
            _SegmentUsage(path=path, num_bytes=size) for path, size in kept
        )

    def write(self, encoded: EncodedCall) -> Path | None:
        parts, record, head = encoded.pickle_parts(), encoded.segment_record(), encoded.segment_head()
        num_bytes = sum(map(len, parts))
        begins = self._writer.will_begin(head, num_bytes, record.number)
        charge = num_bytes + 2 * RECORD_BYTES + 2 * len(head.pack()) * begins
        while self._keep.max_bytes is not None and self._num_bytes + charge > self._keep.max_bytes:
            is_last = len(self._oldest_first) == 1 and not begins
            if not self._oldest_first or is_last:  # what is left is the segment that is being written
                return None
            self._give_up_oldest()
        path = self._writer.append(parts, record, head)
        self._num_bytes += charge
        if self._keep.keep == "last":
            if begins:
                self._oldest_first.append(_SegmentUsage(path=path.parent))
            self._oldest_first[-1].num_bytes += charge
            self._oldest_first[-1].num_passes += 1
        return path

    def _give_up_oldest(self) -> None:
        oldest = self._oldest_first.popleft()
        if oldest.path == self._writer.path:
            self._writer.close()
        index_path_of(oldest.path).unlink(missing_ok=True)  # first: a segment without one loses nothing
        oldest.path.unlink(missing_ok=True)
        self._num_bytes -= oldest.num_bytes
        self.num_given_up += oldest.num_passes

    def commit(self) -> None:
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()


def _entries_in(places: set[Path]) -> Iterator["os.DirEntry[str]"]:
    for place in sorted(places):
        if place.is_dir():
            yield from os.scandir(place)


def _segments_of(rank: int, places: set[Path]) -> Iterator[tuple[Path, int]]:
    """List a rank's segments, each with its bytes and its index's."""
    sizes: dict[Path, int] = {}
    for entry in _entries_in(places):
        path = Path(entry.path)
        if path.suffix in (SEGMENT_SUFFIX, INDEX_SUFFIX) and parse_rank(path) == rank:
            segment = path.with_suffix(SEGMENT_SUFFIX)
            sizes[segment] = sizes.get(segment, 0) + entry.stat().st_size
    yield from sizes.items()


def _entries_of(manifest: Path) -> list[ManifestEntry]:
    """Read a manifest; a damaged one, which `capture check` reports, has no entries. Raises OSError."""
    try:
        return read_manifest(manifest)
    except CaptureError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        return []
