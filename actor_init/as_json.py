"""Turn dataclasses into JSON and back. What does not fit is refused with the file, the field and what is allowed there.

    text = json.dumps(to_json(record), allow_nan=False)
    record = parse_json(PassRecord, text, source="logs/night/rank0.jsonl, line 3")

    UsageError: logs/night/rank0.jsonl, line 3: phases.forward.seconds is '5'; allowed is a valid number

Reading is strict: no text where a number belongs, no field that the class does not have. A dataclass needs nothing for
it but its annotations. A float that JSON has no word for is the string "nan", "inf" or "-inf"; a field that may hold
one is annotated as `AnyFloat`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from actor_init.toggles import UsageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
NOT_FINITE = ("nan", "inf", "-inf")
MAX_LENGTH = 200  # of a refused value, as the message has it


class _NotFiniteAsText:
    """Tells pydantic to take the text of a float that JSON has no word for."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(_float_of_text, handler(source))


AnyFloat = Annotated[float, _NotFiniteAsText()]
_ADAPTERS: "dict[Any, TypeAdapter[Any]]" = {}


def to_json(value: Any) -> Any:
    """What `json.dumps` takes: dataclasses and mappings as objects, a float that JSON has no word for as text.

    A set is a sorted list, and what JSON does not know, such as a path, is its text.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(to_json(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)


def from_json(kind: type[T], value: Any, *, source: str, ignore_others: bool = False) -> T:
    """Make a `kind` of what `json.loads` gave. With `ignore_others` an object may have fields that `kind` has not.

    Raises UsageError, which begins with `source`, for what is no such thing.
    """
    if ignore_others and isinstance(value, Mapping):
        value = {name: value[name] for name in get_type_hints(kind) if name in value}
    return parse_json(kind, json.dumps(value), source=source)


def parse_json(kind: type[T], text: str | bytes, *, source: str) -> T:
    """Make a `kind` of JSON. Raises UsageError, which begins with `source`, for what is no such thing."""
    from pydantic import ValidationError

    try:
        return adapter_of(kind).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        raise UsageError(f"{source}: {_reason(kind, error)}") from error


def adapter_of(kind: type[T]) -> "TypeAdapter[T]":
    """Make what reads a `kind`, once a process. The first call imports pydantic, which takes a tenth of a second."""
    from pydantic import TypeAdapter

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _float_of_text(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value


def _reason(kind: type, error: "ValidationError") -> str:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    way = ".".join(str(part) for part in first["loc"])
    if first["type"] == "json_invalid":
        return f"no JSON: {first['ctx']['error']}"
    if first["type"] == "value_error":  # by __post_init__, in words of its own
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{way} is missing"
    if first["type"] == "unexpected_keyword_argument":
        return f"{way} is unknown; allowed are {', '.join(_fields_at(kind, first['loc'][:-1]))}"
    came = json.dumps(first["input"])
    came = came if len(came) <= MAX_LENGTH else f"{came[:MAX_LENGTH]} [...]"
    allowed = first["msg"].removeprefix("Input should be ")
    return f"{way or 'it'} is {came}; allowed is {allowed}"


def _fields_at(kind: Any, way: tuple[int | str, ...]) -> list[str]:
    """The fields of the dataclass that is reached from `kind` by names of fields, keys and places in lists."""
    for part in way:
        kind = get_type_hints(kind)[str(part)] if is_dataclass(kind) else get_args(kind)[-1]
        if get_origin(kind) in (Union, UnionType):
            kind = next(one for one in get_args(kind) if one is not type(None))
    return list(get_type_hints(kind))
