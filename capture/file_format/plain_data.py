"""Copy plain data, all that a class-free pickle holds: None, numbers, texts, bytes, and containers of these."""

from typing import Any

import torch

MAX_DEPTH = 16  # lists within lists; a call's facts are flat or nearly so
MAX_INT_BYTES = 8


def plain_copy(value: Any, *, max_depth: int = MAX_DEPTH) -> Any:
    """Copy `value` into what a class-free pickle can hold: exact built-in types only, nothing referred to twice.

    Raises TypeError naming the first type that is not plain data.
    """
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    if type(value) is int and value.bit_length() < 8 * MAX_INT_BYTES:
        return value
    if max_depth > 0:
        if type(value) is list:
            return [plain_copy(item, max_depth=max_depth - 1) for item in value]
        if type(value) in (tuple, torch.Size):
            return tuple(plain_copy(item, max_depth=max_depth - 1) for item in value)
        if type(value) is dict and all(type(key) is str for key in value):
            return {key: plain_copy(item, max_depth=max_depth - 1) for key, item in value.items()}
    raise TypeError(type_name(value))


def is_deeper(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Tell whether more than `max_depth` lists, tuples and dicts lie within one another."""
    level = [value]
    for _ in range(max_depth + 2):
        level = [
            item
            for container in level
            if isinstance(container, list | tuple | dict)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    return bool(level)


def type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
