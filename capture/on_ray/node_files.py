"""Send the files below a folder of one node home: a node may share no disk with the driver of a Ray job."""

import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_BYTES_PER_ANSWER = 16 * 2**20
OVERLAP_BYTES = 2**18  # sent again of a file that grew: a rank rewrites the latest line of its log
_CHECKED_AT_ONCE = 2**20
DELETED = -1
_SHARED_MEMORY = Path("/dev/shm")


class FileChange(NamedTuple):
    """A part of a file: `data` begins at `offset`, and the file ends behind it unless more follows."""

    name: str  # relative to the folder
    offset: int
    data: bytes
    num_bytes: int  # of the whole file; DELETED
    modified_ns: int = 0  # when the part was read

    @property
    def is_whole_text(self) -> bool:
        return self.offset == 0 and self.name.endswith((".json", ".txt"))


class FileState(NamedTuple):
    """A file of the node, by its name relative to the folder."""

    num_bytes: int
    modified_ns: int


class SalvageResult(NamedTuple):
    """What came of flight recorders that dead processes left in this node's memory."""

    num_passes: int
    problem: str | None  # why passes could not be written; they are still in memory


class NodeFiles:
    """Reads files below a folder. It runs as a Ray actor on the node, so it outlives ranks that die there.

    folder  variables of the node's environment and `~` are filled in
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(os.path.expandvars(folder)).expanduser()
        self._seen: dict[str, tuple[int, int, int]] = {}  # by name: inode, modification time, bytes that were sent

    def news(self) -> list[FileChange]:
        """Return changes since the last call: what was appended, files that were replaced or rewritten, and deletions.

        An empty list says that all has been sent.
        """
        changes: list[FileChange] = []
        left = MAX_BYTES_PER_ANSWER
        files = list(self._files())
        for name in self._seen.keys() - {name for name, _, _ in files}:
            changes.append(FileChange(name, 0, b"", DELETED))
            del self._seen[name]
        for name, path, facts in files:
            if left <= 0:
                break
            inode, modified, sent = self._seen.get(name, (0, 0, 0))
            if (inode, modified, sent) == (facts.st_ino, facts.st_mtime_ns, facts.st_size):
                continue
            goes_on = inode == facts.st_ino and 0 < sent <= facts.st_size
            begin = max(0, sent - OVERLAP_BYTES) if goes_on else 0
            try:
                data = _read(path, begin, left)
            except FileNotFoundError:  # replaced between the listing and here: the next call gets it
                continue
            left -= len(data)
            changes.append(FileChange(name, begin, data, max(facts.st_size, begin + len(data))))
            self._seen[name] = (facts.st_ino, facts.st_mtime_ns, begin + len(data))
        return changes

    def listing(self) -> dict[str, FileState] | None:
        """List the files by name; None if the node has no such folder. Temporaries are left out."""
        if not self.folder.is_dir():
            return None
        return {name: FileState(facts.st_size, facts.st_mtime_ns) for name, _, facts in self._files()}

    def num_unfinished(self) -> int:
        """Count the temporaries: files that are being written, or that a killed process did not finish."""
        return sum(1 for path in self.folder.rglob("*") if _is_temporary(path) and path.is_file())

    def parts(self, wanted: Sequence[tuple[str, int, int]]) -> list[FileChange | str]:
        """Read each file from an offset to an end, in order, until one answer is full.

        wanted  name, offset and end of each; the end is that of the file as it was listed

        Returns as many as were reached, the last one perhaps in part; a text says why a file cannot be read.
        """
        found: list[FileChange | str] = []
        left = MAX_BYTES_PER_ANSWER
        for name, offset, end in wanted:
            if left <= 0:
                break
            try:
                with (self.folder / name).open("rb") as file:
                    file.seek(offset)
                    data = file.read(min(left, end - offset))
                    facts = os.fstat(file.fileno())
            except OSError as error:
                found.append(error.strerror or str(error))
                continue
            left -= len(data)
            found.append(FileChange(name, offset, data, facts.st_size, facts.st_mtime_ns))
        return found

    def checksums(self, beginnings: Sequence[tuple[str, int]]) -> list[int | None]:
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

    def forget(self, name: str) -> None:
        """Remove the file or folder `name`, and what is known of it."""
        path = self.folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        self._seen = {seen: facts for seen, facts in self._seen.items() if not f"{seen}/".startswith(f"{name}/")}

    def _files(self) -> Iterator[tuple[str, Path, os.stat_result]]:
        for path in sorted(self.folder.rglob("*")):
            try:
                facts = path.stat()
                is_file = path.is_file()
            except OSError:  # replaced or deleted since it was listed
                continue
            if is_file and not _is_temporary(path):
                yield path.relative_to(self.folder).as_posix(), path, facts


def _is_temporary(path: Path) -> bool:
    return ".tmp" in path.suffixes


def _read(path: Path, begin: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(num_bytes)


def compute_checksum(path: Path, num_bytes: int) -> int | None:
    """Compute the CRC-32 of a file's first bytes; None if it cannot be read or has fewer."""
    crc = 0
    try:
        with path.open("rb") as file:
            while num_bytes > 0 and (data := file.read(min(num_bytes, _CHECKED_AT_ONCE))):
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
