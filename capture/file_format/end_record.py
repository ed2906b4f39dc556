"""Write and read that a rank closed its recording, after how many passes: `end_rank<r>_<time>.json`.

A rank of several writes it, and one that could not record some of the job's training passes, did not see the forward
before a step, or saw gradients clipped after one.

A rank that was killed, or that still hangs, has none. So of a job that hung it tells which rank's loop was over, and of
a recording that a limit cut short how many passes there were.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any

from capture.file_format.atomic_write import write_atomically
from capture.file_format.folder_layout import list_capture_folders, make_rank_folder
from capture.file_format.micro_batch import CaptureError

FORMAT = 1
_MAX_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRecord:
    """How one rank's recording ended. The names of the fields are keys in the file.

    num_steps     number of the optimizer's steps; None: they were not seen
    place         where in its last pass the rank was, as the recorder's position names it
    opened, time  when the recording began and when it ended: ISO 8601, UTC
    not_recorded  number of training passes that no replay could make from their arguments, by the reason
    recording     the recording's id, as its captures have it; None: not known
    num_unseen_steps  steps of an optimizer of the model that no forward of it came before, since the step before
    unseen_after  the forward after which the first of these came
    num_late_clippings  steps of gradients that were clipped to a limit only after the step, and not before it
    """

    rank: int
    world_size: int
    num_passes: int
    num_steps: int | None
    place: str
    opened: str
    time: str
    not_recorded: Mapping[str, int] = field(default_factory=dict)
    recording: str | None = None
    num_unseen_steps: int = 0
    unseen_after: int | None = None
    num_late_clippings: int = 0


_FIELD_TYPES: dict[str, type | UnionType] = {
    "rank": int,
    "world_size": int,
    "num_passes": int,
    "num_steps": int | None,
    "place": str,
    "opened": str,
    "time": str,
    "not_recorded": dict,
    "recording": str | None,
    "num_unseen_steps": int,
    "unseen_after": int | None,
    "num_late_clippings": int,
}
# Files of earlier versions lack these.
_LATER = {"recording": None, "num_unseen_steps": 0, "unseen_after": None, "num_late_clippings": 0}
assert _FIELD_TYPES.keys() == {field.name for field in fields(EndRecord)}


def write_end_record(home: Path, end: EndRecord, *, stamp: str) -> None:
    """Write a rank's end record into its folder. Raises OSError."""
    make_rank_folder(home)
    content = json.dumps({"format": FORMAT, **asdict(end)}).encode()
    write_atomically(home / f"end_rank{end.rank}_{stamp}.json", content)


def read_end_records(folder: Path) -> list[EndRecord]:
    """Read the end records of a folder and of its ranks' folders. Raises CaptureError for a damaged one."""
    return [
        _read_end_record(path) for home in list_capture_folders(folder) for path in sorted(home.glob("end_rank*.json"))
    ]


def count_not_recorded(folder: Path, *, without: Collection[str | None] = ()) -> dict[str, int]:
    """Count by reason the training passes that recordings into a folder saw and could not keep.

    without  ids of recordings that do not count

    Raises CaptureError for a damaged end record.
    """
    ends = (end for end in read_end_records(folder) if end.recording is None or end.recording not in without)
    return dict(sum((Counter(end.not_recorded) for end in ends), Counter()))


def _read_end_record(path: Path) -> EndRecord:
    try:
        with open(path, "rb") as file:
            content: Any = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{path.name}: cannot be read: {error}. Delete the file or copy it again") from None
    values: dict[str, Any] = {**_LATER, **content} if isinstance(content, dict) else {}
    if (
        values.pop("format", None) == FORMAT
        and values.keys() == _FIELD_TYPES.keys()
        and all(isinstance(values[name], type_) for name, type_ in _FIELD_TYPES.items())
        and all(type(number) is int for number in values["not_recorded"].values())
    ):
        return EndRecord(**values)
    raise CaptureError(f"{path.name}: no end of a recording of format {FORMAT}. Delete the file or copy it again")
