"""Refuse inputs, logs and other folders that are not there.

Commands ask this before they import what they work with: torch and transformers alone take seconds.
"""

from pathlib import Path

from actor_init.spec import UsageError
from capture.facts import Setting
from replay.options.spec import InputsSpec

EXAMPLE = "logs/20261121-141757-replay"


def check_inputs(spec: InputsSpec) -> None:
    """Raise UsageError if --inputs is no folder, or --input-file is no file and no pass of a segment's file."""
    file, folder = spec.input_file, spec.inputs
    given = Setting("input_file", file)
    if file is not None and file.is_dir():
        raise UsageError(given, "is a folder", f"Try: replay {Setting('inputs', file)}")
    if file is not None and not file.is_file() and not file.parent.is_file():
        raise UsageError(given, "does not exist", f"Try: replay inspect {file.parent}")
    given = Setting("inputs", folder)
    if folder is not None and folder.is_file():
        raise UsageError(given, "is a file", f"Try: replay {Setting('input_file', folder)}")
    if folder is not None and not folder.is_dir():
        raise UsageError(given, ": no such folder", "Try: replay, for the sample that ships with the project")


def check_folder(folder: Path, advice: str) -> None:
    """Raise UsageError, with what to type instead, if there is no such folder."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(folder, what, advice)


def check_log(folder: Path) -> None:
    """Raise UsageError if there is no such folder for a run's log to lie in."""
    check_folder(folder, f"Give one that a run left, such as {EXAMPLE}")


def check_left_by(command: str, folder: Path, *, option: str = "--continue") -> None:
    """Raise UsageError if `folder`, the value of `option`, holds nothing of that command's."""
    if not (folder / f"{command}.json").is_file():
        raise UsageError(f"{option} {folder} holds no {command}.json. Give a folder that `replay {command}` left")
