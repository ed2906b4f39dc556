"""Write a run's log: `logs/<time>-<name>/run.json` and one `rank<k>.jsonl` per rank, with a line per pass.

A run that failed on one of several ranks also has the files of `replay/watch/failure_file.py` and `shutdown.py`.
run.json is written at the start ("status": "running") and rewritten at the end; a line is flushed when its pass
is done. Both are strict JSON: a non-finite float is the string "nan", "inf" or "-inf".

    {"format": 1, "status": "finished", "started": "2026-03-01T09:12:44+01:00", "command": "replay --max-inputs 5",
     "spec": {...}, "resolved": [...], "facts": {...}, "work": {"weights": ..., "config": {...}},
     "inputs": {...}, "memory_kind": "cuda allocator", "world_size": 1, "devices": [...],
     "versions": {"python": "3.12.3", "torch": "2.11.0", "flash-attn": null, ...},
     "statistics": {...}, "verdict": {"outcome": "REPRODUCED", ...}, "exit_code": 0, "seconds": 41.3}

    {"index": 0, "source": "actor_inputs_rank0_20260301_091244_430740.pkl", "rank": 0, "rows": 2, ...,
     "phases": {"forward": {"seconds": 0.06, "peak_allocated_bytes": 41339551744, ...}}, "loss": 1.71, "error": null}
"""

import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import IO, Any

from actor_init.as_json import parse_json, to_json
from actor_init.spec import UsageError
from capture.facts import Setting
from replay.option_parsing import command_line, spec_to_dict
from replay.resolved import ResolvedReplay
from replay.runlog.records import PassRecord
from replay.runlog.summary import Statistics

PACKAGES = ("micro-replay", "torch", "deepspeed", "transformers", "triton", "flash-attn", "ring-flash-attn")
FORMAT = 1  # of run.json and rank<k>.jsonl; raised when readers of the old format would misread the new
RUN_FILE = "run.json"
INTERRUPTED = 130  # the exit code after Ctrl-C


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
                raise UsageError(given, "is not a folder", f"Try: {given.of('logs')}") from None
        except OSError as error:
            advice = f"Try: {Setting(given.name)} with a folder you may write to"
            raise UsageError(given, f": {error.strerror}", advice) from None
        else:
            return folder
    raise AssertionError("count() has no end")


def versions() -> dict[str, str | None]:
    """Return the versions of python and of every package that affects results; None if one is not installed."""
    versions_by_name: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions_by_name[package] = version(package)
        except PackageNotFoundError:
            versions_by_name[package] = None
    return versions_by_name


class Logbook:
    """Write one rank's rank<k>.jsonl, and on rank 0 run.json beside it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._run: dict[str, Any] = {}
        self._began = datetime.now().astimezone()
        self._begin_of_last = 0
        self._lines: IO[str] = (folder / f"rank{rank}.jsonl").open("x", encoding="utf-8")

    def begin(
        self,
        resolved: ResolvedReplay,
        *,
        facts: Mapping[str, Any],
        work: Mapping[str, Any],
        inputs: Mapping[str, Any],
        memory_kind: str,
        devices: Sequence[str],
    ) -> None:
        """Write run.json for a run that has begun; `devices` holds one name per rank. Rank 0 only.

        `work` is what another run must share to be comparable, besides its spec and records. `inputs` describes which
        inputs are replayed and how they were distributed.
        """
        assert self.rank == 0
        spec = resolved.to_spec()
        self._run = {
            "status": "running",
            "started": self._began.isoformat(timespec="seconds"),
            "command": shlex.join(["replay", *command_line(spec)]),
            "spec": spec_to_dict(spec),
            "resolved": [to_json(choice) for choice in resolved.choices],
            "facts": dict(facts),
            "work": dict(work),
            "inputs": dict(inputs),
            "memory_kind": memory_kind,
            "world_size": len(devices),
            "devices": list(devices),
            "versions": versions(),
        }
        self._write_run()

    def write(self, record: PassRecord) -> None:
        """Write one line, on disk before the next pass begins."""
        self._begin_of_last = self._lines.tell()
        self._lines.write(json.dumps(to_json(record), allow_nan=False) + "\n")
        self._lines.flush()

    def write_again(self, record: PassRecord) -> None:
        """Replace the latest line."""
        self._lines.seek(self._begin_of_last)
        self._lines.truncate()
        self.write(record)

    def finish(
        self,
        statistics: Statistics,
        *,
        exit_code: int,
        verdict: Any = None,
        profile: Any = None,
        memory: Any = None,
        out_of_memory: Any = None,
        first_non_finite: Mapping[str, Any] | None = None,
    ) -> None:
        """Rewrite run.json for a run that has ended. Rank 0 only.

        `verdict`, `profile`, `memory` and `out_of_memory` are dataclasses of plain data.
        """
        assert self._run, "begin() comes first"
        self._run |= {
            "status": {0: "finished", INTERRUPTED: "interrupted"}.get(exit_code, "failed"),
            "statistics": to_json(statistics),
            "verdict": verdict and to_json(verdict),
            "profile": profile and to_json(profile),
            "memory": memory and to_json(memory),
            "out_of_memory": out_of_memory and to_json(out_of_memory),
            "first_non_finite": first_non_finite,
            "exit_code": exit_code,
            "seconds": (datetime.now().astimezone() - self._began).total_seconds(),
        }
        self._write_run()

    def close(self) -> None:
        self._lines.close()

    def _write_run(self) -> None:
        replace_run(self.folder, self._run)


def replace_run(folder: Path, run: Mapping[str, Any]) -> None:
    path = folder / RUN_FILE
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(
        json.dumps(to_json({"format": FORMAT, **run}), indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    os.replace(unfinished, path)


def log_below(folder: Path) -> tuple[Path | None, dict[str, Any], list[PassRecord]]:
    """Read the only run below `folder`: its folder, run.json and records; nothing where it did not get that far."""
    found = sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
    return (found[0], *read_log(found[0])) if found else (None, {}, [])


def read_log(folder: Path) -> tuple[dict[str, Any], list[PassRecord]]:
    """Read run.json and all ranks' records, by pass and rank. An incomplete last line of a killed run is skipped."""
    run: dict[str, Any] = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    records: list[PassRecord] = []
    for path in folder.glob("rank*.jsonl"):
        *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
        records += [
            parse_json(PassRecord, line, source=f"{path}, line {number}") for number, line in enumerate(lines, start=1)
        ]
    return run, sorted(records, key=lambda record: (record.index, record.rank))
