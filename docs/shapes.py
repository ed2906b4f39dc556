"""Make the dataclasses that `python -m docs.write_schemas` describes, where what is written is no dataclass itself."""

from collections.abc import Iterable
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from typing import Any, get_type_hints

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
