"""Hold logs and results against the schemas of replay/schemas/, with a validator that is not this project's."""

from typing import Any

from tests.writers.written_json import find_validator, list_breaches

__all__ = ["assert_valid", "find_validator"]


def assert_valid(name: str, value: Any, *, written_here: bool = True) -> None:
    """Fail with each place where `value` does not fit the schema, and what came.

    written_here  by this version, so that no field may be missing in the schema
    """
    if written_here:
        errors = list_breaches(value, name)
    else:
        errors = [f"{error.json_path}: {error.message[:300]}" for error in find_validator(name).iter_errors(value)]
    assert errors == [], f"{name}.json: {errors[:3]}"
