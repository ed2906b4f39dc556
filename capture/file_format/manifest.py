"""Write and read manifests: `manifest_rank<rank>_<time>.json` lists what a rank's recording committed, written last.

A folder whose recording was cut short has files and no manifest for them; they are as readable as the others.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from capture.file_format.atomic_write import write_atomically
from capture.file_format.capture_file import FORMAT, Call, capture_files, read_call
from capture.file_format.micro_batch import CaptureError

MAX_MANIFEST_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One committed file in a manifest."""

    name: str
    num_bytes: int
    crc32: int  # of the whole file
    rank: int | None
    step: int | None
    trains: bool
    shapes: Mapping[str, Sequence[int]]  # by argument


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderCheck:
    """The files of a folder as `check_folder` found them, by name."""

    good: list[str] = field(default_factory=list)
    uncommitted: list[str] = field(default_factory=list)  # good, but no manifest has them
    damaged: dict[str, str] = field(default_factory=dict)  # name: what is wrong
    missing: list[str] = field(default_factory=list)  # in a manifest, and gone
    num_manifests: int = 0

    @property
    def is_whole(self) -> bool:
        return not self.damaged and not self.missing


def entry_of(path: Path, call: Call) -> Entry:
    """Describe the file at `path`, which holds `call`. Raises OSError."""
    data = path.read_bytes()
    return Entry(
        name=path.name,
        num_bytes=len(data),
        crc32=zlib.crc32(data),
        rank=call.origin.rank,
        step=call.origin.step,
        trains=call.trains,
        shapes={name: list(tensor.shape) for name, tensor in call.tensors.items()},
    )


def stamp_of(time: str) -> str:
    """Turn an ISO 8601 time into a part of a file name."""
    return "".join(c if c.isdigit() else "_" for c in time.partition("+")[0])


def write_manifest(folder: Path, entries: Sequence[Entry], *, rank: int, time: str) -> Path:
    """Write a rank's manifest and return its path. `time` tells recordings into one folder apart. Raises OSError."""
    path = folder / f"manifest_rank{rank}_{stamp_of(time)}.json"
    rewrite_manifest(path, entries)
    return path


def rewrite_manifest(path: Path, entries: Sequence[Entry]) -> None:
    """Replace the manifest at `path`. Raises OSError."""
    content = {"format": FORMAT, "files": [asdict(entry) for entry in entries]}
    write_atomically(path, json.dumps(content, indent=1).encode())


def read_manifest(path: Path) -> list[Entry]:
    """Read the entries of a manifest. Raises CaptureError for a file that is no manifest."""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CaptureError(f"{path.name}: larger than {MAX_MANIFEST_BYTES} bytes, which no manifest is")
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(f"{path.name}: cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("files"), list):
        raise CaptureError(f"{path.name}: no manifest of format {FORMAT}")
    names = {f.name for f in fields(Entry)}
    for item in content["files"]:
        if not isinstance(item, dict) or item.keys() != names or not isinstance(item["name"], str):
            raise CaptureError(f"{path.name}: an entry that is none: {str(item)[:80]}")
        if Path(item["name"]).name != item["name"]:
            raise CaptureError(f"{path.name}: names a file outside its folder: {item['name'][:80]}")
    return [Entry(**item) for item in content["files"]]


def check_folder(folder: Path) -> FolderCheck:
    """Read every file and compare it with the manifests. Raises CaptureError without a folder."""
    present = capture_files(folder)
    manifests = sorted(folder.glob("manifest_rank*.json"))
    result = FolderCheck(num_manifests=len(manifests))
    entries: dict[str, Entry] = {}
    for path in manifests:
        try:
            entries |= {entry.name: entry for entry in read_manifest(path)}
        except CaptureError as error:
            result.damaged[path.name] = str(error)
    for path in present:
        try:
            actual = entry_of(path, read_call(path))
        except (CaptureError, OSError) as error:
            result.damaged[path.name] = str(error)
            continue
        committed = entries.get(path.name)
        if committed is None:
            result.uncommitted.append(path.name)
        elif (committed.num_bytes, committed.crc32) != (actual.num_bytes, actual.crc32):
            result.damaged[path.name] = f"{path.name}: reads, but is not the file that the manifest has"
            continue
        result.good.append(path.name)
    result.missing.extend(sorted(entries.keys() - {path.name for path in present}))
    return result
