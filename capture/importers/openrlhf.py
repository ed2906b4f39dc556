"""Declare dumps of OpenRLHF's actor, and captures of format 1, which are read alike: a file is one micro-batch."""

from collections.abc import Iterator

from capture.file_format.capture_file import CapturedCall, read_call
from capture.importers.declaration import DumpFile, Importer

PICKLE_START = b"\x80"


def read_openrlhf(dump: DumpFile, num_rows: int | None) -> Iterator[CapturedCall]:
    """Read a file, whose rows stay together. Raises CaptureError."""
    yield read_call(dump.path)


OPENRLHF = Importer(
    project="openrlhf",
    suffixes=(".pkl",),
    is_its=lambda start: start.startswith(PICKLE_START),
    read=read_openrlhf,
)
