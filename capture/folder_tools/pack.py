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
from capture.file_format.model_facts import MODEL_FACTS_NAME
from capture.file_format.segment import Segment, index_path_of
from capture.file_format.segment_record import RECORD_BYTES
from capture.path_checks import check_new_file

# Bytes for a file's two headers and the end of the zip's directory.
_OVERHEAD_BYTES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFolder:
    """The zip file that `pack_folder` wrote.

    left_out  the first capture, in recorded order, that would not have fitted; None: all captures are in it
    """

    path: Path
    num_bytes: int
    num_passes: int
    num_left_out: int
    left_out: str | None


def pack_folder(folder: Path, target: Path, *, max_bytes: int) -> PackedFolder:
    """Pack as many captures as fit, in recorded order; all or nothing is written.

    With them go actor.json, what the model was, the manifests and the end records, which come first.

    Files keep their names in a folder named like the zip. Of a segment that does not fit as a whole, the first passes
    are packed. Raises CaptureError if the folder is damaged, the target is there already, or not even one capture fits;
    OSError.
    """
    check_new_file(target)
    checked = check_folder(folder)
    if not checked.is_whole:
        raise CaptureError(f"{folder} is not whole. Try: capture check {folder}")
    extra = [folder / ACTOR_CONFIG_NAME]
    patterns = ("manifest_rank*.json", "end_rank*.json", MODEL_FACTS_NAME)
    extra += sorted(
        path for home in list_capture_folders(folder) for pattern in patterns for path in home.glob(pattern)
    )
    descriptor, temporary = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(descriptor)
    num_packed, left_out = 0, None
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as package:
            limited = _LimitedZip(package, folder, target.stem, max_bytes)
            for path in extra:
                if path.exists():
                    limited.write(path)
            captures = [*checked.good, *checked.num_good_in]
            for path in sorted(captures, key=lambda path: (parse_rank(path), path.name)):
                is_segment = path.suffix == SEGMENT_SUFFIX
                num_added, left_out = limited.add_segment(path) if is_segment else limited.add(path)
                num_packed += num_added
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
    return PackedFolder(
        path=target,
        num_bytes=num_bytes,
        num_passes=num_packed,
        num_left_out=checked.num_good - num_packed,
        left_out=left_out,
    )


class _LimitedZip:
    """A zip file of limited size. Methods that add return how many passes fitted, and the first that did not."""

    def __init__(self, package: zipfile.ZipFile, folder: Path, name: str, max_bytes: int) -> None:
        self._package = package
        self._folder = folder
        self._name = name
        self._max_bytes = max_bytes

    def write(self, path: Path) -> None:
        self._package.write(path, self._name_inside(path))

    def add(self, path: Path) -> tuple[int, str | None]:
        if self._count_free_bytes(path) < path.stat().st_size:
            return 0, path.name
        self.write(path)
        return 1, None

    def add_segment(self, path: Path) -> tuple[int, str | None]:
        """Pack the passes from the segment's beginning on that fit, and their index."""
        segment, index = Segment.open(path), index_path_of(path)
        num_free = self._count_free_bytes(path) - _OVERHEAD_BYTES - 2 * len(self._name_inside(index))
        num_fitting = bisect_right(list(_bound_packed_sizes(segment)), num_free)
        if num_fitting:
            with open(path, "rb") as file:
                data = file.read(segment.record_at(num_fitting - 1).end)
            self._package.writestr(self._name_inside(path), data)
            records = bytes(segment.records[: num_fitting * RECORD_BYTES])
            self._package.writestr(self._name_inside(index), segment.head.pack() + records)
        return num_fitting, None if num_fitting == segment.num_passes else segment.name_at(num_fitting)

    def _count_free_bytes(self, path: Path) -> int:
        """Count the bytes that one more file of this name may have."""
        assert self._package.fp is not None
        # The zip's directory at its end has 46 bytes for each file, and the file's name.
        directory = sum(46 + len(info.filename) + len(info.extra) for info in self._package.infolist())
        name = self._name_inside(path)
        return self._max_bytes - self._package.fp.tell() - directory - _OVERHEAD_BYTES - 2 * len(name)

    def _name_inside(self, path: Path) -> str:
        return f"{self._name}/{path.relative_to(self._folder).as_posix()}"


def _bound_packed_sizes(segment: Segment) -> Iterator[int]:
    """Yield for each pass a bound on the bytes that the segment and its index take in the zip up to that pass."""
    packer = zlib.compressobj(9)
    num_bytes = 2 * segment.begin
    for _, data in segment.read_passes():
        num_bytes += len(packer.compress(data)) + len(packer.flush(zlib.Z_SYNC_FLUSH)) + 2 * RECORD_BYTES
        yield num_bytes
