"""When a run keeps a state, and what it says of it and of going on from it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from replay.runner.checkpoint import Saver
from tests.helpers.made_replays import MadeReplay
from tests.helpers.typed import spec_of

TYPED = ("--step", "--save-state", "states", "--save-every", "2", "--skip-inputs", "3")


class MadeStore:
    """Notes after how many steps a state was kept."""

    has_folder = True

    def __init__(self) -> None:
        self.kept: list[int] = []

    def keep(self, num_steps: int, write: Callable[[Path], None], world: Any) -> None:
        self.kept.append(num_steps)


def make_saver(store: MadeStore, num_steps: int = 0) -> Saver:
    world = SimpleNamespace(rank=0, world_size=1)
    return Saver(
        spec=MadeReplay.of(spec_of(TYPED)),
        source=cast(Any, None),
        world=cast(Any, world),
        log_folder=Path("logs"),
        states=cast(Any, store),
        num_steps=num_steps,
    )


@pytest.mark.parametrize(
    ("num_steps", "passes", "due"),
    [
        # Passes that end without a step, within a window, keep nothing.
        (0, [False, True, False, True, False, True], [3]),
        # A run that goes on counts from the steps before it.
        (3, [True, False, True, True], [0, 3]),
    ],
)
def test_a_state_is_due_behind_every_second_step_of_the_run(num_steps: int, passes: list[bool], due: list[int]) -> None:
    saver = make_saver(MadeStore(), num_steps)
    found = [number for number, stepped in enumerate(passes) if saver.is_due(latest_pass_has_stepped=stepped)]
    assert found == due


@pytest.mark.parametrize(("num_more", "kept"), [(0, [4]), (1, [4, 5])])
def test_at_the_end_what_is_not_kept_yet_is_kept_and_the_next_run_skips_what_was_replayed(
    num_more: int, kept: list[int]
) -> None:
    store = MadeStore()
    saver = make_saver(store, num_steps=3)
    backend: Any = SimpleNamespace(progress=lambda: SimpleNamespace(num_steps=saver.num_steps, learning_rate=0.125))
    assert saver.is_due(latest_pass_has_stepped=True)
    saver.save_state(backend, 8)
    for _ in range(num_more):
        saver.is_due(latest_pass_has_stepped=True)
    lines = dict(saver.save_at_end(backend, num_inputs_completed=8, num_passes=9))
    assert store.kept == kept
    assert lines["saved"] == f"states, every 2 steps, in states: {kept[-1]} steps, the next with learning rate 0.125"
    assert lines["not saved"] == "the last 1 pass: their accumulation window was cut short"
    # Three were skipped, and eight replayed.
    assert "--skip-inputs 11" in lines["go on"]
    assert "--load-state states" in lines["go on"]
    assert "not saved" not in dict(saver.save_at_end(backend, num_inputs_completed=9, num_passes=9))
