"""Declare what an importer is: whose dumps it reads, how it recognises them, and how it reads them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from capture.file_format.atomic_write import read_bytes
from capture.file_format.capture_file import CapturedCall

MAX_DUMP_BYTES = 2 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpFile:
    """A file that a project wrote. `source` is its name in messages."""

    path: Path
    source: str

    def read(self) -> bytes:
        """Read the whole file. Raises CaptureError if it cannot be read or is too large."""
        return read_bytes(self.path, MAX_DUMP_BYTES)

    @property
    def step(self) -> int | None:
        """Return the step in the file's name, or the number that its folder's name is; None without one.

        As in `step_000007.pkl`, `global_step_7_training_input.pkl`, `train_data_step7.jsonl`, `7/gen_batch.dp`.
        """
        match = re.search(r"step_?(\d{1,15})", self.path.stem) or re.fullmatch(r"(\d{1,15})", self.path.parent.name)
        return int(match[1]) if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Importer:
    """How the dumps of one project are recognised and read.

    project   what users type after --from
    suffixes  of its files
    is_its    tells whether a file that begins with these bytes may be the project's
    read      yields the micro-batches of a file in its order, with at most so many rows each; None: with as many as the
              dump says. Raises CaptureError for a file that is another project's, damaged or hostile
    """

    project: str
    suffixes: tuple[str, ...]
    is_its: Callable[[bytes], bool]
    read: Callable[[DumpFile, int | None], Iterator[CapturedCall]]


def match_module(module: str) -> Callable[[bytes], bool]:
    """Make the `is_its` for pickles of a class of `module`, whose name stands at the pickle's start."""
    return lambda start: module.encode() in start
