"""Pack a folder of captures into one zip file of limited size."""

import os
import tempfile
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from capture.facts import Setting
from capture.file_format.folder_layout import ACTOR_CONFIG_NAME, SEGMENT_SUFFIX, list_capture_folders, parse_rank
from capture.file_format.manifest import check_folder
from capture.file_format.micro_batch import CaptureError
from capture.file_format.segment import Segment, index_path_of
from capture.file_format.segment_record import RECORD_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """The zip file that `pack_folder` wrote.

    left_out  the first capture, in recorded order, that would not have fitted; None: all are in it
    """

    path: Path
    num_bytes: int
    num_passes: int
    num_left_out: int
    left_out: str | None


def pack_folder(folder: Path, target: Path, *, max_bytes: int) -> Package:
    """Pack as many captures as fit, in recorded order; all or nothing is written.

    With them go actor.json, the manifests, and what ranks wrote at their ends.

    Files keep their names in a folder named like the zip. Of a segment that does not fit as a whole, the first passes
    are packed. Raises CaptureError if the folder is damaged, the target is there already, or not even one capture fits;
    OSError.
    """
    if target.exists():
        raise CaptureError(f"{target} exists already. Give another name, or delete it")
    checked = check_folder(folder)
    if not checked.is_whole:
        raise CaptureError(f"{folder} is not whole. Try: capture check {folder}")
    extra = [folder / ACTOR_CONFIG_NAME]
    records = ("manifest_rank*.json", "end_rank*.json")
    extra += sorted(path for home in list_capture_folders(folder) for pattern in records for path in home.glob(pattern))
    descriptor, temporary = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(descriptor)
    num_packed, left_out = 0, None
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as package:
            room = _Room(package, folder, target.stem, max_bytes)
            for path in extra:
                if path.exists():
                    room.write(path)
            for path in sorted([*checked.good, *checked.num_good_in], key=lambda one: (parse_rank(one), one.name)):
                taken, left_out = room.add_segment(path) if path.suffix == SEGMENT_SUFFIX else room.add(path)
                num_packed += taken
                if left_out is not None:
                    break
        num_bytes = os.stat(temporary).st_size
        if not num_packed:
            advice = f"Try: a larger {Setting('max_bytes')}"
            raise CaptureError(f"not one capture of {folder} fits into {max_bytes} bytes. {advice}")
        assert num_bytes <= max_bytes
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return Package(
        path=target,
        num_bytes=num_bytes,
        num_passes=num_packed,
        num_left_out=checked.num_good - num_packed,
        left_out=left_out,
    )


class _Room:
    """A zip file of limited size. Methods that add return how many passes they took, and the first that they left."""

    def __init__(self, package: zipfile.ZipFile, folder: Path, name: str, max_bytes: int) -> None:
        self._package = package
        self._folder = folder
        self._name = name
        self._max_bytes = max_bytes

    def write(self, path: Path) -> None:
        self._package.write(path, self._inside(path))

    def add(self, path: Path) -> tuple[int, str | None]:
        if self._left(path) < path.stat().st_size:
            return 0, path.name
        self.write(path)
        return 1, None

    def add_segment(self, path: Path) -> tuple[int, str | None]:
        """Pack the passes from the segment's beginning on that fit, and their index."""
        segment, index = Segment.open(path), index_path_of(path)
        left = self._left(path) - _OVERHEAD_BYTES - 2 * len(self._inside(index))
        num_fitting = bisect_right(list(_packed_sizes(segment)), left)
        if num_fitting:
            with open(path, "rb") as file:
                data = file.read(segment.record_at(num_fitting - 1).end)
            self._package.writestr(self._inside(path), data)
            records = bytes(segment.records[: num_fitting * RECORD_BYTES])
            self._package.writestr(self._inside(index), segment.head.pack() + records)
        return num_fitting, None if num_fitting == segment.num_passes else segment.name_at(num_fitting)

    def _left(self, path: Path) -> int:
        """Count the bytes that one more file of this name may have."""
        assert self._package.fp is not None
        directory = sum(46 + len(info.filename) + len(info.extra) for info in self._package.infolist())
        name = self._inside(path)
        return self._max_bytes - self._package.fp.tell() - directory - _OVERHEAD_BYTES - 2 * len(name)

    def _inside(self, path: Path) -> str:
        return f"{self._name}/{path.relative_to(self._folder).as_posix()}"


def _packed_sizes(segment: Segment) -> Iterator[int]:
    """Yield at most how many bytes the segment and its index take in the zip, up to and with each pass."""
    packer = zlib.compressobj(9)
    num_bytes = 2 * segment.begin
    for _, data in segment.read_passes():
        num_bytes += len(packer.compress(data)) + len(packer.flush(zlib.Z_SYNC_FLUSH)) + 2 * RECORD_BYTES
        yield num_bytes


_OVERHEAD_BYTES = 1024  # for a file's two headers and the end of the directory
