"""One rule says which values a program may give: Python's numbers, and what its protocols say is a number."""

import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import tensor

from actor_init.spec import UsageError
from replay.options.value_checks import check_value


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ("4", int, 4),
        (np.uint8(4), int, 4),
        (np.float64(4), int, 4),
        (Fraction(8, 2), int, 4),
        (tensor(4), int, 4),
        (10**400, int, 10**400),
        (4, float, 4.0),
        ("4e-1", float, 0.4),
        (np.int64(4), float, 4.0),
        (np.float16(0.5), float, 0.5),
        (np.array(0.5), float, 0.5),
        (Fraction(1, 2), float, 0.5),
        (math.inf, float, math.inf),
        (np.bool_(False), bool, False),
        (Path("x"), str, "x"),
        (np.str_("x"), Path, Path("x")),
    ],
    ids=repr,
)
def test_a_value_comes_back_as_python_s(given: Any, kind: type, value: Any) -> None:
    checked: Any = check_value("x", given, kind, min=None, max=math.inf)
    assert (checked, type(checked)) == (value, type(value))


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        *((given, int) for given in (True, np.bool_(True), 2.5, np.float32(2.5), "two", math.nan, None, [2])),
        *((given, float) for given in (True, np.bool_(True), "x", 1j, Decimal(2), np.array([2.0]), math.nan, b"2")),
        *((given, bool) for given in (1, "no", np.int64(1), None)),
        *((given, str) for given in (3, b"x", "", "a\0b", None)),
    ],
    ids=repr,
)
def test_what_would_change_in_the_conversion_is_refused_with_what_came(given: Any, kind: type) -> None:
    with pytest.raises(UsageError, match=r"is not allowed\. Give (a |True or False)"):
        check_value("x", given, kind)


def test_the_range_is_said() -> None:
    for given, says in ((0, "a whole number from 1 to 3"), (4, "a whole number from 1 to 3")):
        with pytest.raises(UsageError, match=f"x={given} is not allowed. Give {says}"):
            check_value("x", given, int, min=1, max=3)
    with pytest.raises(UsageError, match=r"x=0\.5 is not allowed\. Give a number of at least 1$"):
        check_value("x", 0.5, float, min=1, max=math.inf)
