"""List a folder's captures: files of one pass each, and the passes in segments, in the folder and in its ranks'."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from capture.file_format.folder_layout import homes_in, rank_in_name
from capture.file_format.micro_batch import CaptureError
from capture.file_format.pass_record import PassRecord
from capture.file_format.segment import Segment, segments_in


@dataclass(frozen=True, slots=True)
class Listed:
    """One capture: a file of its own, or number `place` of a segment, which need not be opened to tell its record."""

    file: Path | Segment
    place: int = 0

    @property
    def path(self) -> Path:
        return self.file.pass_path(self.place) if isinstance(self.file, Segment) else self.file

    @property
    def record(self) -> PassRecord | None:
        return self.file.record(self.place) if isinstance(self.file, Segment) else None

    @property
    def rank(self) -> int:
        """Return the rank in its name; -1 without one."""
        return rank_in_name(self.file.path if isinstance(self.file, Segment) else self.file)


def lone_files(folder: str | Path) -> list[Path]:
    """List the files of one pass each by rank, in recorded order. Raises CaptureError without a folder."""
    folder = existing(folder)
    paths = (path for home in homes_in(folder) for path in home.glob("*.pkl") if not path.name.startswith("."))
    return sorted(paths, key=lambda path: (rank_in_name(path), path.name))


def segment_files(folder: str | Path) -> list[Path]:
    """List the segments by rank, in recorded order. Raises CaptureError without a folder."""
    paths = (path for home in homes_in(existing(folder)) for path in segments_in(home))
    return sorted(paths, key=lambda path: (rank_in_name(path), path.name))


def listed(folder: str | Path) -> list[Listed]:
    """List all captures by rank, in recorded order within a rank. Files are not opened; of segments, the indexes are.

    A segment with a damaged head is left out: `capture check` and `replay inspect` name it. Raises CaptureError without
    a folder.
    """
    files = [Listed(path) for path in lone_files(folder)]
    segments = list(readable_segments(folder))
    if not segments:
        return files
    passes = [Listed(segment, place) for segment in segments for place in range(segment.num_passes)]
    if not files:
        return passes
    return sorted([*files, *passes], key=lambda one: (one.rank, one.path.name))


def readable_segments(folder: str | Path) -> Iterator[Segment]:
    for path in segment_files(folder):
        try:
            yield Segment.open(path)
        except CaptureError:
            continue


def capture_files(folder: str | Path) -> list[Path]:
    """List the paths of a folder's captures by rank, in recorded order. Raises CaptureError without a folder.

    A pass in a segment has the path `<segment>.seg/<capture>.pkl`, which the readers of captures take.
    """
    return [one.path for one in listed(folder)]


def ranges_of(ranks: Iterable[int]) -> str:
    """Write `0, 1`, and of three or more in a row `0 to 511`."""
    texts: list[str] = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        texts += [f"{members[0]} to {members[-1]}"] if len(members) > 2 else map(str, members)
    return ", ".join(texts)


def existing(folder: str | Path) -> Path:
    if not Path(folder).is_dir():
        raise CaptureError(f"{folder}: no such folder. Give a folder that a recording was written to")
    return Path(folder)
