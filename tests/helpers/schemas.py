"""Hold logs and results against the schemas of replay/schemas/, with a validator that is not this project's."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from docs.write_schemas import FOLDER


@cache
def find_validator(name: str) -> Any:
    from jsonschema import Draft202012Validator

    schema = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def assert_valid(name: str, value: Any) -> None:
    """Fail with each place where `value` does not fit the schema, and what came."""
    errors = [f"{error.json_path}: {error.message[:300]}" for error in find_validator(name).iter_errors(value)]
    assert errors == [], f"{name}.json: {errors[:3]}"


def assert_log_is_valid(folder: Path) -> None:
    """Check run.json and every line of every rank of a log."""
    assert_valid("run", json.loads((folder / "run.json").read_text(encoding="utf-8")))
    for file in folder.glob("rank*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            assert_valid("pass", json.loads(line))
