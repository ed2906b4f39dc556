"""Write one rank's files within its limits: room is made before a file, and the manifest is written after it."""

import re
import zlib
from collections import deque
from pathlib import Path

from capture.file_format.atomic_write import remove_stale_temporaries, write_atomically
from capture.file_format.capture_file import EncodedCall
from capture.file_format.manifest import Entry, read_manifest, rewrite_manifest, write_manifest
from capture.file_format.micro_batch import CaptureError
from capture.record.retention import Keep

MANIFEST_BYTES_A_FILE = 1024  # set aside for its entry
_MIN_FILES_BETWEEN_MANIFESTS = 16


class RankFiles:
    """One rank's files in the folder, for one thread. Every method raises OSError where the disk fails.

    num_given_up  files of this recording that made room for later ones
    """

    def __init__(self, folder: Path, keep: Keep, *, rank: int, stamp: str) -> None:
        self.rank = rank
        self.num_given_up = 0
        self._folder = folder
        self._keep = keep
        self._stamp = stamp
        self._entries: dict[str, Entry] = {}
        self._num_listed = 0
        remove_stale_temporaries(folder, rank)
        own = re.compile(rf"actor_inputs_rank{rank}_.*\.pkl")
        own_files = sorted(path for path in folder.iterdir() if own.fullmatch(path.name))
        self._oldest_first = deque((path, self._charge(path.stat().st_size)) for path in own_files)
        self._num_bytes = sum(charge for _, charge in self._oldest_first)
        self._listed = self._listed_before() if keep.keep == "last" else set()

    def _charge(self, num_bytes: int) -> int:
        return num_bytes + MANIFEST_BYTES_A_FILE

    def has_room(self, num_bytes: int) -> bool:
        max_files, max_bytes = self._keep.max_files, self._keep.max_bytes
        return (max_files is None or len(self._oldest_first) < max_files) and (
            max_bytes is None or self._num_bytes + self._charge(num_bytes) <= max_bytes
        )

    def write(self, encoded: EncodedCall) -> Path | None:
        """Write a pass. Returns None if there is no room: under `keep="first"`, or for a file of this size."""
        parts = encoded.parts()
        num_bytes = sum(len(part) for part in parts)
        max_bytes = self._keep.max_bytes
        if max_bytes is not None and self._charge(num_bytes) > max_bytes:
            return None
        while not self.has_room(num_bytes):
            if self._keep.keep == "first":
                return None
            self._give_up_oldest()
        path = encoded.new_path(self._folder)
        write_atomically(path, *parts)
        self._oldest_first.append((path, self._charge(num_bytes)))
        self._num_bytes += self._charge(num_bytes)
        self._entries[path.name] = Entry(
            name=path.name,
            num_bytes=num_bytes,
            crc32=zlib.crc32(parts[1], zlib.crc32(parts[0])),
            rank=encoded.rank,
            step=encoded.step,
            trains=encoded.body["trains"],
            shapes={name: list(record["shape"]) for name, record in encoded.body["tensors"].items()},
        )
        num_new = len(self._entries) - self._num_listed
        if self._keep.keep == "first" and num_new >= max(_MIN_FILES_BETWEEN_MANIFESTS, self._num_listed // 4):
            self.write_manifest()
        return path

    def write_manifest(self) -> None:
        if self._entries:
            write_manifest(self._folder, list(self._entries.values()), rank=self.rank, time=self._stamp)
            self._num_listed = len(self._entries)
            self._listed.update(self._entries)

    def _listed_before(self) -> set[str]:
        names: set[str] = set()
        for manifest in self._folder.glob(f"manifest_rank{self.rank}_*.json"):
            names.update(entry.name for entry in _entries_of(manifest))
        return names

    def _give_up_oldest(self) -> None:
        """Delete the oldest file, out of the manifest first: so a recording that is cut short misses no file."""
        path, charge = self._oldest_first[0]
        if path.name in self._listed:
            for manifest in self._folder.glob(f"manifest_rank{self.rank}_*.json"):
                self._unlist(manifest, path.name)
            self._listed.remove(path.name)
        path.unlink(missing_ok=True)
        self._oldest_first.popleft()
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


def _entries_of(manifest: Path) -> list[Entry]:
    """Read a manifest; a damaged one, which `capture check` reports, has no entries. Raises OSError."""
    try:
        return read_manifest(manifest)
    except CaptureError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        return []
