"""How far two numbers are apart, also where one of them is no number."""

import math

import pytest

from replay.tolerances.difference import absolute_difference, as_share, relative_difference

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "reference", "absolute", "relative"),
    [
        (3.0, 2.0, 1.0, 0.5),
        (3.0, -2.0, 5.0, 2.5),
        (0.0, 0.0, 0.0, 0.0),
        (1e-30, 0.0, 1e-30, INF),
        (NAN, NAN, 0.0, 0.0),
        (INF, INF, 0.0, 0.0),
        (INF, -INF, INF, INF),
        (NAN, -INF, 0.0, 0.0),
        (INF, NAN, 0.0, 0.0),
        (NAN, 1.0, INF, INF),
        (1.0, INF, INF, INF),
    ],
)
def test_numbers_are_apart_by_their_difference(
    value: float, reference: float, absolute: float, relative: float
) -> None:
    assert absolute_difference(value, reference) == absolute
    assert relative_difference(value, reference) == relative


def test_a_small_reference_is_taken_for_the_least_size() -> None:
    assert relative_difference(0.5, 0.25, least_size=1.0) == 0.25
    assert relative_difference(8.0, 4.0, least_size=1.0) == 1.0


def test_nothing_is_no_share_of_nothing() -> None:
    assert as_share(0.0, 0.0) == 0.0
    assert as_share(2.0, 4.0) == 0.5
    assert as_share(INF, 4.0) == INF
