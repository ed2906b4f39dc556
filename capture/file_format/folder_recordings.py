"""Tell the recordings in one folder apart: those of a job that ran several times, or trained several times."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from capture.file_format.capture_file import read_recording_id
from capture.file_format.listing import CaptureLocation, list_captures
from capture.file_format.micro_batch import CaptureError

_RANKS_OWN_ID = re.compile(r"(?P<began>.+) of rank \d{1,9}")
_TIME_IN_NAME = re.compile(r"\d{8}_\d{6}_\d{6}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderRecording:
    """One recording in a folder.

    number    from 1, in the order in which the recordings began
    began     when it began, ISO 8601; None: its captures do not say
    ids       what its captures have for its id: of a job whose ranks could not agree, one of each rank
    captures  by rank, in recorded order
    """

    number: int
    began: str | None
    ids: frozenset[str | None]
    captures: Sequence[CaptureLocation]

    @property
    def ranks(self) -> list[int]:
        return sorted({capture.rank for capture in self.captures if capture.rank >= 0})

    def describe_begin(self) -> str:
        """Say when it began: `begun 2026-11-21T11:20:04+00:00`."""
        return "begun at a time that is not known" if self.began is None else f"begun {self.began}"


@dataclass(kw_only=True, slots=True)
class _Group:
    """Captures that are of one recording. `is_ranks_own`: each of its ids is one rank's own."""

    began: str | None
    is_ranks_own: bool
    ids: set[str | None]
    captures: list[CaptureLocation] = field(default_factory=list)

    @property
    def ranks(self) -> set[int]:
        return {capture.rank for capture in self.captures}

    @property
    def first_time(self) -> str:
        """Return the earliest time in the captures' names; empty if these have none."""
        times = (_TIME_IN_NAME.search(capture.path.name) for capture in self.captures)
        return min((time[0] for time in times if time is not None), default="")


def list_recordings(folder: str | Path) -> list[FolderRecording]:
    """List the recordings in a folder in the order in which they began.

    Captures without an id, as importers write them, are one recording. Where the ranks of a job could not agree on an
    id, those that began one after the other, each of another rank, are one recording. Raises CaptureError without a
    folder.
    """
    by_id: dict[str | None, _Group] = {}
    for _, captures in groupby(list_captures(folder), key=lambda capture: capture.rank):
        for recording, capture in _pair_with_ids(list(captures)):
            if recording not in by_id:
                own = None if recording is None else _RANKS_OWN_ID.fullmatch(recording)
                began = recording if own is None else own["began"]
                by_id[recording] = _Group(began=began, is_ranks_own=own is not None, ids={recording})
            by_id[recording].captures.append(capture)
    groups: list[_Group] = []
    for group in sorted(by_id.values(), key=lambda group: group.first_time):
        if groups and groups[-1].is_ranks_own and group.is_ranks_own and not groups[-1].ranks & group.ranks:
            groups[-1].captures += group.captures
            groups[-1].ids |= group.ids
        else:
            groups.append(group)
    return [
        FolderRecording(
            number=number,
            began=group.began,
            ids=frozenset(group.ids),
            captures=sorted(group.captures, key=lambda capture: (capture.rank, capture.path.name)),
        )
        for number, group in enumerate(groups, 1)
    ]


def _pair_with_ids(captures: Sequence[CaptureLocation]) -> Iterator[tuple[str | None, CaptureLocation]]:
    """Pair the captures of one rank, in recorded order, with the ids of their recordings.

    A rank has one recording into a folder after the other. So if the first and the last capture have the same id, all
    have, and no other file is opened. A damaged file has the id of its neighbour.
    """
    if (first := _read_ids(captures[:1])) and first == _read_ids(captures[-1:]):
        return zip(first * len(captures), captures, strict=True)
    by_place = {place: ids[0] for place in range(len(captures)) if (ids := _read_ids(captures[place : place + 1]))}
    latest = next(iter(by_place.values()), None)
    ids = [latest := by_place.get(place, latest) for place in range(len(captures))]
    return zip(ids, captures, strict=True)


def _read_ids(captures: Sequence[CaptureLocation]) -> list[str | None]:
    """Read the ids of these captures' recordings, without those of damaged files."""
    ids: list[str | None] = []
    for capture in captures:
        try:
            ids.append(
                read_recording_id(capture.file) if isinstance(capture.file, Path) else capture.file.head.recording
            )
        except CaptureError:
            continue
    return ids
