"""Say that a rank closed its recording, after how many passes: `end_rank<r>_<time>.json`.

A rank of several writes it, and one that could not record some of the job's training passes.

A rank that was killed, or that still hangs, has none. So of a job that hung it tells which rank's loop was over, and of
a recording that a limit cut short how many passes there were.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any

from capture.file_format.atomic_write import write_atomically
from capture.file_format.folder_layout import homes_in, make_home
from capture.file_format.micro_batch import CaptureError

FORMAT = 1
_MAX_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRecord:
    """How one rank's recording ended, and where in its last pass. `opened` and `time` are ISO 8601, UTC.

    not_recorded  training passes that no replay could make from their arguments, by the reason
    """

    rank: int
    world_size: int
    num_passes: int
    num_steps: int | None  # of the optimizer; None: not seen
    place: str
    opened: str
    time: str
    not_recorded: Mapping[str, int] = field(default_factory=dict)


_KINDS: dict[str, type | UnionType] = {
    "rank": int,
    "world_size": int,
    "num_passes": int,
    "num_steps": int | None,
    "place": str,
    "opened": str,
    "time": str,
    "not_recorded": dict,
}
assert _KINDS.keys() == {one.name for one in fields(EndRecord)}


def write_end(home: Path, end: EndRecord, *, stamp: str) -> None:
    """Write a rank's end record into its folder. Raises OSError."""
    make_home(home)
    write_atomically(home / f"end_rank{end.rank}_{stamp}.json", json.dumps({"format": FORMAT, **asdict(end)}).encode())


def read_ends(folder: Path) -> list[EndRecord]:
    """Read the end records of a folder and of its ranks' folders. Raises CaptureError for a damaged one."""
    return [_read(path) for home in homes_in(folder) for path in sorted(home.glob("end_rank*.json"))]


def not_recorded_in(folder: Path) -> dict[str, int]:
    """Count by reason the training passes that recordings into a folder saw and could not keep.

    Raises CaptureError for a damaged end record.
    """
    return dict(sum((Counter(end.not_recorded) for end in read_ends(folder)), Counter()))


def _read(path: Path) -> EndRecord:
    try:
        with open(path, "rb") as file:
            content: Any = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{path.name}: cannot be read: {error}. Delete the file or copy it again") from None
    if (
        isinstance(content, dict)
        and content.pop("format", None) == FORMAT
        and content.keys() == _KINDS.keys()
        and all(isinstance(content[name], kind) for name, kind in _KINDS.items())
        and all(type(number) is int for number in content["not_recorded"].values())
    ):
        return EndRecord(**content)
    raise CaptureError(f"{path.name}: no end of a recording of format {FORMAT}. Delete the file or copy it again")
