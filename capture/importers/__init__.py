"""Read dumps of other projects as calls of format 1. Nothing in a file can run code: only our own reader sees it.

Each module states the release whose code defines its format, and how its rows become ours. A micro-batch is what the
dump says (slime's training data), or all rows of a file, or as many as were asked for.
"""

import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

from capture.facts import Setting
from capture.file_format.atomic_write import read_bytes
from capture.file_format.capture_file import Call, read_call
from capture.file_format.folder_layout import SEGMENT_SUFFIX, is_in_segment
from capture.file_format.micro_batch import CaptureError
from capture.file_format.segment import Segment
from capture.importers.data_proto import ROLL_CLASS, VERL_CLASS, roll_calls, verl_calls
from capture.importers.nemo_rl import nemo_rl_calls
from capture.importers.skyrl import MODULE, skyrl_calls
from capture.importers.slime import slime_calls
from capture.importers.torch_zip import ZIP_START

MAX_DUMP_BYTES = 2 * 2**30
SUFFIXES = (".pkl", ".pt", ".dp", ".jsonl")
_CLASS_BYTES = 200  # at its start a pickle names the class of what it holds


class Project(Enum):
    """The project that wrote a dump; a member's value is what users type."""

    OPENRLHF = "openrlhf"  # and format 1
    SLIME = "slime"
    VERL = "verl"
    SKYRL = "skyrl"
    ROLL = "roll"
    NEMO_RL = "nemo-rl"


_READERS: dict[Project, Callable[[bytes, str, int | None, int | None], Iterator[Call]]] = {
    Project.SLIME: slime_calls,
    Project.VERL: verl_calls,
    Project.SKYRL: skyrl_calls,
    Project.ROLL: roll_calls,
    Project.NEMO_RL: nemo_rl_calls,
}
_MODULES = {Project.VERL: VERL_CLASS[0], Project.ROLL: ROLL_CLASS[0], Project.SKYRL: MODULE}


def dump_files(source: Path) -> list[Path]:
    """List `source`, or the dumps in it and in its folders, those of a folder in the order of their numbers.

    A segment's passes are listed one by one. Raises CaptureError if there is no such file or folder, or for a segment
    that cannot be read.
    """
    if source.is_file():
        return _passes_of(source) if source.suffix == SEGMENT_SUFFIX else [source]
    if not source.is_dir():
        raise CaptureError(f"{source}: no such file or folder. Give a dump, or a folder of dumps")
    paths = (path for path in source.rglob("*") if path.suffix in (*SUFFIXES, SEGMENT_SUFFIX) and path.is_file())
    visible = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(source).parts)]
    dumps = [path for path in visible if path.suffix != SEGMENT_SUFFIX]
    dumps += [path for segment in visible if segment.suffix == SEGMENT_SUFFIX for path in _passes_of(segment)]
    return sorted(dumps, key=lambda path: _by_number(path.relative_to(source).as_posix()))


def _passes_of(segment: Path) -> list[Path]:
    whole = Segment.open(segment)
    return [whole.pass_path(place) for place in range(whole.num_passes)]


def read_dump(path: Path, source: str, project: Project | None, num_rows: int | None) -> Iterator[Call]:
    """Read the micro-batches of one file, in its order. None has a step; those of OpenRLHF and format 1 have a time.

    source    name of the file in messages
    project   project that wrote it; None: told from the file
    num_rows  rows of a micro-batch; None: as the dump has them. A file of OpenRLHF or format 1 is always one

    Raises CaptureError for a file that is none of these, damaged or hostile; OSError.
    """
    if is_in_segment(path):
        yield read_call(path)
        return
    with open(path, "rb") as file:
        project = project or _told_from(file.read(_CLASS_BYTES), path)
    if project is Project.OPENRLHF:
        yield read_call(path)
    else:
        yield from _READERS[project](read_bytes(path, MAX_DUMP_BYTES), source, num_rows, _step_of(path))


def _told_from(start: bytes, path: Path) -> Project:
    if start.startswith(ZIP_START):
        return Project.SLIME
    if start.startswith(b"{"):
        return Project.NEMO_RL
    for project, module in _MODULES.items():
        if module.encode() in start:
            return project
    if start.startswith(b"\x80"):
        return Project.OPENRLHF
    allowed = ", ".join(project.value for project in Project)
    advice = f"Try: {Setting('project')} with one of {allowed}"
    raise CaptureError(path.name, ": cannot be told whose dump it is", advice)


def _step_of(path: Path) -> int | None:
    """Find the step in a name.

    As in `step_000007.pkl`, `global_step_7_training_input.pkl`, `train_data_step7.jsonl`, `7/gen_batch.dp`.
    """
    match = re.search(r"step_?(\d{1,15})", path.stem) or re.fullmatch(r"(\d{1,15})", path.parent.name)
    return int(match[1]) if match else None


def _by_number(name: str) -> list[tuple[int, int, str]]:
    """Make a sort key that puts 10 after 9."""
    parts = re.split(r"(\d{1,15})", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
