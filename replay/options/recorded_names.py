"""Tell without torch, whose import takes seconds, which tensors the first passes of a recording have.

Files of one pass each are read so. A segment, a dump of another project and a damaged file tell nothing here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.facts import CaptureError
from capture.file_format.folder_layout import SEGMENT_SUFFIX, list_capture_folders, parse_rank
from capture.file_format.safe_unpickler import load_plain

# A job may begin to note what its passes need a few passes later.
NUM_READ = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedNames:
    """The names of what one pass has.

    source    name of the capture
    tensors   arguments of the forward, and the job's notes
    left_out  what could not be kept, by name, with the reason
    """

    source: str
    tensors: frozenset[str]
    left_out: Mapping[str, str]


def read_first_names(folder: Path) -> list[RecordedNames]:
    """Return the names of the first training passes of the first rank, in recorded order.

    Empty where they cannot be told, or where the folder has several recordings.
    """
    try:
        homes = list_capture_folders(folder)
        files = [file for home in homes for file in home.iterdir() if not file.name.startswith(".")]
    except OSError:
        return []
    captures = sorted((file for file in files if file.suffix == ".pkl"), key=lambda file: (parse_rank(file), file.name))
    if not captures or any(file.suffix == SEGMENT_SUFFIX for file in files):
        return []
    first_rank = [file for file in captures if parse_rank(file) == parse_rank(captures[0])]
    last = _read_body(first_rank[-1])
    passes: list[RecordedNames] = []
    for file in first_rank:
        body = _read_body(file)
        if body is None or last is None or body.get("recording") != last.get("recording"):
            return []
        if body["trains"]:
            names = frozenset({*body["tensors"], *body.get("notes", {})})
            passes.append(RecordedNames(source=file.name, tensors=names, left_out=body["left_out"]))
        if len(passes) == NUM_READ:
            break
    return passes


def _read_body(path: Path) -> dict[str, Any] | None:
    """Read a capture's second pickle; None for anything else than a capture of a format with the same keys."""
    try:
        data = path.read_bytes()
        _, end = load_plain(data, source=path.name)
        body, _ = load_plain(data, source=path.name, start=end)
    except (CaptureError, OSError):
        return None
    kinds = {"tensors": dict, "left_out": dict, "trains": bool}
    if not isinstance(body, dict) or not all(isinstance(body.get(key), kind) for key, kind in kinds.items()):
        return None
    return body if isinstance(body.get("notes", {}), dict) else None
