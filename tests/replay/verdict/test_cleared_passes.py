"""Passes whose gradients a loop clears before each step: their number, and what it says of them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from capture.file_format.optimizer_step import OptimizerStep
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.gradient_rules import find_scaled_loss
from replay.verdict.causes.step_rules import find_untaken_passes
from replay.verdict.cleared_passes import ClearedPasses, find_cleared_passes
from replay.verdict.recorded_pass import RecordedPass
from tests.replay.lint.recorded import say
from tests.replay.verdict.causes.made_evidence import (
    draw_gradients,
    make_gradient_evidence,
    make_window,
    scale_gradients,
)

SOUND = draw_gradients()
SAID = (
    "3 of 4 training passes before each step are in no step: their gradients were cleared before it, as by zero_grad "
    "in the loop over micro-batches"
)


def make_passes(num_passes: int, taken: Sequence[Sequence[int]], *, share: float = 1.0) -> list[RecordedPass]:
    """Passes of one rank, and steps that took these of them."""
    ends = {numbers[-1]: (place, numbers) for place, numbers in enumerate(taken)}
    passes = []
    for number in range(num_passes):
        [compared] = make_window([SOUND], SOUND, index=number)
        place, numbers = ends.get(number, (0, ()))
        step = OptimizerStep(number=place, passes=tuple(numbers), shares=(share,) * len(numbers)) if numbers else None
        passes.append(replace(compared.recorded, step_after=step))
    return passes


@pytest.mark.parametrize(
    ("taken", "found"),
    [
        ([[3], [7], [11]], ClearedPasses(num_cleared=3, num_passes=4)),
        ([[2, 3], [6, 7], [10, 11]], ClearedPasses(num_cleared=2, num_passes=4)),
        # All passes are in a step.
        ([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], None),
        # A step is left out once, or now and then: fp16 overflowed.
        ([[0], [1], [3], [4], [5]], None),
        ([[0], [3], [4], [8]], None),
        # One step alone may lack as many by chance.
        ([[3], [7]], None),
        ([], None),
    ],
)
def test_steps_that_lack_as_many_passes_each_lose_them_to_the_loop(
    taken: Sequence[Sequence[int]], found: ClearedPasses | None
) -> None:
    assert find_cleared_passes(make_passes(12, taken)) == found


def test_passes_that_are_cleared_are_said_of_a_recording() -> None:
    assert f"passes: {SAID}" in say(make_passes(12, [[3], [7], [11]]))
    assert not say(make_passes(12, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]))


@pytest.mark.parametrize(("share", "name"), [(0.25, CauseName.WINDOW_WEIGHTS), (0.5, CauseName.GRADIENTS_SCALED)])
def test_a_loss_over_the_passes_that_are_cleared_too_is_of_their_number(share: float, name: CauseName) -> None:
    passes = make_passes(12, [[3], [7], [11]], share=share)
    windows = [make_window([scale_gradients(SOUND, share)], SOUND, index=index, share=share) for index in range(12)]
    compared = [
        replace(member, recorded=replace(member.recorded, step_after=recorded.step_after or None))
        for [member], recorded in zip(windows, passes, strict=True)
    ]
    evidence = make_gradient_evidence(windows[3])
    evidence = replace(evidence, passes=compared)
    cause = find_scaled_loss(evidence)
    assert cause is not None
    assert (cause.name, cause.sureness) == (name, Sureness.IS)
    assert cause.sentence.startswith(SAID) is (name is CauseName.WINDOW_WEIGHTS)
    untaken = find_untaken_passes(evidence)
    assert untaken is not None
    assert untaken.sentence == SAID
