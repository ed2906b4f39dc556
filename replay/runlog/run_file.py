"""Hold what run.json holds of a run: one class writes it, and reads it. docs/formats.md explains the fields.

{"format": 1, "status": "finished", "started": "2026-03-01T09:12:44+01:00", "command": "replay --max-inputs 5",
 "spec": {...}, "resolved": [...], "facts": {...}, "work": {"weights": ..., "config": {...}},
 "inputs": {...}, "memory_kind": "cuda allocator", "world_size": 1, "devices": [...],
 "versions": {"python": "3.12.3", "torch": "2.11.0", "flash-attn": null, ...},
 "statistics": {...}, "verdict": {"outcome": "REPRODUCED", ...}, "exit_code": 0, "seconds": 41.3}
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from actor_init.as_json import from_json, json_bytes, to_json
from actor_init.spec import UsageError
from replay.output.text import join_lines
from replay.runlog.summary import Statistics

# The format of run.json and rank<k>.jsonl. It is raised when readers of the old format would misread the new one.
FORMAT = 1
RUN_FILE = "run.json"

# A section as JSON has it, whose class only the packages above this one know.
Values = Mapping[str, Any]
Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWork:
    """What another run must share to be comparable: the digest of its weights, and the model's config."""

    weights: str
    config: Values


@dataclass(frozen=True, kw_only=True, slots=True)
class UnusedFile:
    """A file of the inputs that is not replayed."""

    path: str
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInputs:
    """Which inputs are replayed, and how they were dealt."""

    num_inputs: int
    dealing: str
    num_left_out_passes: int
    num_left_over: int
    not_recorded: Mapping[str, int] = field(default_factory=dict)
    damaged: Sequence[UnusedFile] = ()
    unreplayable: Sequence[UnusedFile] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """What is known of a run before its first pass.

    started   ISO 8601
    command   without the launcher
    resolved  the choices that were made, each with who made it
    devices   by rank
    """

    started: str
    command: str
    spec: Values
    resolved: Sequence[Values]
    facts: Mapping[str, object]
    work: RunWork
    inputs: RunInputs
    memory_kind: str
    world_size: int
    devices: Sequence[str]
    versions: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstNonFinite:
    """The first tensor of a run with a nan or an inf."""

    index: int
    source: str
    rank: int
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingRemark:
    """What a check says of the job's recording, which changes no verdict.

    topic  what it is about, in a word
    cause  the verdict's cause that says the same of a job that differs; None: none does
    """

    topic: str
    text: str
    cause: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """The results of a run. The packages that compute the sections of type `Values` write and read them.

    remarks  on the recording, the most telling first; None: a resumed run, or an older log, which has none
    """

    statistics: Statistics
    verdict: Values | None = None
    profile: Values | None = None
    memory: Values | None = None
    out_of_memory: Values | None = None
    first_non_finite: FirstNonFinite | None = None
    remarks: Sequence[RecordingRemark] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """Which rank and input ended a run, and where each rank was."""

    kind: str | None = None
    rank: int | None = None
    index: int | None = None
    source: str | None = None
    phase: str | None = None
    error: str | None = None
    ranks: Sequence[Values] = ()


def read_section(kind: type[Part], values: Values | None, *, source: str) -> Part | None:
    """Read a section of a run's end. Raises UsageError if another version wrote it, in another form."""
    return None if values is None else from_json(kind, values, source=source)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """run.json: written when a run has begun, and again when it has ended.

    start      None: a rank failed before the run had begun
    exit_code  None: the run goes on, or was killed
    """

    status: str
    start: RunStart | None = None
    end: RunEnd | None = None
    failure: RunFailure | None = None
    exit_code: int | None = None
    seconds: float | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the run.json of a run's folder. Raises UsageError if it is damaged, or of another format."""
        path = folder / RUN_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {join_lines(str(error))}. Try: the run again") from error
        if not isinstance(values, dict):
            raise UsageError(f"{path} holds a {type(values).__name__}, not a run. Give a folder that a run left")
        if values.get("format") != FORMAT:
            version = (values.get("versions") or {}).get("micro-replay")
            wrote = f", by micro-replay {version}" if version else ""
            form = f"in format {values['format']}" if "format" in values else "before logs had a format"
            raise UsageError(
                f"{folder} was written {form}{wrote}; this version compares logs of format {FORMAT}. "
                f"Try: the version that wrote it, or the run again"
            )

        def read_part(kind: type[Part], part: Any = values) -> Part:
            try:
                return from_json(kind, part, source=f"{path} is damaged", ignore_unknown_fields=True)
            except UsageError as error:
                raise UsageError(f"{error.text}. Try: {values.get('command', 'replay')}, again") from error

        return cls(
            status=str(values.get("status")),
            start=read_part(RunStart) if "devices" in values else None,
            end=read_part(RunEnd) if "statistics" in values else None,
            failure=read_part(RunFailure, failure) if (failure := values.get("failure")) else None,
            exit_code=values.get("exit_code"),
            seconds=values.get("seconds"),
        )

    @property
    def command(self) -> str:
        return "replay" if self.start is None else self.start.command

    def describe_failed_rank(self) -> str:
        """Write ` on rank 3` where it is known which rank ended the run, else nothing."""
        return "" if self.failure is None or self.failure.rank is None else f" on rank {self.failure.rank}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of run.json, without those that are not known yet."""
        parts = [to_json(part) for part in (self.start, self.end) if part is not None]
        last = {"failure": to_json(self.failure), "exit_code": self.exit_code, "seconds": self.seconds}
        fields: dict[str, Any] = {"format": FORMAT, "status": self.status}
        for part in (*parts, {name: value for name, value in last.items() if value is not None}):
            fields |= part
        return fields

    def write(self, folder: Path) -> None:
        """Replace run.json at once, so that no reader sees a part of it."""
        path = folder / RUN_FILE
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_bytes(json_bytes(self.to_dict(), indent=2))
        os.replace(unfinished, path)
