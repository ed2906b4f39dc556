"""Write replay/schemas/: what is in a log, and what --json prints, as JSON Schema made from the dataclasses.

python -m docs.write_schemas
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from actor_init.as_json import make_json_schema
from replay.api.captures import Capture
from replay.campaign.campaign import FORMAT as CAMPAIGN_FORMAT
from replay.campaign.campaign import CampaignFile
from replay.commands.check_upgrade.result import UpgradeCheck, UpgradeResult
from replay.commands.diagnose.report import Diagnosis
from replay.commands.inspect.inspection import Inspection
from replay.commands.minimise.runs import MinimisedOutcome
from replay.commands.mismatch.report import MismatchReport
from replay.commands.parity.report import ParityOutcome
from replay.commands.recompiles.runs import RecompilesOutcome
from replay.commands.scan.runs import ScanOutcome
from replay.commands.suite.runs import SuiteOutcome
from replay.commands.worst.sections import WorstOutcome
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

Field = tuple[str, Any] | tuple[str, Any, Any]
# The fields around the result of a command that leaves a folder, in what --json prints.
CALL: list[Field] = [("folder", str), ("command", str), ("exit_code", int)]


def list_fields(kind: type, *, optional: bool = False, **changes: Any) -> list[Field]:
    """List the fields of a dataclass for another one. `changes`: other types of some. `optional`: each may miss."""
    assert is_dataclass(kind)
    hints = get_type_hints(kind, include_extras=True) | changes
    return [
        (part.name, hints[part.name])
        if not optional and part.default is MISSING and part.default_factory is MISSING
        else (part.name, hints[part.name], field(default=None))
        for part in fields(kind)
    ]


def make_shape(name: str, parts: Iterable[Field]) -> type:
    return make_dataclass(name, parts, kw_only=True)


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


@dataclass(kw_only=True)
class _TensorForm:
    shape: Sequence[int]
    dtype: str


_FORMS = Mapping[str, _TensorForm]
# What --json prints of a command that leaves a folder is what `CampaignResult.to_dict` returns of these.
_OUTCOMES: Mapping[str, type] = {
    "diagnose": Diagnosis,
    "minimise": MinimisedOutcome,
    "mismatch": MismatchReport,
    "parity": ParityOutcome,
    "recompiles": RecompilesOutcome,
    "scan": ScanOutcome,
    "suite": SuiteOutcome,
    "worst": WorstOutcome,
}
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
    "doctor": ("replay doctor --json", _Doctor, RESULT_VERSION),
    "hang": ("replay hang --json", _Hang, RESULT_VERSION),
    "inspect": ("replay inspect --json", _INSPECTION, RESULT_VERSION),
    "report": ("replay report --json", _Report, RESULT_VERSION),
    "check-upgrade": (
        "replay check-upgrade --json",
        make_shape("ReplayCheckUpgrade", [("result", UpgradeResult), *list_fields(UpgradeCheck)]),
        RESULT_VERSION,
    ),
    **{
        command: (
            f"replay {command} --json",
            make_shape(f"Replay{command.capitalize()}", [*CALL, ("result", outcome)]),
            RESULT_VERSION,
        )
        for command, outcome in _OUTCOMES.items()
    },
    "campaign": (
        "The JSON file that a command of many replays leaves in its folder",
        make_shape("Campaign", list_fields(CampaignFile, format=Literal[CAMPAIGN_FORMAT])),
        CAMPAIGN_FORMAT,
    ),
    "capture": (
        "A capture of replay.captures, as to_dict() returns it",
        make_shape(
            "CapturedPass",
            [part for part in list_fields(Capture, path=str, tensors=_FORMS, notes=_FORMS) if part[0] != "outputs"],
        ),
        RESULT_VERSION,
    ),
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
