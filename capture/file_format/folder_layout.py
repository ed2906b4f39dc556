"""Choose where a rank's files are: in the folder itself; with many ranks, or with segments, in a folder for each rank.

inputs/my-run/actor.json
inputs/my-run/rank0/...
inputs/my-run/rank1/...
"""

import re
from pathlib import Path

# Of more ranks than these each has a folder of its own.
MAX_RANKS_IN_ONE_FOLDER = 16
SEGMENT_SUFFIX = ".seg"
ACTOR_CONFIG_NAME = "actor.json"
_RANK_FOLDER = re.compile(r"rank(\d{1,9})")


def choose_rank_folder(folder: Path, *, rank: int, world_size: int | None, in_segments: bool) -> Path:
    """Choose the folder that a rank's files are written to."""
    return folder / f"rank{rank}" if in_segments or (world_size or 1) > MAX_RANKS_IN_ONE_FOLDER else folder


def make_rank_folder(home: Path) -> None:
    """Make a rank's folder, if it is not there. Raises OSError."""
    if not home.is_dir():
        home.mkdir(mode=0o700, exist_ok=True)


def list_capture_folders(folder: Path) -> list[Path]:
    """List the folder and its ranks' folders, by rank."""
    rank_folders = [(int(match[1]), path) for path in folder.iterdir() if (match := _RANK_FOLDER.fullmatch(path.name))]
    return [folder, *(path for _, path in sorted(rank_folders) if path.is_dir())]


def find_ranks(folder: Path) -> set[int]:
    """Return the ranks that have left a file or a folder in `folder`."""
    return {rank for path in folder.iterdir() if not path.name.startswith(".") and (rank := parse_rank(path)) >= 0}


def is_in_segment(path: Path) -> bool:
    """Tell whether this is the name of a pass in a segment, `<segment>.seg/<capture>.pkl`."""
    return path.parent.suffix == SEGMENT_SUFFIX


def find_recording_folder(path: Path) -> Path:
    """Return the folder of the recording that a capture belongs to; `actor.json` is there."""
    return strip_rank_folder(path.parent.parent if is_in_segment(path) else path.parent)


def strip_rank_folder(folder: Path) -> Path:
    """Return the recording's folder for a rank's folder, and any other folder as it is."""
    is_rank_folder = _RANK_FOLDER.fullmatch(folder.name) and not (folder / ACTOR_CONFIG_NAME).exists()
    return folder.parent if is_rank_folder else folder


def parse_rank(path: Path) -> int:
    """Read the rank in the name of a file or folder; -1 without one."""
    match = re.search(r"rank(\d{1,9})", path.name)
    return int(match[1]) if match else -1
