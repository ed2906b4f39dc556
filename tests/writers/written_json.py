"""Hold each run.json, line of a pass and result of a campaign against replay/schemas/, where it has just been written.

A test may damage a log that it reads: nothing is checked there. Whoever writes may not leave out, rename or add a field
without its schema: what this version writes has no field that the schema lacks. A breach changes nothing in the process
that wrote; it goes into the folder BREACHES, and the fixture of tests/conftest.py fails the test.

This runs in processes that have neither the tests nor docs/ on their path.
"""

import json
import os
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

HOME = str(Path(__file__).parent)
FOLDER = Path(__file__).parents[2] / "replay" / "schemas"
# Variable with the folder where breaches are noted, a file a process.
BREACHES = "TESTS_SCHEMA_BREACHES"


@cache
def find_validator(name: str) -> Any:
    """Return what checks a document as a reader may: a later version's fields are none of its business."""
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


@cache
def find_closed_validator(name: str, part: str | None = None) -> Any:
    """Return what checks a document, or the value of its property `part`, that this version has written."""
    from jsonschema import Draft202012Validator

    schema = _close(find_validator(name).schema)
    return Draft202012Validator(schema if part is None else schema["properties"][part] | {"$defs": schema["$defs"]})


def _close(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_close(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _close(inner) for key, inner in schema.items()}
    return {"additionalProperties": False} | closed if isinstance(schema.get("properties"), dict) else closed


def parse_strictly(text: str | bytes) -> Any:
    """Return the value of strict JSON. Raises ValueError for NaN and infinities, which JSON does not have."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def list_breaches(value: Any, name: str, part: str | None = None) -> list[str]:
    """Return each place where a value that this version has written does not fit, and what is there."""
    errors = find_closed_validator(name, part).iter_errors(value)
    return [f"{name}.json: {error.json_path}: {error.message[:300]}" for error in errors]


def _check(path: Path, text: bytes, check: Callable[[Any], list[str]]) -> None:
    folder = os.environ.get(BREACHES)
    if folder is None:
        return
    try:
        breaches = check(parse_strictly(text))
    except ValueError as error:
        breaches = [str(error)]
    if breaches:
        with open(Path(folder) / f"{os.getpid()}.txt", "a", encoding="utf-8") as file:
            file.writelines(f"{path}: {breach}\n" for breach in breaches)


def take_breaches() -> Sequence[str]:
    """Return what was noted since the last call."""
    lines: list[str] = []
    for path in sorted(Path(os.environ[BREACHES]).iterdir()):
        lines += path.read_text(encoding="utf-8").splitlines()
        path.unlink()
    return lines


def _watch_runs(module: ModuleType) -> None:
    def check(run: Any, folder: Path) -> None:
        path = folder / module.RUN_FILE
        _check(path, path.read_bytes(), lambda value: list_breaches(value, "run"))

    _call_after(module.RunFile, check)


def _watch_passes(module: ModuleType) -> None:
    def check(book: Any, record: Any) -> None:
        path = book.folder / f"rank{book.rank}.jsonl"
        with path.open("rb") as file:
            file.seek(book._last_line_offset)
            _check(path, file.read(), lambda value: list_breaches(value, "pass"))

    _call_after(module.Logbook, check)


def _watch_campaigns(module: ModuleType) -> None:
    def check(campaign: Any) -> None:
        _check(
            campaign.path,
            campaign.path.read_bytes(),
            lambda value: _list_campaign_breaches(campaign.command_name, value),
        )

    _call_after(module.Campaign, check)


def _list_campaign_breaches(name: str, value: Any) -> list[str]:
    breaches = list_breaches(value, "campaign")
    # The campaign of `compare` has its runs as result; what --json prints is the comparison that is read from them.
    has_schema = name != "compare" and (FOLDER / f"{name}.json").exists()
    if breaches or value["result"] is None or not has_schema:
        return breaches
    properties = find_validator(name).schema["properties"]
    # What --json prints of a campaign has its result beside the exit code. check-upgrade's is all that it prints.
    return list_breaches(value["result"], name, "result" if "exit_code" in properties else None)


def _call_after(owner: Any, check: Callable[..., None]) -> None:
    """Call `check` with the arguments of the method `write` after each call."""
    write = vars(owner)["write"]
    # A worker of pytest-xdist is watched since it was started, before tests/conftest.py asks for it.
    if hasattr(write, "__wrapped__"):
        return

    @wraps(write)
    def write_and_check(*arguments: Any) -> None:
        write(*arguments)
        check(*arguments)

    owner.write = write_and_check


WATCHED = {
    "replay.runlog.run_file": _watch_runs,
    "replay.runlog.writer": _watch_passes,
    "replay.campaign.campaign": _watch_campaigns,
}


def watch(module: ModuleType) -> None:
    """Check from now on what the module writes."""
    # Here, and not with the first pass: a module that is imported during a pass marks it.
    import jsonschema  # noqa: F401

    WATCHED[module.__name__](module)
