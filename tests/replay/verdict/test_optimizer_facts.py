"""The optimizer's own count of steps is held against the steps that were recorded."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from capture.file_format.optimizer_state import StateSample
from capture.file_format.optimizer_step import OptimizerStep
from replay.verdict.optimizer_facts import StateFactKind, find_facts_of_ranks, find_state_facts
from tests.replay.lint.recorded import make_pass, make_sample, make_samples


def make_step(number: int, *counted: int, has_state: bool | None = None, moments: float | None = None) -> OptimizerStep:
    """Make a step before which the optimizer had counted these steps."""
    values = {} if moments is None else {"exp_avg": (moments,)}
    return OptimizerStep(
        number=number,
        passes=(number,),
        shares=(1.0,),
        has_state=bool(counted) if has_state is None else has_state,
        state=(StateSample(name="weight", shape=(2,), start=0, values=values),) if values else (),
        state_steps=counted,
    )


def find_kinds(steps: Sequence[OptimizerStep]) -> list[tuple[str, int, int | None]]:
    return [(fact.kind.name, fact.step, fact.counted) for fact in find_state_facts(steps)]


@pytest.mark.parametrize(
    "steps",
    [
        [make_step(0), make_step(1, 1), make_step(2, 2)],
        [make_step(4, 4), make_step(9, 9)],
        # A recording that begins late, of a job that had gone on from a state.
        [make_step(4, 104), make_step(5, 105)],
        # SGD counts nothing: without momentum it has no state, with it the state has no count.
        [make_step(0), make_step(1), make_step(2)],
        [make_step(0), make_step(1, has_state=True), make_step(2, has_state=True)],
        [],
    ],
)
def test_a_count_that_goes_on_with_the_steps_shows_nothing(steps: list[OptimizerStep]) -> None:
    assert find_kinds(steps) == []


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([make_step(0, 3)], ("BEGINS_WITH_STATE", 0, 3)),
        ([make_step(0, has_state=True)], ("BEGINS_WITH_STATE", 0, None)),
        ([make_step(0, 1, moments=0.0)], ("BEGINS_WITH_ZEROS", 0, 1)),
        ([make_step(0, 1, moments=0.5)], ("BEGINS_WITH_STATE", 0, 1)),
        ([make_step(3, 3), make_step(4)], ("LOST", 4, None)),
        ([make_step(3, 3), make_step(4, 0, has_state=True)], ("LOST", 4, 0)),
        ([make_step(30, 30), make_step(40, 4)], ("LOST", 40, 4)),
        ([make_step(30, 30), make_step(31, 20)], ("REPLACED", 31, 20)),
        ([make_step(3, 3), make_step(4, 3)], ("COUNTS_TOO_FEW", 4, 3)),
        ([make_step(3, 3), make_step(4, 5)], ("COUNTS_TOO_MANY", 4, 5)),
        ([make_step(0), make_step(1, 0, 1)], ("UNEVEN", 1, 1)),
    ],
)
def test_a_count_that_does_not_is_one_fact(steps: list[OptimizerStep], kind: tuple[str, int, int | None]) -> None:
    assert find_kinds(steps) == [kind]
    [fact] = find_state_facts(steps)
    assert f"step {kind[1] + 1}" in fact.describe()


def test_an_optimizer_that_is_made_anew_at_each_step_has_lost_its_state() -> None:
    steps = [replace(make_step(number), settings=({"betas": [0.9, 0.999]},)) for number in range(2)]
    assert find_kinds(steps) == [("LOST", 1, None)]


def test_the_order_of_the_passes_is_not_that_of_the_steps() -> None:
    assert find_kinds([make_step(1, 1), make_step(2, 2), make_step(0)]) == []


def test_a_recording_that_tells_nothing_of_states_shows_nothing() -> None:
    unknown = OptimizerStep(number=0, passes=(0,), shares=(1.0,))
    assert find_kinds([unknown, make_step(1, 7), make_step(2, 8)]) == []


def test_what_all_ranks_show_is_one_fact() -> None:
    [fact] = find_facts_of_ranks(make_pass(rank=rank, step=make_step(0, 3)) for rank in range(2))
    assert fact.kind is StateFactKind.BEGINS_WITH_STATE
    assert fact.describe() == "the optimizer held the state of 3 steps before step 1, the first that was recorded"


@pytest.mark.parametrize("num_frozen", [(2, 2), (2, 0)])
def test_what_is_trained_later_has_rightly_counted_fewer_steps(num_frozen: tuple[int, int]) -> None:
    steps = [make_step(3, 3), make_step(4, 1, 4)]
    passes = [
        make_pass(number=number, step=step, weights=make_samples(make_sample(), num_frozen=frozen))
        for number, (step, frozen) in enumerate(zip(steps, num_frozen, strict=True))
    ]
    kinds = [fact.kind for fact in find_facts_of_ranks(passes)]
    assert kinds == ([StateFactKind.UNEVEN] if num_frozen[0] == num_frozen[1] else [])
