"""Read dumps of other projects as calls of format 1. Nothing in a file can run code: only our own reader sees it.

To add a project, write a file that declares its importer, and one entry here. Each file states the release whose code
defines its format, and how its rows become those of a call. A micro-batch is what the dump says (slime's training
data), or all rows of a file, or as many rows as the caller names.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from capture.facts import Setting
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.folder_layout import SEGMENT_SUFFIX, is_in_segment
from capture.file_format.micro_batch import CaptureError
from capture.file_format.segment import Segment
from capture.importers.data_proto import ROLL, VERL
from capture.importers.declaration import DumpFile, Importer
from capture.importers.nemo_rl import NEMO_RL
from capture.importers.openrlhf import OPENRLHF
from capture.importers.skyrl import SKYRL
from capture.importers.slime import SLIME
from capture.path_checks import check_dumps

# Where several importers could read a file, the first in this order does: a dump of OpenRLHF names no class, so any
# pickle may be one.
IMPORTERS: dict[str, Importer] = {
    importer.project: importer for importer in (SLIME, NEMO_RL, VERL, ROLL, SKYRL, OPENRLHF)
}
# So many bytes tell whose dump a file is: at its start a pickle names the class of what it holds.
_START_BYTES = 200


def find_importer(project: str) -> Importer:
    """Return the importer of a project's dumps. Raises CaptureError for a project that is not known."""
    if project not in IMPORTERS:
        raise CaptureError(Setting("project", project), "is not known", f"Give one of {', '.join(IMPORTERS)}")
    return IMPORTERS[project]


def list_dumps(source: Path) -> list[Path]:
    """List `source`, or the dumps in it and in its folders, those of a folder in the order of their numbers.

    A segment's passes are listed one by one. Raises CaptureError if there is no such file or folder, or for a segment
    that cannot be read.
    """
    if source.is_file():
        return _list_passes(source) if source.suffix == SEGMENT_SUFFIX else [source]
    check_dumps(source)
    suffixes = {suffix for importer in IMPORTERS.values() for suffix in importer.suffixes}
    paths = (path for path in source.rglob("*") if path.suffix in {*suffixes, SEGMENT_SUFFIX} and path.is_file())
    visible = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(source).parts)]
    dumps = [path for path in visible if path.suffix != SEGMENT_SUFFIX]
    dumps += [path for segment in visible if segment.suffix == SEGMENT_SUFFIX for path in _list_passes(segment)]
    return sorted(dumps, key=lambda path: _make_sort_key(path.relative_to(source).as_posix()))


def _list_passes(path: Path) -> list[Path]:
    segment = Segment.open(path)
    return [segment.path_at(index) for index in range(segment.num_passes)]


def read_dump(path: Path, source: str, importer: Importer | None, num_rows: int | None) -> Iterator[CapturedCall]:
    """Read the micro-batches of one file, in its order. None has a step; those of OpenRLHF and format 1 have a time.

    source    name of the file in messages
    importer  importer of the project that wrote it; None: the file's start tells
    num_rows  rows of a micro-batch; None: as the dump has them. A file of OpenRLHF or format 1 stays one micro-batch

    Raises CaptureError for a file that is none of these, damaged or hostile; OSError.
    """
    if is_in_segment(path):
        yield read_call(path)
        return
    with open(path, "rb") as file:
        importer = importer or _recognise(file.read(_START_BYTES), path)
    yield from importer.read(DumpFile(path=path, source=source), num_rows)


def _recognise(start: bytes, path: Path) -> Importer:
    """Tell from its first bytes whose dump a file is. Raises CaptureError where no importer takes it."""
    for importer in IMPORTERS.values():
        if importer.is_its(start):
            return importer
    advice = f"Try: {Setting('project')} with one of {', '.join(IMPORTERS)}"
    raise CaptureError(path.name, ": cannot be told whose dump it is", advice)


def _make_sort_key(name: str) -> list[tuple[int, int, str]]:
    """Make a sort key that puts 10 after 9."""
    parts = re.split(r"(\d{1,15})", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
