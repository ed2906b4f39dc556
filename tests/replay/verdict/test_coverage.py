"""The steps that are counted as to be judged are those that the job took."""

from dataclasses import replace

import pytest

from replay.verdict.coverage import measure_coverage
from replay.verdict.gradient_findings import ComparedPass
from tests.replay.verdict.causes.made_evidence import draw_gradients, make_window

SOUND = draw_gradients()


def make_windows(*before: int | None, recorded: tuple[int, ...] = ()) -> list[list[ComparedPass]]:
    """Windows of one pass, which had so many steps before; those of these numbers ended with a step."""
    windows = []
    for index, number in enumerate(before):
        [compared] = make_window([SOUND], SOUND, index=index)
        step = compared.recorded.step_after if index in recorded else None
        windows.append(
            [replace(compared, recorded=replace(compared.recorded, num_steps_before=number, step_after=step))]
        )
    return windows


@pytest.mark.parametrize(
    ("windows", "number"),
    [
        (make_windows(0, 1, 2, recorded=(0, 1, 2)), 3),
        (make_windows(0, 1, 2, 2, 2, recorded=(0, 1)), 2),  # the last three go into no step
        (make_windows(0, 0, 1, 1), 1),  # steps of which nothing but their number is known
        (make_windows(None, None), 0),
    ],
)
def test_only_steps_that_there_were_are_counted(windows: list[list[ComparedPass]], number: int) -> None:
    assert measure_coverage(windows, [], []).num_steps == number
