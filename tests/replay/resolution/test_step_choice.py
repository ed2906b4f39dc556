"""Ranks choose together whether and how the optimizer steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from replay.options.resolved import ChosenBy
from replay.options.spec import StepMode
from replay.resolution import step_choice
from replay.resolution.step_choice import StepChoice, choose_steps
from tests.helpers.thread_ranks import CPU, call_on_ranks


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
    mode: StepMode, differing: list[tuple[str, ...]], has_other_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has samples of a part of the parameters alone."""
    known_on_ranks: list[bool] = []

    def choose_on_rank(*others: Any) -> StepChoice:
        *_, world, has_other = others
        known_on_ranks.append(has_other)
        return StepChoice(mode=mode, by=ChosenBy.TYPED, why=f"rank {world.rank}")

    monkeypatch.setattr(step_choice, "_choose_on_rank", choose_on_rank)
    spec: Any = SimpleNamespace(measure=SimpleNamespace(step=mode))
    nothing: Any = None

    def choose(world: Any) -> str:
        checker: Any = SimpleNamespace(check=lambda _: SimpleNamespace(differing=differing[world.rank]))
        return choose_steps(spec, nothing, checker, nothing, None, world).why

    # All take what the first rank chose.
    assert call_on_ranks(choose, [CPU] * len(differing)) == ["rank 0"] * len(differing)
    assert known_on_ranks == [has_other_weights] * len(differing)
