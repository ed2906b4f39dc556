"""Tell the recordings in one folder apart: those of a job that ran several times, or trained several times."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from capture.file_format.capture_file import read_recording_id
from capture.file_format.folder_layout import parse_rank
from capture.file_format.listing import (
    CaptureLocation,
    list_single_pass_files,
    locate_captures,
    open_readable_segments,
)
from capture.file_format.micro_batch import CaptureError
from capture.file_format.segment import Segment

_RANKS_OWN_ID = re.compile(r"(?P<began>.+) of rank \d{1,9}")
_TIME_IN_NAME = re.compile(r"\d{8}_\d{6}_\d{6}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderRecording:
    """One recording in a folder.

    number    from 1, in the order in which the recordings began
    began     when it began, ISO 8601; None: its captures do not say
    ids       what its captures have for its id: of a job whose ranks could not agree, one of each rank
    files     its files of one pass each, and its segments, each by rank, in recorded order
    """

    number: int
    began: str | None
    ids: frozenset[str | None]
    files: Sequence[Path | Segment]

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for file in self.files if (rank := _find_rank(file)) >= 0})

    @property
    def num_passes(self) -> int:
        return sum(file.num_passes if isinstance(file, Segment) else 1 for file in self.files)

    def list_captures(self) -> list[CaptureLocation]:
        """List its captures by rank, in recorded order within a rank."""
        return locate_captures(self.files)

    def describe_begin(self) -> str:
        """Say when it began: `begun 2026-11-21T11:20:04+00:00`."""
        return "begun at a time that is not known" if self.began is None else f"begun {self.began}"


@dataclass(kw_only=True, slots=True)
class _Group:
    """Files that are of one recording. `is_ranks_own`: each of its ids is one rank's own."""

    began: str | None
    is_ranks_own: bool
    ids: set[str | None]
    files: list[Path | Segment] = field(default_factory=list)

    @property
    def ranks(self) -> set[int]:
        return set(map(_find_rank, self.files))

    @property
    def first_time(self) -> str:
        """Return the earliest time in the captures' names; empty if these have none."""
        times = (_TIME_IN_NAME.search(_name_first_pass(file)) for file in self.files)
        return min((time[0] for time in times if time is not None), default="")


def list_recordings(folder: str | Path) -> list[FolderRecording]:
    """List the recordings in a folder in the order in which they began.

    Captures without an id, as importers write them, are one recording. Where the ranks of a job could not agree on an
    id, those that began one after the other, each of another rank, are one recording. Of segments the heads and indexes
    are read, of a rank's files of one pass the heads of the first and the last if these are of one recording. Raises
    CaptureError without a folder.
    """
    by_id: dict[str | None, _Group] = {}
    segments = [segment for segment in open_readable_segments(folder) if segment.num_passes]
    for files in (list_single_pass_files(folder), segments):
        for _, rank_files in groupby(files, key=_find_rank):
            for recording, file in _pair_with_ids(list(rank_files)):
                if recording not in by_id:
                    own = None if recording is None else _RANKS_OWN_ID.fullmatch(recording)
                    began = recording if own is None else own["began"]
                    by_id[recording] = _Group(began=began, is_ranks_own=own is not None, ids={recording})
                by_id[recording].files.append(file)
    groups: list[_Group] = []
    for group in sorted(by_id.values(), key=lambda group: group.first_time):
        if groups and groups[-1].is_ranks_own and group.is_ranks_own and not groups[-1].ranks & group.ranks:
            groups[-1].files += group.files
            groups[-1].ids |= group.ids
        else:
            groups.append(group)
    return [
        FolderRecording(
            number=number,
            began=group.began,
            ids=frozenset(group.ids),
            # The sort keeps the order of a rank's files.
            files=sorted(group.files, key=lambda file: (isinstance(file, Segment), _find_rank(file))),
        )
        for number, group in enumerate(groups, 1)
    ]


def _find_rank(file: Path | Segment) -> int:
    return parse_rank(file.path if isinstance(file, Segment) else file)


def _name_first_pass(file: Path | Segment) -> str:
    return file.name_at(0) if isinstance(file, Segment) else file.name


def _pair_with_ids(files: Sequence[Path | Segment]) -> Iterator[tuple[str | None, Path | Segment]]:
    """Pair the files of one rank, in recorded order, with the ids of their recordings.

    A rank has one recording into a folder after the other. So if the first and the last file have the same id, all
    have, and no other file is opened. A damaged file has the id of its neighbour.
    """
    if (first := _read_ids(files[:1])) and first == _read_ids(files[-1:]) and isinstance(files[0], Path):
        return zip(first * len(files), files, strict=True)
    by_place = {place: ids[0] for place in range(len(files)) if (ids := _read_ids(files[place : place + 1]))}
    latest = next(iter(by_place.values()), None)
    ids = [latest := by_place.get(place, latest) for place in range(len(files))]
    return zip(ids, files, strict=True)


def _read_ids(files: Sequence[Path | Segment]) -> list[str | None]:
    """Read the ids of these files' recordings, without those of damaged files."""
    ids: list[str | None] = []
    for file in files:
        try:
            ids.append(read_recording_id(file) if isinstance(file, Path) else file.head.recording)
        except CaptureError:
            continue
    return ids
