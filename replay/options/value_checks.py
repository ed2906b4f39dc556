"""Check a setting's value, typed as text or given by a program: one rule for every function and command."""

import math
from collections.abc import Callable, Collection
from enum import StrEnum
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

from actor_init.spec import UsageError
from capture.facts import Setting

T = TypeVar("T")


def check_value(
    name: str,
    given: Any,
    kind: type[T],
    *,
    min: float | None = None,
    max: float | None = None,
    choices: Collection[str] = (),
) -> T:
    """Return the value of the setting `name` as one of `kind`: bool, int, float, str, Path or an enum of words.

    A number is what Python's own protocols say is one, such as numpy's scalars. Raises UsageError for another value.

    max  inf: infinity is allowed too; None: every finite number is
    """
    given, choices = unbox(given), list(kind) if issubclass(kind, StrEnum) else choices
    make: Callable[[Any], T] = kind
    try:
        value = make(given) if _is_convertible(kind, given) else None
    except (TypeError, ValueError, OverflowError):
        value = None
    if value is None or given == "" or (choices and value not in choices):
        raise UsageError.not_allowed(name, given, f"Give {_describe_allowed(kind, min, max, choices)}")
    check_range(name, value, min=min, max=max)
    return value


def check_range(name: str, value: Any, *, min: float | None, max: float | None) -> None:
    """Raise UsageError for a number that is below `min`, above `max` or not finite."""
    if isinstance(value, (int, float)) and not (
        (isinstance(value, int) or math.isfinite(value) or value == max)
        and (min is None or value >= min)
        and (max is None or value <= max)
    ):
        allowed = _describe_allowed(type(value), min, max, ())
        raise UsageError(Setting(name, value), "is not allowed", f"Give {allowed}")


def unbox(given: Any) -> Any:
    """Return the number, truth or text that a scalar of numpy or a tensor without dimensions holds; else `given`."""
    return given.item() if getattr(given, "shape", None) == () else given


def _is_convertible(kind: Any, given: Any) -> bool:
    """Tell whether Python's own conversion keeps the value: `bool("no")`, `int(2.5)` and `str(None)` do not."""
    if isinstance(given, bool) or kind is bool:
        return isinstance(given, bool) and kind is bool
    if kind is int:
        return isinstance(given, (str, SupportsIndex)) or (isinstance(given, Real) and given == math.floor(given))
    if kind is float:
        return isinstance(given, (str, Real))
    # The system takes no name with a null byte.
    return isinstance(given, (str, PathLike)) and "\0" not in str(given)


def _describe_allowed(kind: Any, min: float | None, max: float | None, choices: Collection[str]) -> str:
    if kind is bool:
        return "True or False"
    if choices:
        return f"one of {', '.join(choices)}"
    number = "a number" if max == math.inf else "a finite number"
    noun = {int: "a whole number", float: number, Path: "a path", str: "a name"}[kind]
    if max is not None and max != math.inf:
        return f"{noun} from {min} to {max}"
    return noun if min is None else f"{noun} of at least {min:g}"
