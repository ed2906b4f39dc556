"""Write a run's log: `logs/<time>-<name>/run.json` and one `rank<k>.jsonl` per rank, with a line per pass.

A run that failed on one of several ranks also has the files that `replay/watch` writes. run.json is written at the
start ("status": "running") and rewritten at the end; a line is flushed when its pass is done. Both are strict JSON: a
non-finite float is the string "nan", "inf" or "-inf".

    {"index": 0, "source": "actor_inputs_rank0_20260301_091244_430740.pkl", "rank": 0, "rows": 2, ...,
     "phases": {"forward": {"seconds": 0.06, "peak_allocated_bytes": 41339551744, ...}}, "loss": 1.71, "error": null}
"""

import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import IO

from actor_init.as_json import to_json
from actor_init.spec import UsageError
from capture.facts import Setting
from replay.options.option_parsing import format_command_line, spec_to_dict
from replay.options.resolved import ResolvedReplay
from replay.runlog.records import PassRecord, to_line
from replay.runlog.run_file import RunEnd, RunFile, RunInputs, RunStart, RunWork

PACKAGES = ("micro-replay", "torch", "deepspeed", "transformers", "triton", "flash-attn", "ring-flash-attn")
# The exit code after Ctrl-C.
INTERRUPTED = 130


def create_folder(logs: Path, name: str) -> Path:
    """Create a new folder `<time>-<name>` in `logs`, unique if runs start in the same second. Rank 0 must call this."""
    if not name or Path(name).name != name or name == "..":
        raise UsageError(Setting("name"), f"{name!r} is not a folder name", "Give a name without slashes")
    given, stem = Setting("log_folder", logs), f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    for attempt in count(1):
        folder = logs / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not logs.is_dir():
                raise UsageError(given, "is not a folder", f"Try: {given.with_value('logs')}") from None
        except OSError as error:
            advice = f"Try: {Setting(given.name)} with a folder you may write to"
            raise UsageError(given, f": {error.strerror}", advice) from None
        else:
            return folder
    raise AssertionError("count() has no end")


def add_log_folder_note(interruption: KeyboardInterrupt, folder: Path) -> None:
    """Add to an interruption, for a program that catches it, where the log of what ran is."""
    interruption.add_note(f"What ran is in {folder}. replay.open({str(folder)!r}) reads it")


def list_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Return the versions of python and of `packages`, those that affect results; None if one is not installed."""
    versions_by_name: dict[str, str | None] = {"python": platform.python_version()}
    return versions_by_name | {package: _find_version(package) for package in packages}


@cache
def _find_version(package: str) -> str | None:
    """Return a package's version, or None if it is not installed; to look for one goes through all installed ones."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def refuse_other_versions(previous: Mapping[str, str | None], folder: Path) -> None:
    """Raise UsageError if the runs in `folder`, made with the `previous` versions, would go on with others."""
    differences = [
        f"{name} {previous.get(name)} there, {version} here"
        for name, version in list_versions().items()
        if version != previous.get(name)
    ]
    if differences:
        raise UsageError(Setting("continue", folder), f"has runs of {'; '.join(differences)}", "Go on with those")


class Logbook:
    """Write one rank's rank<k>.jsonl, and on rank 0 run.json beside it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        # None until the run has begun.
        self.run: RunFile | None = None
        self._began = datetime.now().astimezone()
        self._last_line_offset = 0
        self._lines: IO[str] = (folder / f"rank{rank}.jsonl").open("x", encoding="utf-8")

    def begin(
        self,
        resolved: ResolvedReplay,
        *,
        facts: Mapping[str, object],
        work: RunWork,
        inputs: RunInputs,
        memory_kind: str,
        devices: Sequence[str],
    ) -> None:
        """Write run.json for a run that has begun; `devices` holds one name per rank. Rank 0 only."""
        assert self.rank == 0
        spec = resolved.to_spec()
        start = RunStart(
            started=self._began.isoformat(timespec="seconds"),
            command=shlex.join(["replay", *format_command_line(spec)]),
            spec=spec_to_dict(spec),
            resolved=[to_json(choice) for choice in resolved.choices],
            facts=facts,
            work=work,
            inputs=inputs,
            memory_kind=memory_kind,
            world_size=len(devices),
            devices=devices,
            versions=list_versions(),
        )
        self.run = RunFile(status="running", start=start)
        self.run.write(self.folder)

    def write(self, record: PassRecord) -> None:
        """Write one line, on disk before the next pass begins."""
        self._last_line_offset = self._lines.tell()
        self._lines.write(json.dumps(to_line(record), allow_nan=False) + "\n")
        self._lines.flush()

    def write_again(self, record: PassRecord) -> None:
        """Replace the latest line."""
        self._lines.seek(self._last_line_offset)
        self._lines.truncate()
        self.write(record)

    def finish(self, end: RunEnd, *, exit_code: int) -> RunFile:
        """Return run.json for a run that has ended, and on rank 0 write it."""
        assert self.run is not None, "begin() comes first"
        seconds = (datetime.now().astimezone() - self._began).total_seconds()
        status = {0: "finished", INTERRUPTED: "interrupted"}.get(exit_code, "failed")
        self.run = replace(self.run, status=status, end=end, exit_code=exit_code, seconds=seconds)
        if self.rank == 0:
            self.run.write(self.folder)
        return self.run

    def close(self) -> None:
        self._lines.close()
