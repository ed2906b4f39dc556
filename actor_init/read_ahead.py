"""Have the system read a file of weights before its tensors are asked for.

safetensors maps its files, so each page comes when it is touched, in small pieces, while the processor waits. The
system reads large pieces by itself, and at the disk's own speed, if it is told what will be needed.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

AHEAD_BYTES = 512 * 2**20  # behind the tensor that is asked for: as names are sorted, mostly those of the same block
_NUM_LENGTH_BYTES = 8  # of a file, before its header


@dataclass(kw_only=True, slots=True)
class ReadAhead:
    """Tells the system which parts of the files are needed next. Does nothing on a system that cannot be told."""

    _places: dict[Path, Mapping[str, tuple[int, int]]] = field(default_factory=dict)  # of each tensor, by file
    _told: dict[Path, tuple[int, int]] = field(default_factory=dict)  # what is read or on its way, by file

    def of(self, path: Path, name: str) -> None:
        """Have the tensor `name` read, and what is behind it in the file. Returns at once."""
        if sys.platform != "linux":
            return
        if path not in self._places:
            self._places[path] = places_of(path)
        begin, end = self._places[path][name]
        first, last = self._told.get(path, (begin, begin))
        if first <= begin and end + AHEAD_BYTES // 2 <= last:
            return
        if not first <= begin <= last:
            first = last = begin
        self._told[path] = first, end + AHEAD_BYTES
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, last, end + AHEAD_BYTES - last, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def places_of(path: Path) -> Mapping[str, tuple[int, int]]:
    """Return where each tensor of a safetensors file begins and ends in it, in bytes."""
    with open(path, "rb") as file:
        num_header_bytes = int.from_bytes(file.read(_NUM_LENGTH_BYTES), "little")
        header = json.loads(file.read(num_header_bytes))
    base = _NUM_LENGTH_BYTES + num_header_bytes
    places = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
    return {name: (base + begin, base + end) for name, (begin, end) in places.items()}
