"""List a folder's captures: files of one pass each, and the passes in segments, in the folder and in its ranks'."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from capture.file_format.folder_layout import homes_in, rank_in_name
from capture.file_format.micro_batch import CaptureError
from capture.file_format.segment import Segment, segments_in
from capture.file_format.segment_record import SegmentRecord


@dataclass(frozen=True, slots=True)
class CaptureLocation:
    """One capture: a file of its own, or number `place` of a segment, which need not be opened to tell its record."""

    file: Path | Segment
    place: int = 0

    @property
    def path(self) -> Path:
        return self.file.pass_path(self.place) if isinstance(self.file, Segment) else self.file

    @property
    def record(self) -> SegmentRecord | None:
        return self.file.record(self.place) if isinstance(self.file, Segment) else None

    @property
    def rank(self) -> int:
        """Return the rank in its name; -1 without one."""
        return rank_in_name(self.file.path if isinstance(self.file, Segment) else self.file)


def list_single_pass_files(folder: str | Path) -> list[Path]:
    """List the files of one pass each by rank, in recorded order. Raises CaptureError without a folder."""
    folder = require_folder(folder)
    paths = (path for home in homes_in(folder) for path in home.glob("*.pkl") if not path.name.startswith("."))
    return sorted(paths, key=lambda path: (rank_in_name(path), path.name))


def list_segment_files(folder: str | Path) -> list[Path]:
    """List the segments by rank, in recorded order. Raises CaptureError without a folder."""
    paths = (path for home in homes_in(require_folder(folder)) for path in segments_in(home))
    return sorted(paths, key=lambda path: (rank_in_name(path), path.name))


def list_captures(folder: str | Path) -> list[CaptureLocation]:
    """List all captures by rank, in recorded order within a rank. Files are not opened; of segments, the indexes are.

    A segment with a damaged head is left out: `capture check` and `replay inspect` name it. Raises CaptureError without
    a folder.
    """
    files = [CaptureLocation(path) for path in list_single_pass_files(folder)]
    segments = list(open_readable_segments(folder))
    if not segments:
        return files
    passes = [CaptureLocation(segment, place) for segment in segments for place in range(segment.num_passes)]
    if not files:
        return passes
    return sorted([*files, *passes], key=lambda one: (one.rank, one.path.name))


def open_readable_segments(folder: str | Path) -> Iterator[Segment]:
    for path in list_segment_files(folder):
        try:
            yield Segment.open(path)
        except CaptureError:
            continue


def capture_files(folder: str | Path) -> list[Path]:
    """List the paths of a folder's captures by rank, in recorded order. Raises CaptureError without a folder.

    A pass in a segment has the path `<segment>.seg/<capture>.pkl`, which the readers of captures take.
    """
    return [one.path for one in list_captures(folder)]


def format_ranges(ranks: Iterable[int]) -> str:
    """Write `0, 1`, and of three or more in a row `0 to 511`."""
    texts: list[str] = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        texts += [f"{members[0]} to {members[-1]}"] if len(members) > 2 else map(str, members)
    return ", ".join(texts)


def require_folder(folder: str | Path) -> Path:
    if not Path(folder).is_dir():
        raise CaptureError(f"{folder}: no such folder. Give a folder that a recording was written to")
    return Path(folder)
