"""Ranks choose together whether and how the optimizer steps."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from replay.options.spec import StepMode
from replay.resolution.selection import Selection
from replay.resolution.step_choice import choose_steps, may_follow_other_weights
from tests.helpers.thread_ranks import CPU, call_on_ranks
from tests.helpers.typed import spec_of


@pytest.mark.parametrize(
    ("mode", "differing", "has_other_weights"),
    [
        (StepMode.AUTO, [(), ()], False),
        (StepMode.AUTO, [("a",), ()], True),
        (StepMode.AUTO, [(), ("a",)], True),
        (StepMode.AUTO, [(), (), ("a", "b")], True),
        (StepMode.AUTO, [("a",), ("a",)], True),
        # Whoever typed that it steps, or does not, is not asked about weights.
        (StepMode.ON, [("a",), ()], False),
        (StepMode.OFF, [(), ("a",)], False),
    ],
)
def test_weights_that_differ_on_one_rank_are_other_weights_on_all(
    mode: StepMode, differing: list[tuple[str, ...]], has_other_weights: bool
) -> None:
    """A rank has samples of a part of the parameters alone."""

    def ask(world: Any) -> bool:
        checker: Any = SimpleNamespace(check=lambda _: SimpleNamespace(differing=differing[world.rank]))
        return may_follow_other_weights(mode, checker, None, world)

    assert call_on_ranks(ask, [CPU] * len(differing), limit=60) == [has_other_weights] * len(differing)


@pytest.mark.parametrize("modes", [(StepMode.OFF, StepMode.ON), (StepMode.ON, StepMode.OFF)])
def test_all_ranks_take_what_the_first_one_chose(modes: tuple[StepMode, StepMode]) -> None:
    selection = Selection(inputs=[], num_left_out_passes=0, num_left_over=0, damaged=[], dealing="")
    source, checker = cast(Any, None), cast(Any, SimpleNamespace(names=()))

    def choose(world: Any) -> StepMode:
        spec: Any = spec_of(["--step" if modes[world.rank] is StepMode.ON else "--no-step"])
        return choose_steps(spec, source, checker, selection, None, world).mode

    assert call_on_ranks(choose, [CPU] * 2, limit=60) == [modes[0]] * 2
