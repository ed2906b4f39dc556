"""Write replay/schemas/: what is in a log, and what --json prints, as JSON Schema made from the dataclasses.

python -m docs.write_schemas
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from actor_init.as_json import make_json_schema
from docs.campaign_shapes import PRINTED, Campaign, CapturedPass
from docs.shapes import CALL, list_fields, make_shape
from replay.campaign.campaign import FORMAT as CAMPAIGN_FORMAT
from replay.commands.diagnose.report import Diagnosis
from replay.commands.inspect.inspection import Inspection
from replay.commands.mismatch.report import MismatchReport
from replay.comparison.differences import Differences
from replay.options.spec import ReplaySpec
from replay.output.text import CheckResult
from replay.post_mortem.blocking_ranks import LastSighting
from replay.post_mortem.schedule_differences import ScheduleDifference
from replay.profiling.profile_records import MemoryPeak, Profile
from replay.runlog.records import PASS_LINE
from replay.runlog.run_file import FORMAT, RunEnd, RunFailure, RunStart, UnusedFile
from replay.runner.out_of_memory import OutOfMemory
from replay.tracing.first_difference import FirstDifference
from replay.verdict.outcomes import Verdict

FOLDER = Path(__file__).parent.parent / "replay" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Raised with a change that a reader of the old files would misread.
RESULT_VERSION = 1

# run.json has the fields of the start of a run and of its end side by side, and those that are not known yet are not
# there. The sections of the end are those that packages above the log write.
_START = list_fields(RunStart, spec=ReplaySpec)
_END = list_fields(
    RunEnd,
    optional=True,
    verdict=Verdict | None,
    profile=Profile | None,
    memory=MemoryPeak | None,
    out_of_memory=OutOfMemory | None,
)
_RUN = make_shape(
    "RunJson",
    [
        ("format", Literal[FORMAT]),
        ("status", Literal["running", "finished", "failed", "interrupted"]),
        *((name, kind, field(default=None)) for name, kind, *_ in _START),
        *_END,
        ("failure", RunFailure, field(default=None)),
        ("exit_code", int, field(default=None)),
        ("seconds", float, field(default=None)),
    ],
)
_COMPARED = make_shape(
    "ComparedRun",
    [
        ("run", str),
        ("within", bool),
        *list_fields(Differences),
        ("first_difference", FirstDifference | None, field(default=None)),
    ],
)


@dataclass(kw_only=True)
class _Replay:
    folder: str
    problems: list[str]
    run: _RUN  # type: ignore[valid-type]
    passes: list[PASS_LINE]  # type: ignore[valid-type]


@dataclass(kw_only=True)
class _Comparison:
    threshold: float
    runs: list[str]
    settings: Mapping[str, Sequence[str]]
    comparisons: list[_COMPARED]  # type: ignore[valid-type]


@dataclass(kw_only=True)
class _Schedule:
    world_size: int
    num_passes: int
    differences: list[ScheduleDifference]


@dataclass(kw_only=True)
class _Hang:
    folder: str
    ranks: list[int]
    reason: str | None
    sightings: list[LastSighting]
    schedules: list[_Schedule]
    salvaged: str | None
    damage: str | None


@dataclass(kw_only=True)
class _Doctor:
    works: bool
    failing: list[str]
    groups: Mapping[str, Sequence[CheckResult]]


@dataclass(kw_only=True)
class _Report:
    path: str
    problems: list[str]


_INSPECTION = make_shape(
    "Inspection",
    list_fields(Inspection, damaged=list[UnusedFile], unreplayable=list[UnusedFile], hang=Mapping[str, str]),
)
# By the name of the file: what it describes, the dataclass, and the version.
DOCUMENTS: dict[str, tuple[str, Any, int]] = {
    "run": ("run.json of a replay's log", _RUN, FORMAT),
    "pass": ("A line of rank<k>.jsonl of a replay's log", PASS_LINE, FORMAT),
    "verdict": ("The verdict of run.json", Verdict, FORMAT),
    "replay": ("replay --json", _Replay, FORMAT),
    "compare": ("replay compare --json", _Comparison, RESULT_VERSION),
    "diagnose": ("replay diagnose --json", make_shape("Diagnose", [*CALL, ("result", Diagnosis)]), RESULT_VERSION),
    "doctor": ("replay doctor --json", _Doctor, RESULT_VERSION),
    "hang": ("replay hang --json", _Hang, RESULT_VERSION),
    "inspect": ("replay inspect --json", _INSPECTION, RESULT_VERSION),
    "mismatch": (
        "replay mismatch --json",
        make_shape("Mismatch", [*CALL, ("result", MismatchReport)]),
        RESULT_VERSION,
    ),
    "report": ("replay report --json", _Report, RESULT_VERSION),
    **{command: (f"replay {command} --json", kind, RESULT_VERSION) for command, kind in PRINTED.items()},
    "campaign": ("The JSON file that a command of many replays leaves in its folder", Campaign, CAMPAIGN_FORMAT),
    "capture": ("A capture of replay.captures, as to_dict() returns it", CapturedPass, RESULT_VERSION),
}


def make_schema(name: str) -> dict[str, Any]:
    """Return the schema of a document."""
    title, kind, version = DOCUMENTS[name]
    schema = make_json_schema(kind)
    described = {"$schema": DIALECT, "$id": f"urn:micro-replay:{name}:{version}", "title": title, "version": version}
    run = schema if name == "run" else schema.get("$defs", {}).get("RunJson")
    if run is not None:
        # A run that has begun has named its devices and all that is known at the start.
        run["dependentRequired"] = {"devices": [name for name, *_ in _START]}
    return described | schema


def format_schema(name: str) -> bytes:
    """Return the file of a document as it is now: a line for each property and each definition."""
    parts = [f"{json.dumps(key)}: {_format_entries(value)}" for key, value in make_schema(name).items()]
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def _format_entries(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in DOCUMENTS:
        (FOLDER / f"{name}.json").write_bytes(format_schema(name))
