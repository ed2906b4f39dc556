"""Say that a rank of several closed its recording, after how many passes: `end_rank<r>_<time>.json`.

A rank that was killed, or that still hangs, has none. So of a job that hung it tells which rank's loop was over, and of
a recording that a limit cut short how many passes there were.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from capture.file_format.atomic_write import write_atomically
from capture.file_format.folder_layout import homes_in, make_home
from capture.file_format.micro_batch import CaptureError

FORMAT = 1
_MAX_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRecord:
    """How one rank's recording ended, and where in its last pass. `opened` and `time` are ISO 8601, UTC."""

    rank: int
    world_size: int
    num_passes: int
    num_steps: int | None  # of the optimizer; None: not seen
    place: str
    opened: str
    time: str


_KINDS: dict[str, Any] = {
    "rank": int,
    "world_size": int,
    "num_passes": int,
    "num_steps": int | None,
    "place": str,
    "opened": str,
    "time": str,
}
assert _KINDS.keys() == {one.name for one in fields(EndRecord)}


def write_end(home: Path, end: EndRecord, *, stamp: str) -> None:
    """Write a rank's end record into its folder. Raises OSError."""
    make_home(home)
    write_atomically(home / f"end_rank{end.rank}_{stamp}.json", json.dumps({"format": FORMAT, **asdict(end)}).encode())


def read_ends(folder: Path) -> list[EndRecord]:
    """Read the end records of a folder and of its ranks' folders. Raises CaptureError for a damaged one."""
    return [_read(path) for home in homes_in(folder) for path in sorted(home.glob("end_rank*.json"))]


def _read(path: Path) -> EndRecord:
    try:
        with open(path, "rb") as file:
            content: Any = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{path.name}: cannot be read: {error}. Delete the file or copy it again") from None
    is_ours = isinstance(content, dict) and content.pop("format", None) == FORMAT and content.keys() == _KINDS.keys()
    if is_ours and all(isinstance(content[name], kind) for name, kind in _KINDS.items()):
        return EndRecord(**content)
    raise CaptureError(f"{path.name}: no end of a recording of format {FORMAT}. Delete the file or copy it again")
