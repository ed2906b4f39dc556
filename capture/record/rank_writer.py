"""Write one rank's passes, as files of one pass each or into segments, and make room first where there are limits."""

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

# What a file's entry in the manifest may take of `max_bytes`.
MANIFEST_BYTES_PER_FILE = 1024
_MIN_FILES_BETWEEN_MANIFESTS = 16


class RankWriter(Protocol):
    """Writes one rank's passes, for one thread. Every method raises OSError where the disk fails.

    rank_folder  the folder that the passes go to
    num_deleted  passes of this recording that made room for later ones
    had_passes   whether this rank's passes of another recording were there before
    """

    rank_folder: Path
    num_deleted: int
    had_passes: bool

    def write(self, encoded: EncodedCall) -> Path | None:
        """Write a pass. Returns None if there is no room: under `keep="first"`, or for a pass of this size."""

    def commit(self) -> None:
        """List what was written in manifests, and have the disk hold it."""

    def close(self) -> None:
        """Close open files. It raises nothing."""


def open_rank_writer(
    folder: Path, retention: RetentionSettings, *, rank: int, world_size: int | None, stamp: str
) -> RankWriter:
    """Prepare the folder for a rank's passes. `stamp`, a time, tells recordings apart. Raises OSError."""
    rank_folder = choose_rank_folder(
        folder, rank=rank, world_size=world_size, in_segments=retention.segment is not None
    )
    for existing in _list_homes(folder, rank):
        if existing.is_dir():
            remove_stale_temporaries(existing, rank)
    repair_segments(rank_folder, rank)
    if retention.segment is None:
        return RankFiles(folder, rank_folder, retention, rank=rank, stamp=stamp)
    return RankSegments(folder, rank_folder, retention, segment=retention.segment, rank=rank, stamp=stamp)


class RankFiles:
    """Writes a file for each pass. It remembers a number of files that has a limit, however many passes there are.

    Segments of earlier recordings count for the limit, and stay.

    max_entries  files that one manifest lists; a further file begins a new one
    """

    def __init__(
        self,
        folder: Path,
        rank_folder: Path,
        retention: RetentionSettings,
        *,
        rank: int,
        stamp: str,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self.rank_folder = rank_folder
        self.num_deleted = 0
        self._max_entries = max_entries
        self._folder = folder
        self._rank = rank
        self._retention = retention
        self._stamp = stamp
        # What the manifest says of each file, by its name. It is kept as text: a manifest is written many times.
        self._entries: dict[str, str] = {}
        self._num_listed = 0
        self._num_manifests = 0
        homes = _list_homes(folder, rank)
        files = sorted(_list_pass_files(rank, homes), key=lambda file: (file.name, file.path))
        sizes = [_count_with_entry(file.stat().st_size) for file in files]
        self._num_files = len(files)
        self._num_bytes = sum(sizes) + sum(size for _, size in _list_segments(rank, homes))
        self.had_passes = self._num_bytes > 0
        self._oldest_first: deque[tuple[Path, int]] = deque()
        # Names that are in a manifest on the disk.
        self._listed_names: set[str] = set()
        if retention.keep == "last":
            self._oldest_first.extend((Path(file.path), size) for file, size in zip(files, sizes, strict=True))
            self._listed_names = self._read_listed_names()

    @property
    def num_remembered(self) -> int:
        """Return how many files it remembers now."""
        return max(len(self._entries), len(self._oldest_first))

    def _has_room(self, num_bytes: int) -> bool:
        max_files, max_bytes = self._retention.max_files, self._retention.max_bytes
        return (max_files is None or self._num_files < max_files) and (
            max_bytes is None or self._num_bytes + _count_with_entry(num_bytes) <= max_bytes
        )

    def write(self, encoded: EncodedCall) -> Path | None:
        parts = encoded.pickle_parts()
        num_bytes = sum(len(part) for part in parts)
        max_bytes = self._retention.max_bytes
        if max_bytes is not None and _count_with_entry(num_bytes) > max_bytes:
            return None
        while not self._has_room(num_bytes):
            if not self._oldest_first:
                return None
            self._delete_oldest()
        if self.rank_folder != self._folder:
            make_rank_folder(self.rank_folder)
        path = encoded.choose_path(self.rank_folder)
        write_atomically(path, *parts)
        self._num_files += 1
        self._num_bytes += _count_with_entry(num_bytes)
        self._entries[path.name] = ManifestEntry(
            name=path.name,
            num_bytes=num_bytes,
            crc32=zlib.crc32(parts[1], zlib.crc32(parts[0])),
            rank=encoded.rank,
            step=encoded.step,
            trains=encoded.body["trains"],
            shapes={name: list(record["shape"]) for name, record in encoded.body["tensors"].items()},
        ).to_json()
        if self._retention.keep == "last":
            self._oldest_first.append((path, _count_with_entry(num_bytes)))
            return path
        num_new = len(self._entries) - self._num_listed
        if num_new >= max(_MIN_FILES_BETWEEN_MANIFESTS, self._num_listed // 4):
            self.commit()
        if len(self._entries) >= self._max_entries:
            self._begin_manifest()
        return path

    def commit(self) -> None:
        if not self._entries or self._num_listed == len(self._entries):
            return
        names = list(self._entries)
        for begin in range(0, len(names), self._max_entries):
            entries = [self._entries[name] for name in names[begin : begin + self._max_entries]]
            number = self._num_manifests + begin // self._max_entries
            write_manifest(self.rank_folder, entries, rank=self._rank, time=self._stamp, number=number)
        self._num_listed = len(self._entries)
        self._listed_names.update(self._entries if self._retention.keep == "last" else ())

    def _begin_manifest(self) -> None:
        self.commit()
        self._num_manifests += 1
        self._entries.clear()
        self._num_listed = 0

    def close(self) -> None:
        pass

    def _read_listed_names(self) -> set[str]:
        return {entry.name for manifest in self._list_manifests() for entry in _read_entries(manifest)}

    def _list_manifests(self) -> list[Path]:
        manifest_name = re.compile(rf"manifest_rank{self._rank}_.*\.json")
        files = _scan_folders(_list_homes(self._folder, self._rank))
        return [Path(file.path) for file in files if manifest_name.fullmatch(file.name)]

    def _delete_oldest(self) -> None:
        """Delete the oldest file, first from the manifest: so no manifest lists a missing file if the process dies."""
        path, num_bytes = self._oldest_first[0]
        if path.name in self._listed_names:
            for manifest in self._list_manifests():
                self._remove_entry(manifest, path.name)
            self._listed_names.remove(path.name)
        path.unlink(missing_ok=True)
        self._oldest_first.popleft()
        self._num_files -= 1
        self._num_bytes -= num_bytes
        if self._entries.pop(path.name, None) is not None:
            self.num_deleted += 1

    def _remove_entry(self, manifest: Path, name: str) -> None:
        entries = _read_entries(manifest)
        remaining = [entry for entry in entries if entry.name != name]
        if len(remaining) == len(entries):
            return
        if remaining:
            rewrite_manifest(manifest, remaining)
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
        self, folder: Path, rank_folder: Path, retention: RetentionSettings, *, segment: int, rank: int, stamp: str
    ) -> None:
        self.rank_folder = rank_folder
        self.num_deleted = 0
        self._retention = retention
        self._writer = SegmentWriter(rank_folder, rank=rank, stamp=format_stamp(stamp), max_bytes=segment)
        homes = _list_homes(folder, rank)
        files = _list_pass_files(rank, homes)
        segments = sorted(_list_segments(rank, homes))
        self._num_bytes = sum(_count_with_entry(file.stat().st_size) for file in files)
        self._num_bytes += sum(size for _, size in segments)
        self.had_passes = self._num_bytes > 0
        self._oldest_first: deque[_SegmentUsage] = deque()
        if retention.keep == "last":
            self._oldest_first.extend(_SegmentUsage(path=path, num_bytes=size) for path, size in segments)

    def write(self, encoded: EncodedCall) -> Path | None:
        parts, record, head = encoded.pickle_parts(), encoded.segment_record(), encoded.segment_head()
        num_pass_bytes = sum(map(len, parts))
        begins_segment = self._writer.will_begin(head, num_pass_bytes, record.number)
        # The segment and its index each hold a record of every pass, and the head once.
        num_bytes = num_pass_bytes + 2 * RECORD_BYTES + 2 * len(head.pack()) * begins_segment
        while self._retention.max_bytes is not None and self._num_bytes + num_bytes > self._retention.max_bytes:
            only_open_segment_is_left = len(self._oldest_first) == 1 and not begins_segment
            if not self._oldest_first or only_open_segment_is_left:
                return None
            self._delete_oldest()
        path = self._writer.append(parts, record, head)
        self._num_bytes += num_bytes
        if self._retention.keep == "last":
            if begins_segment:
                self._oldest_first.append(_SegmentUsage(path=path.parent))
            self._oldest_first[-1].num_bytes += num_bytes
            self._oldest_first[-1].num_passes += 1
        return path

    def _delete_oldest(self) -> None:
        oldest = self._oldest_first.popleft()
        if oldest.path == self._writer.path:
            self._writer.close()
        # The index goes first: if the process dies in between, a segment without an index is still whole.
        index_path_of(oldest.path).unlink(missing_ok=True)
        oldest.path.unlink(missing_ok=True)
        self._num_bytes -= oldest.num_bytes
        self.num_deleted += oldest.num_passes

    def commit(self) -> None:
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()


def _list_homes(folder: Path, rank: int) -> set[Path]:
    """List the folders that passes of this rank may be in, whichever of them this recording writes to."""
    return {choose_rank_folder(folder, rank=rank, world_size=None, in_segments=alone) for alone in (False, True)}


def _count_with_entry(num_bytes: int) -> int:
    """Count the bytes of a file of one pass with those of its entry in a manifest."""
    return num_bytes + MANIFEST_BYTES_PER_FILE


def _scan_folders(folders: set[Path]) -> Iterator["os.DirEntry[str]"]:
    """List the files of these folders, as far as the folders exist."""
    for folder in sorted(folders):
        if folder.is_dir():
            yield from os.scandir(folder)


def _list_pass_files(rank: int, folders: set[Path]) -> list["os.DirEntry[str]"]:
    """List a rank's files of one pass each."""
    file_name = re.compile(rf"actor_inputs_rank{rank}_.*\.pkl")
    return [file for file in _scan_folders(folders) if file_name.fullmatch(file.name)]


def _list_segments(rank: int, folders: set[Path]) -> Iterator[tuple[Path, int]]:
    """List a rank's segments, each with the bytes of itself and its index."""
    sizes: dict[Path, int] = {}
    for file in _scan_folders(folders):
        path = Path(file.path)
        if path.suffix in (SEGMENT_SUFFIX, INDEX_SUFFIX) and parse_rank(path) == rank:
            segment = path.with_suffix(SEGMENT_SUFFIX)
            sizes[segment] = sizes.get(segment, 0) + file.stat().st_size
    yield from sizes.items()


def _read_entries(manifest: Path) -> list[ManifestEntry]:
    """Read a manifest. A damaged one has no entries: `capture check` reports it. Raises OSError."""
    try:
        return read_manifest(manifest)
    except CaptureError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        return []
