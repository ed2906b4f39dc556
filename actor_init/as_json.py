"""Turn dataclasses into JSON and back. Errors name the file, the field and what is allowed.

    text = json.dumps(to_json(record), allow_nan=False)
    record = parse_json(PassRecord, text, source="logs/night/rank0.jsonl, line 3")

    UsageError: logs/night/rank0.jsonl, line 3: phases.forward.seconds is '5'; allowed is a valid number

Reading is strict: text is not accepted as a number, nor an unknown field. A dataclass needs only its annotations.
A non-finite float is stored as the string "nan", "inf" or "-inf"; a field that may hold such a float is annotated as
`AnyFloat`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from actor_init.option_values import UsageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
NOT_FINITE = ("nan", "inf", "-inf")
# The longest invalid value that an error message repeats, in characters.
MAX_LENGTH = 200


class _NotFiniteAsText:
    """Tell pydantic to accept a non-finite float as text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(_parse_float, handler(source))

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [handler(core_schema), {"enum": list(NOT_FINITE)}]}


AnyFloat = Annotated[float, _NotFiniteAsText()]
_PLAIN_KINDS = frozenset((str, int, bool, type(None)))
_ADAPTERS: "dict[Any, TypeAdapter[Any]]" = {}


def to_json(value: Any) -> Any:
    """Return what `json.dumps` accepts: dataclasses and mappings as objects, non-finite floats as text.

    A set becomes a sorted list; other types, such as a path, become their text.
    """
    # Most values by far are plain, and each of the questions below costs as much as all of this.
    kind = type(value)
    if kind in _PLAIN_KINDS or (kind is float and math.isfinite(value)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(to_json(inner) for inner in value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)


def json_bytes(value: Any, *, indent: int = 1) -> bytes:
    """Return the content of a file that holds what `to_json` makes of `value`."""
    return f"{json.dumps(to_json(value), indent=indent, allow_nan=False)}\n".encode()


def from_json(kind: type[T], value: Any, *, source: str, ignore_unknown_fields: bool = False) -> T:
    """Make a `kind` from the result of `json.loads`. Unknown fields of objects are ignored, if asked for.

    Raises UsageError, with a message that begins with `source`, if the value does not fit.
    """
    if ignore_unknown_fields and isinstance(value, Mapping):
        value = {name: value[name] for name in get_type_hints(kind) if name in value}
    return parse_json(kind, json.dumps(value), source=source)


def parse_json(kind: type[T], text: str | bytes, *, source: str) -> T:
    """Make a `kind` from JSON. Raises UsageError, whose message begins with `source`, if the text does not fit."""
    from pydantic import ValidationError

    try:
        return find_type_adapter(kind).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        raise UsageError(f"{source}: {_describe_first_error(kind, error)}") from error


def find_type_adapter(kind: type[T]) -> "TypeAdapter[T]":
    """Return the reader of `kind`, made once per process. The first call imports pydantic, which takes 0.1 s."""
    from pydantic import TypeAdapter

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def make_json_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of what `to_json` makes of a `kind`, without titles and defaults.

    A field with a default may be missing, as it is in the files of an older version, and unknown ones are allowed, as
    in those of a newer one.
    """
    schema: dict[str, Any] = _strip_schema(find_type_adapter(kind).json_schema())
    return schema


def _strip_schema(schema: Any) -> Any:
    """Return the schema without the keywords that say nothing about what is allowed; names of fields stay."""
    if isinstance(schema, list):
        return [_strip_schema(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _strip_schema(inner) for name, inner in value.items()}
        if key in ("properties", "$defs")
        else _strip_schema(value)
        for key, value in schema.items()
        if key not in ("title", "default")
    }


def _parse_float(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value


def _describe_first_error(kind: type, error: "ValidationError") -> str:
    """Return the first error, in one line."""
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "json_invalid":
        return f"no JSON: {first['ctx']['error']}"
    # A dataclass's __post_init__ raised it: its message is a sentence already.
    if first["type"] == "value_error":
        raised = first["ctx"]["error"]
        return raised.text if isinstance(raised, UsageError) else str(raised)
    if first["type"] == "missing":
        return f"{path} is missing"
    if first["type"] == "unexpected_keyword_argument":
        return f"{path} is unknown; allowed are {', '.join(_list_fields_at(kind, first['loc'][:-1]))}"
    shown_value = json.dumps(first["input"])
    shown_value = shown_value if len(shown_value) <= MAX_LENGTH else f"{shown_value[:MAX_LENGTH]} [...]"
    allowed = first["msg"].removeprefix("Input should be ")
    return f"{path or 'it'} is {shown_value}; allowed is {allowed}"


def _list_fields_at(kind: Any, path: tuple[int | str, ...]) -> list[str]:
    """Return the fields of the dataclass reached from `kind` by field names, keys and list indices."""
    for part in path:
        kind = get_type_hints(kind)[str(part)] if is_dataclass(kind) else get_args(kind)[-1]
        if get_origin(kind) in (Union, UnionType):
            kind = next(alternative for alternative in get_args(kind) if alternative is not type(None))
    return list(get_type_hints(kind))
