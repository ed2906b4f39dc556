"""Three questions whether recorded weights moved, each with a threshold of its own."""

from typing import Any

import pytest

from capture.file_format.optimizer_step import Sample
from replay.verdict.recorded_pass import RecordedPass, WeightComparison
from replay.verdict.weight_movement import (
    LEAST_SAMPLES,
    Samples,
    are_same,
    did_any_move,
    did_most_move,
    find_moved_parameters,
)


def make_pass(
    num_steps: int | None, values: dict[str, float] | None = None, *, rank: int = 0, **weights: Any
) -> RecordedPass:
    samples = [
        Sample(name=name, dtype="float32", shape=(1,), start=0, values=(value,))
        for name, value in (values or {}).items()
    ]
    return RecordedPass(
        rank=rank,
        forward_number=0,
        world_size=1,
        trains=True,
        claims=(),
        weight_comparison=WeightComparison(**weights),
        num_frozen=0,
        dtypes=(),
        num_steps_before=num_steps,
        samples=samples,
    )


def test_one_weight_that_left_the_replays_is_enough_and_one_that_never_was_it_is_none() -> None:
    start = make_pass(0, compared=("a", "b"), differing=("b",))
    assert not did_any_move([start, make_pass(0, compared=("a", "b"), differing=("b",))])
    assert did_any_move([start, make_pass(0, compared=("a",), differing=("a",))])
    assert not did_any_move([start, make_pass(0, rank=1, compared=("a",), differing=("a",))])


@pytest.mark.parametrize(
    ("num_moved", "num_shared", "is_most", "is_none"),
    [(0, 4, False, True), (2, 4, False, False), (3, 4, True, False), (3, 3, False, False), (0, 3, False, False)],
)
def test_most_of_enough_shared_weights_have_to_move(
    num_moved: int, num_shared: int, is_most: bool, is_none: bool
) -> None:
    assert LEAST_SAMPLES == 4
    earlier: Samples = {("only here", 0): (1.0,), **{(str(number), 0): (0.5,) for number in range(num_shared)}}
    later: Samples = {(str(number), 0): (0.25 if number < num_moved else 0.5,) for number in range(num_shared)}
    assert (did_most_move(earlier, later), are_same(earlier, later)) == (is_most, is_none)


def test_each_parameter_tells_for_itself_whether_it_moved_behind_a_step() -> None:
    passes = [
        make_pass(0, {"still": 1.0, "moved": 1.0, "within": 1.0}),
        make_pass(0, {"within": 2.0}),
        make_pass(1, {"still": 1.0, "moved": 1.0 + 2**-20, "once": 3.0}),
    ]
    assert find_moved_parameters(passes) == (["moved"], ["still"])
    # Where no step was recorded, each two passes tell.
    assert find_moved_parameters(passes[:2]) == (["within"], [])
