"""List a folder's captures: files of one pass each, and the passes in segments, in the folder and in its ranks'."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from capture.file_format.folder_layout import list_capture_folders, parse_rank
from capture.file_format.micro_batch import CaptureError
from capture.file_format.segment import Segment, list_segments
from capture.file_format.segment_record import SegmentRecord


@dataclass(frozen=True, slots=True)
class CaptureLocation:
    """Where one capture is: in a file of its own, or in a segment as pass number `index`, counted from 0.

    The record of a pass in a segment is known without opening the segment.
    """

    file: Path | Segment
    index: int = 0

    @property
    def path(self) -> Path:
        return self.file.path_at(self.index) if isinstance(self.file, Segment) else self.file

    @property
    def record(self) -> SegmentRecord | None:
        return self.file.record_at(self.index) if isinstance(self.file, Segment) else None

    @property
    def rank(self) -> int:
        """Return the rank in the file's name; -1 without one."""
        return parse_rank(self.file.path if isinstance(self.file, Segment) else self.file)


def list_single_pass_files(folder: str | Path) -> list[Path]:
    """List the files of one pass each by rank, in recorded order. Raises CaptureError without a folder."""
    folder = require_folder(folder)
    paths = (
        path for home in list_capture_folders(folder) for path in home.glob("*.pkl") if not path.name.startswith(".")
    )
    return sorted(paths, key=lambda path: (parse_rank(path), path.name))


def list_segment_files(folder: str | Path) -> list[Path]:
    """List the segments by rank, in recorded order. Raises CaptureError without a folder."""
    paths = (path for home in list_capture_folders(require_folder(folder)) for path in list_segments(home))
    return sorted(paths, key=lambda path: (parse_rank(path), path.name))


def list_captures(folder: str | Path) -> list[CaptureLocation]:
    """List all captures by rank, in recorded order within a rank. Of segments the indexes are read, no file is opened.

    A segment with a damaged head is left out: `capture check` and `replay inspect` name it. Raises CaptureError without
    a folder.
    """
    return locate_captures([*list_single_pass_files(folder), *open_readable_segments(folder)])


def locate_captures(files: Sequence[Path | Segment]) -> list[CaptureLocation]:
    """List the captures in these files by rank, in recorded order, as the files of one pass and the segments are."""
    captures = [
        CaptureLocation(file, index)
        for file in files
        for index in range(file.num_passes if isinstance(file, Segment) else 1)
    ]
    if len({isinstance(file, Segment) for file in files}) < 2:
        return captures
    return sorted(captures, key=lambda capture: (capture.rank, capture.path.name))


def open_readable_segments(folder: str | Path) -> Iterator[Segment]:
    """Open the segments of a folder in the order of `list_segment_files`, without those whose head is damaged."""
    for path in list_segment_files(folder):
        try:
            yield Segment.open(path)
        except CaptureError:
            continue


def capture_files(folder: str | Path) -> list[Path]:
    """List the paths of a folder's captures by rank, in recorded order. Raises CaptureError without a folder.

    A pass in a segment has the path `<segment>.seg/<capture>.pkl`, which the readers of captures take.
    """
    return [capture.path for capture in list_captures(folder)]


def format_ranges(ranks: Iterable[int]) -> str:
    """Write `0, 1`, and of three or more in a row `0 to 511`."""
    texts: list[str] = []
    # In a row of consecutive ranks the difference between a rank and its number in the sorted list is the same.
    for _, numbered in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        row = [rank for _, rank in numbered]
        texts += [f"{row[0]} to {row[-1]}"] if len(row) > 2 else map(str, row)
    return ", ".join(texts)


def require_folder(folder: str | Path) -> Path:
    """Return the folder as a path. Raises CaptureError if there is none."""
    if not Path(folder).is_dir():
        raise CaptureError(f"{folder}: no such folder. Give a folder that a recording was written to")
    return Path(folder)
