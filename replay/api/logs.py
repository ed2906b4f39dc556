"""Open what an earlier command left in a log folder: `replay.open`."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self

from actor_init.as_json import from_json
from actor_init.spec import UsageError
from replay.api.run import ReplayedRun
from replay.campaign.campaign import FORMAT, JOURNAL
from replay.campaign.result import CampaignResult
from replay.options.spec import check_log
from replay.options.value_checks import check_value
from replay.runlog.run_file import RUN_FILE

# The first of these files that a log folder has tells what it is of. Each names what reads the folder, which is
# imported where it is needed.
RESULT_TYPES: Mapping[str, str] = {
    RUN_FILE: "replay.api.run:ReplayedRun",
    "diagnose.json": "replay.commands.diagnose.report:DiagnoseResult",
    "mismatch.json": "replay.commands.mismatch.report:MismatchResult",
    JOURNAL: "replay.api.logs:PastCampaign",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _PastFile:
    """The fields of `<command>.json` that are shown."""

    command: str
    result: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _PastCells:
    """The field of parity's result that names its replays."""

    runs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class PastCampaign(Mapping[str, ReplayedRun]):
    """What a command of many replays left: its answer, and its replays by name.

    folder   of the command
    name     of the command, such as `parity`
    command  the command line that repeats it
    result   the command's answer, as far as it came; None: it has none yet. docs/formats.md explains the fields
    folders  of the replays that left a log, by name
    """

    folder: Path
    name: str
    command: str
    result: Mapping[str, Any] | None
    folders: Mapping[str, Path]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `<command>.json`, and find the replays beside it. Raises UsageError for one that is damaged or missing.

        Of several such files it is the one that the folder is named after.
        """
        files = sorted(folder.glob("*.json"), key=lambda file: (f"-{file.stem}" not in folder.name, file))
        if not files:
            raise UsageError(f"{folder} has a {JOURNAL}, and no file with a result. Give a folder that a command left")
        path = files[0]
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"{path} is damaged: {error}. Give a folder that a command left") from error
        file_format = content.get("format", FORMAT) if isinstance(content, dict) else FORMAT
        if file_format != FORMAT:
            raise UsageError(
                f"{path} is of format {file_format}; this version reads format {FORMAT}. Try: the version that wrote it"
            )
        file = from_json(_PastFile, content, source=f"{path} is damaged", ignore_unknown_fields=True)
        folders, result = _find_runs(path.parent), file.result
        if result and path.stem == "parity":
            # The cells of parity have names of their own, of which those of their folders are made.
            cells = from_json(_PastCells, result, source=f"{path} is damaged: result", ignore_unknown_fields=True)
            labels = {cell.get("log"): str(cell.get("name")) for cell in cells.runs}
            folders = {labels.get(run.relative_to(path.parent).as_posix(), name): run for name, run in folders.items()}
        return cls(folder=path.parent, name=path.stem, command=file.command, result=result, folders=folders)

    def __getitem__(self, name: str) -> ReplayedRun:
        if name not in self.folders:
            raise KeyError(f"{name}: {self.folder} has {', '.join(self.folders) or 'no replay'}")
        return ReplayedRun.read(self.folders[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.folders)

    def __len__(self) -> int:
        return len(self.folders)

    def to_dict(self) -> dict[str, Any]:
        """Return the command, its answer, and the folders of its replays."""
        folders = {name: str(folder) for name, folder in self.folders.items()}
        return {"command": self.command, "result": self.result, "folders": folders}


def open(path: str | os.PathLike[str]) -> ReplayedRun | PastCampaign | CampaignResult:
    """Open a log folder: that of a replay, of a command of many replays, such as parity, or of diagnose or mismatch.

    Raises UsageError for a folder that no run left, for one that is damaged, and for one that a newer version wrote,
    which it names. A run that was cut short is read as far as it came: `problems` says what is missing.
    """
    folder = check_value("path", path, Path)
    check_log(folder)
    # Absolute, since the caller may change its working folder before it asks for tables.
    folder = folder.absolute()
    file = next((file for file in RESULT_TYPES if (folder / file).is_file()), RUN_FILE)
    result: ReplayedRun | PastCampaign | CampaignResult = resolve_name(RESULT_TYPES[file]).read(folder)
    return result


def _find_runs(folder: Path) -> dict[str, Path]:
    """Find the folder of each replay below a campaign's folder, by the name that the campaign gave it.

    A replay was tried in one or several attempts, `runs/fsdp2/0/<time>-replay`, of which the last one counts.
    """
    runs: dict[str, Path] = {}
    for file in folder.glob(f"*/**/{RUN_FILE}"):
        home, attempt = file.parents[2], file.parents[1].name
        # Runs of worst have one home, and are known by their numbers alone.
        name = home.relative_to(folder).as_posix().partition("/")[2] or attempt
        if attempt.isdecimal() and (name not in runs or int(attempt) > int(runs[name].parent.name)):
            runs[name] = file.parent
    return dict(sorted(runs.items()))
