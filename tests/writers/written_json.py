"""Hold each run.json, line of a pass and result of a campaign against replay/schemas/, where it has just been written.

A test may damage a log that it reads: nothing is checked there. Whoever writes may not leave out, rename or add a field
without its schema: what this version writes has no field that the schema lacks. A breach changes nothing in the process
that wrote; it goes into the folder BREACHES, and the fixture of tests/conftest.py fails the test.

This runs in processes that have neither the tests nor docs/ on their path.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

Check = Callable[[Any], bool]
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


@cache
def find_closed_check(name: str, part: str | None = None) -> Check:
    """Return what says whether `find_closed_validator` has no error, in a tenth of its time."""
    schema = _close(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    return make_check(schema if part is None else schema["properties"][part], schema.get("$defs", {}))


def make_check(schema: Any, definitions: Mapping[str, Any]) -> Check:
    """Return what says whether a value fits. Raises KeyError for a keyword that no schema had so far."""

    def make(schema: Any) -> Check:
        kinds = dict.fromkeys(KINDS[word] for word in schema if word not in REMARKS)
        checks = [make_kind(schema, make, find_definition) for make_kind in kinds]
        return checks[0] if len(checks) == 1 else lambda value: all(check(value) for check in checks)

    # Made with the first value that needs it: a definition may be part of itself.
    find_definition = cache(lambda name: make(definitions[name]))
    return make(schema)


def _check_type(schema: Any, make: Any, find_definition: Any) -> Check:
    words = schema["type"]
    tests = [TYPES[word] for word in ([words] if isinstance(words, str) else words)]
    return tests[0] if len(tests) == 1 else lambda value: any(test(value) for test in tests)


def _check_enum(schema: Any, make: Any, find_definition: Any) -> Check:
    # In JSON true is not 1.
    allowed = {(isinstance(value, bool), value) for value in schema["enum"]}
    return lambda value: not isinstance(value, (dict, list)) and (isinstance(value, bool), value) in allowed


def _check_const(schema: Any, make: Any, find_definition: Any) -> Check:
    return _check_enum({"enum": [schema["const"]]}, make, find_definition)


def _check_any(schema: Any, make: Any, find_definition: Any) -> Check:
    checks = [make(inner) for inner in schema["anyOf"]]
    return lambda value: any(check(value) for check in checks)


def _check_reference(schema: Any, make: Any, find_definition: Any) -> Check:
    name = schema["$ref"].removeprefix("#/$defs/")
    return lambda value: find_definition(name)(value)


def _check_properties(schema: Any, make: Any, find_definition: Any) -> Check:
    checks = {key: make(inner) for key, inner in schema.get("properties", {}).items()}
    others = schema.get("additionalProperties", True)
    check_other = (lambda _: others) if isinstance(others, bool) else make(others)
    return lambda value: (
        not isinstance(value, dict) or all(checks.get(key, check_other)(inner) for key, inner in value.items())
    )


def _check_names(schema: Any, make: Any, find_definition: Any) -> Check:
    check_name = make(schema.get("propertyNames", {}))
    required, dependent = schema.get("required", ()), schema.get("dependentRequired", {})
    return lambda value: (
        not isinstance(value, dict)
        or (
            all(name in value for name in required)
            and all(name in value for key, names in dependent.items() if key in value for name in names)
            and all(map(check_name, value))
        )
    )


def _check_items(schema: Any, make: Any, find_definition: Any) -> Check:
    first = [make(inner) for inner in schema.get("prefixItems", ())]
    check, least, most = make(schema.get("items", {})), schema.get("minItems", 0), schema.get("maxItems", math.inf)
    return lambda value: (
        not isinstance(value, list)
        or (
            least <= len(value) <= most
            and all(check(inner) for check, inner in zip(first, value, strict=False))
            and all(map(check, value[len(first) :]))
        )
    )


REMARKS = ("$defs", "$id", "$schema", "description", "format", "title", "version")
TYPES: Mapping[str, Check] = {
    "array": lambda value: isinstance(value, list),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
}
# What checks the keywords of a schema, together with their neighbours on which they hang.
KINDS: Mapping[str, Callable[..., Check]] = {
    "$ref": _check_reference,
    "anyOf": _check_any,
    "type": _check_type,
    "const": _check_const,
    "enum": _check_enum,
    **dict.fromkeys(("additionalProperties", "properties"), _check_properties),
    **dict.fromkeys(("dependentRequired", "propertyNames", "required"), _check_names),
    **dict.fromkeys(("items", "maxItems", "minItems", "prefixItems"), _check_items),
}


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
    if find_closed_check(name, part)(value):
        return []
    errors = find_closed_validator(name, part).iter_errors(value)
    breaches = [f"{name}.json: {error.json_path}: {error.message[:300]}" for error in errors]
    return breaches or [f"{name}.json: its quick check refuses what its validator does not"]


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

    find_closed_check("run")
    _call_after(module.RunFile, check)


def _watch_passes(module: ModuleType) -> None:
    def check(book: Any, record: Any) -> None:
        path = book.folder / f"rank{book.rank}.jsonl"
        with path.open("rb") as file:
            file.seek(book._last_line_offset)
            _check(path, file.read(), lambda value: list_breaches(value, "pass"))

    find_closed_check("pass")
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
    WATCHED[module.__name__](module)
