"""What ranks on one node write, as the driver of a Ray job gets it: a node may share no disk with the driver."""

import shutil
from pathlib import Path
from typing import NamedTuple

MOST_BYTES_AT_ONCE = 16 * 2**20
OVERLAP_BYTES = 2**18  # sent again of a file that grew: a rank rewrites the latest line of its log


class Change(NamedTuple):
    """A part of a file: `data` begins at `offset`, and the file ends behind it unless more follows."""

    name: str  # relative to the folder
    offset: int
    data: bytes
    num_bytes: int  # of the whole file

    @property
    def is_whole_text(self) -> bool:
        return self.offset == 0 and self.name.endswith((".json", ".txt"))


class NodeFiles:
    """Reads what changes below a folder. It runs as a Ray actor on the node, so it outlives ranks that die there."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._seen: dict[str, tuple[int, int, int]] = {}  # by name: inode, modification time, bytes that were sent

    def news(self) -> list[Change]:
        """Return what was written since the last call, a file that was replaced or rewritten whole.

        An empty list says that all has been sent.
        """
        changes: list[Change] = []
        left = MOST_BYTES_AT_ONCE
        for path in sorted(self.folder.rglob("*")):
            if left <= 0:
                break
            try:
                facts = path.stat()
                name = path.relative_to(self.folder).as_posix()
                inode, modified, sent = self._seen.get(name, (0, 0, 0))
                if not path.is_file() or ".tmp" in path.suffixes:
                    continue
                if (inode, modified, sent) == (facts.st_ino, facts.st_mtime_ns, facts.st_size):
                    continue
                goes_on = inode == facts.st_ino and 0 < sent <= facts.st_size
                begin = max(0, sent - OVERLAP_BYTES) if goes_on else 0
                with path.open("rb") as file:
                    file.seek(begin)
                    data = file.read(left)
            except FileNotFoundError:  # replaced between the listing and here: the next call gets it
                continue
            left -= len(data)
            changes.append(Change(name, begin, data, max(facts.st_size, begin + len(data))))
            self._seen[name] = (facts.st_ino, facts.st_mtime_ns, begin + len(data))
        return changes

    def forget(self, name: str) -> None:
        """Remove the file or folder `name`, and what is known of it."""
        path = self.folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        self._seen = {seen: facts for seen, facts in self._seen.items() if not f"{seen}/".startswith(f"{name}/")}


def write(change: Change, folder: Path) -> None:
    """Write a change below the driver's folder."""
    path = folder / change.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(change.offset)
        file.write(change.data)
        file.truncate()
