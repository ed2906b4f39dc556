"""Send the files below a folder of one node to the driver of a Ray job, with which the node may share no disk."""

import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_BYTES_PER_ANSWER = 16 * 2**20
# So much of a file that grew is sent again: a rank rewrites the latest line of its log.
OVERLAP_BYTES = 2**18
_CHECKSUM_CHUNK_BYTES = 2**20
# What a change has for the size of a file that was deleted.
DELETED = -1
_SHARED_MEMORY = Path("/dev/shm")


class FileChange(NamedTuple):
    """A part of a file: `data` begins at `offset`, and the file ends behind it unless more follows.

    name         path relative to the folder
    num_bytes    size of the whole file, or DELETED
    modified_ns  when the file was last changed, as of reading the part
    """

    name: str
    offset: int
    data: bytes
    num_bytes: int
    modified_ns: int = 0

    @property
    def is_whole_text(self) -> bool:
        return self.offset == 0 and self.name.endswith((".json", ".txt"))


class FileState(NamedTuple):
    """The size of a file of the node, and when it was last changed."""

    num_bytes: int
    modified_ns: int


class SalvageResult(NamedTuple):
    """What came of flight recorders that dead processes left in this node's memory.

    problem  why passes could not be written; they are still in memory
    """

    num_passes: int
    problem: str | None


class NodeFiles:
    """Reads files below a folder. It runs as a Ray actor on the node, so it outlives ranks that die there.

    folder     variables of the node's environment and `~` are filled in
    max_bytes  what one answer holds of files at most
    """

    def __init__(self, folder: str, *, max_bytes: int = MAX_BYTES_PER_ANSWER) -> None:
        self.folder = Path(os.path.expandvars(folder)).expanduser()
        self._max_bytes = max_bytes
        # What is known of each file that was sent, by name: inode, modification time, bytes that were sent.
        self._sent: dict[str, tuple[int, int, int]] = {}

    def read_changes(self) -> list[FileChange]:
        """Read the changes since the last call: what was appended, files that were replaced or rewritten, deletions.

        An empty list tells that everything has been sent.
        """
        changes: list[FileChange] = []
        num_bytes_left = self._max_bytes
        files = list(self._list_files())
        for name in self._sent.keys() - {name for name, _, _ in files}:
            changes.append(FileChange(name, 0, b"", DELETED))
            del self._sent[name]
        for name, path, facts in files:
            if num_bytes_left <= 0:
                break
            inode, modified_ns, num_sent = self._sent.get(name, (0, 0, 0))
            if (inode, modified_ns, num_sent) == (facts.st_ino, facts.st_mtime_ns, facts.st_size):
                continue
            has_grown = inode == facts.st_ino and 0 < num_sent <= facts.st_size
            begin = max(0, num_sent - OVERLAP_BYTES) if has_grown else 0
            # The file may have been replaced since it was listed. Then the next call reads it.
            try:
                data = _read_bytes(path, begin, num_bytes_left)
            except FileNotFoundError:
                continue
            num_bytes_left -= len(data)
            changes.append(FileChange(name, begin, data, max(facts.st_size, begin + len(data))))
            self._sent[name] = (facts.st_ino, facts.st_mtime_ns, begin + len(data))
        return changes

    def list_files(self) -> dict[str, FileState] | None:
        """List the files by name; None if the node has no such folder. Temporaries are left out."""
        if not self.folder.is_dir():
            return None
        return {name: FileState(facts.st_size, facts.st_mtime_ns) for name, _, facts in self._list_files()}

    def count_temporaries(self) -> int:
        """Count the temporaries: files that are being written, or that a killed process did not finish."""
        return sum(1 for path in self.folder.rglob("*") if _is_temporary(path) and path.is_file())

    def read_parts(self, ranges: Sequence[tuple[str, int, int]]) -> list[FileChange | str]:
        """Read each file from an offset to an end, in order, until one answer is full.

        ranges  name, offset and end of each; the end is that of the file as it was listed

        Returns a part of each file that there was room for, the last one perhaps cut; a text says why a file cannot be
        read.
        """
        parts: list[FileChange | str] = []
        num_bytes_left = self._max_bytes
        for name, offset, end in ranges:
            if num_bytes_left <= 0:
                break
            try:
                with (self.folder / name).open("rb") as file:
                    file.seek(offset)
                    data = file.read(min(num_bytes_left, end - offset))
                    facts = os.fstat(file.fileno())
            except OSError as error:
                parts.append(error.strerror or str(error))
                continue
            num_bytes_left -= len(data)
            parts.append(FileChange(name, offset, data, facts.st_size, facts.st_mtime_ns))
        return parts

    def compute_checksums(self, beginnings: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the CRC-32 of the first so many bytes of each file; None if it cannot be read or is shorter."""
        return [compute_checksum(self.folder / name, num_bytes) for name, num_bytes in beginnings]

    def salvage(self) -> SalvageResult:
        """Write the flight recorders of dead processes of this node into the folder.

        Needs micro-replay on the node, and imports it only where a process that recorded may have died.
        """
        if not (_SHARED_MEMORY.is_dir() and self.folder.is_dir() and any(_SHARED_MEMORY.glob("capture-*"))):
            return SalvageResult(0, None)
        try:
            from capture.black_box.salvage import salvage
            from capture.record.retention import RetentionSettings

            return SalvageResult(salvage(self.folder, RetentionSettings()), None)
        except ImportError as error:
            return SalvageResult(0, f"flight recorders in its memory cannot be read: {error}")
        except OSError as error:
            return SalvageResult(
                0, f"flight recorders in its memory cannot be written to {self.folder}: {error.strerror}"
            )

    def remove(self, name: str) -> None:
        """Remove the file or folder `name`, and what is known of it."""
        path = self.folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        self._sent = {sent: facts for sent, facts in self._sent.items() if not f"{sent}/".startswith(f"{name}/")}

    def _list_files(self) -> Iterator[tuple[str, Path, os.stat_result]]:
        for path in sorted(self.folder.rglob("*")):
            # The file may have been replaced or deleted since it was listed.
            try:
                facts = path.stat()
                is_file = path.is_file()
            except OSError:
                continue
            if is_file and not _is_temporary(path):
                yield path.relative_to(self.folder).as_posix(), path, facts


def _is_temporary(path: Path) -> bool:
    return ".tmp" in path.suffixes


def _read_bytes(path: Path, begin: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(num_bytes)


def compute_checksum(path: Path, num_bytes: int) -> int | None:
    """Compute the CRC-32 of a file's first bytes; None if it cannot be read or has fewer."""
    crc = 0
    try:
        with path.open("rb") as file:
            while num_bytes > 0 and (data := file.read(min(num_bytes, _CHECKSUM_CHUNK_BYTES))):
                crc = zlib.crc32(data, crc)
                num_bytes -= len(data)
    except OSError:
        return None
    return None if num_bytes else crc


def write_change(change: FileChange, folder: Path) -> None:
    """Make a change below the driver's folder."""
    path = folder / change.name
    if change.num_bytes == DELETED:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(change.offset)
        file.write(change.data)
        file.truncate()
