"""Keep the state of a scan in `logs/<time>-scan/scan.json`, rewritten whenever a group ends.

{"format": 1, "command": "replay scan --inputs inputs/my-run", "machine": {"num_devices": 2, "has_gpus": false},
 "spec": {...}, "damaged": ["a.pkl: it is cut short"],
 "groups": [{"first": 0, "size": 8, "state": "done", "outcome": "REPRODUCED", "said": "8 of 8 passes", "seconds": 8.1,
             "log": "groups/001/20261121-185921-replay"}]}
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from actor_init.as_json import from_json, json_bytes
from actor_init.spec import UsageError
from capture.file_format.atomic_write import write_atomically
from replay.option_parsing import spec_from_dict, spec_to_dict
from replay.processes.devices import Machine
from replay.spec import ReplaySpec
from replay.wording import in_flags

FORMAT = 1
FILE = "scan.json"


class State(StrEnum):
    PENDING = "pending"  # not run yet, or interrupted
    DONE = "done"  # every pass was replayed
    FAILED = "failed"  # a pass failed, or the run ended before its last


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Inputs of one run: `size` of them, behind the `first` ones of the folder."""

    first: int
    size: int
    state: State = State.PENDING
    outcome: str = ""  # that of the run's verdict
    said: str = ""  # the verdict in words, or the error
    seconds: float | None = None
    log: str | None = None  # relative to the folder of scan.json


@dataclass(kw_only=True, slots=True)
class ScanLog:
    folder: Path
    command: str
    machine: Machine
    spec: ReplaySpec  # of every group, but for its inputs
    damaged: list[str]
    groups: list[Group]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the log. Raises UsageError for anything but a scan of this version."""
        path = folder / FILE
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            written = from_json(_File, whole, source=f"{path} is damaged")
            spec = spec_from_dict(written.spec, source=f"{path} is damaged: spec")
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is damaged: {in_flags(error)}. Try: replay scan, from the beginning") from error
        if written.format != FORMAT:
            raise UsageError(f"{path} is of format {written.format}; this version goes on with {FORMAT} alone")
        return cls(
            folder=folder,
            command=written.command,
            machine=written.machine,
            spec=spec,
            damaged=written.damaged,
            groups=written.groups,
        )

    def write(self) -> None:
        file = _File(
            format=FORMAT,
            command=self.command,
            machine=self.machine,
            spec=spec_to_dict(self.spec),
            damaged=self.damaged,
            groups=self.groups,
        )
        write_atomically(self.folder / FILE, json_bytes(file))

    def pending(self) -> Iterator[tuple[int, Group]]:
        return ((number, group) for number, group in enumerate(self.groups) if group.state is State.PENDING)

    def settle(self, number: int, **changes: Any) -> Group:
        self.groups[number] = replace(self.groups[number], **changes)
        self.write()
        return self.groups[number]


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    format: int
    command: str
    machine: Machine
    spec: dict[str, Any]
    damaged: list[str]
    groups: list[Group]
