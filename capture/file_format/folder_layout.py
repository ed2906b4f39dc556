"""Say where a rank's files are: in the folder itself; with many ranks, or with segments, in a folder for each rank.

inputs/my-run/actor.json
inputs/my-run/rank0/...
inputs/my-run/rank1/...
"""

import re
from pathlib import Path

MANY_RANKS = 16  # above it, each rank has a folder of its own
SEGMENT_SUFFIX = ".seg"
ACTOR_CONFIG_NAME = "actor.json"
_RANK_FOLDER = re.compile(r"rank(\d{1,9})")


def home_of(folder: Path, *, rank: int, world_size: int | None, in_segments: bool) -> Path:
    """Return the folder that a rank's files are written to."""
    return folder / f"rank{rank}" if in_segments or (world_size or 1) > MANY_RANKS else folder


def make_home(home: Path) -> None:
    """Make a rank's folder, if it is not there. Raises OSError."""
    if not home.is_dir():
        home.mkdir(mode=0o700, exist_ok=True)


def homes_in(folder: Path) -> list[Path]:
    """List the folder and its ranks' folders, by rank."""
    ranked = [(int(match[1]), path) for path in folder.iterdir() if (match := _RANK_FOLDER.fullmatch(path.name))]
    return [folder, *(path for _, path in sorted(ranked) if path.is_dir())]


def ranks_in(folder: Path) -> set[int]:
    """List the ranks that have left a file or a folder there."""
    return {rank for path in folder.iterdir() if not path.name.startswith(".") and (rank := rank_in_name(path)) >= 0}


def is_in_segment(path: Path) -> bool:
    """Tell whether this is the name of a pass in a segment, `<segment>.seg/<capture>.pkl`."""
    return path.parent.suffix == SEGMENT_SUFFIX


def folder_of_capture(path: Path) -> Path:
    """Return the folder, with `actor.json`, of the recording that a capture belongs to."""
    return top_of(path.parent.parent if is_in_segment(path) else path.parent)


def top_of(folder: Path) -> Path:
    """Return the recording's folder for a rank's folder, and any other folder as it is."""
    is_of_rank = _RANK_FOLDER.fullmatch(folder.name) and not (folder / ACTOR_CONFIG_NAME).exists()
    return folder.parent if is_of_rank else folder


def rank_in_name(path: Path) -> int:
    """Return the rank in a capture's file name; -1 without one."""
    rank = re.search(r"rank(\d{1,9})", path.name)
    return int(rank[1]) if rank else -1
