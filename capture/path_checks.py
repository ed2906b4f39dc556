"""Refuse paths that a command cannot work with, by a look at the disk alone: torch is not imported for it."""

from pathlib import Path

from capture.facts import CaptureError, Setting


def check_folder_of_captures(folder: Path) -> None:
    """Raise CaptureError unless there is such a folder."""
    if not folder.is_dir():
        raise CaptureError(f"{folder}: no such folder. Give one that a recording was written to")


def check_dumps(source: Path) -> None:
    """Raise CaptureError unless there is such a file or folder."""
    if not source.exists():
        raise CaptureError(f"{source}: no such file or folder. Give a dump, or a folder of dumps")


def check_new_folder(folder: Path) -> None:
    """Raise CaptureError if it is a file, or if there is something in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CaptureError(f"{folder} is not an empty folder. Give the name of a new one")


def check_new_file(path: Path) -> None:
    """Raise CaptureError if there is such a file or folder."""
    if path.exists():
        raise CaptureError(f"{path} exists already. Give another name, or delete it")


def check_node_folder(folder: str, target: Path) -> None:
    """Raise CaptureError for a folder of Ray's nodes that is not absolute, or that the target, an absolute path, is in.

    folder  may begin with a variable of the node's environment, or with its home
    """
    if not folder.startswith(("/", "~", "$")):
        why = "is no absolute path, and workers of a Ray job have working folders of their own"
        advice = f"Try: capture collect {Path(folder).absolute()} {Setting('to', target)}"
        raise CaptureError(folder, why, advice)
    if Path(folder) in target.parents:
        why = f"lies in {folder}, whose files would be brought there"
        raise CaptureError(target, why, f"Give {Setting('to')} another folder")
    if target.exists() and not target.is_dir():
        raise CaptureError(target, "is no folder", f"Give {Setting('to')} a folder where you may write")
