"""A window of a replay is a step of the job where it has the same passes, on all of its ranks."""

from collections.abc import Sequence

import pytest

from capture.file_format.optimizer_step import OptimizerStep
from replay.resolution.job_windows import did_job_average_means, list_job_windows, note_window_sizes
from replay.resolution.windows import InputRound, JobPass


def make_round(*passes: JobPass, trains: bool = True) -> InputRound:
    return InputRound(trains=trains, num_tokens=[1] * len(passes), has_gradients=True, job_passes=passes)


def make_pass(
    forward: int,
    number: int,
    passes: Sequence[int] = (),
    shares: Sequence[float | None] = (),
    rank: int = 0,
    ranks: int = 1,
) -> JobPass:
    step = OptimizerStep(number=number, passes=passes, shares=shares) if passes else None
    return JobPass(rank=rank, forward=forward, world_size=ranks, num_steps_before=number, step=step, loss_per_mean=1.0)


def test_windows_of_the_jobs_passes_are_its_steps() -> None:
    rounds = [
        make_round(make_pass(0, 0)),
        make_round(make_pass(1, 0, (0, 1), (0.5, 0.5))),
        make_round(make_pass(2, 1)),
        make_round(make_pass(4, 1, (2, 3, 4), (0.3, 0.3, 0.4))),
        make_round(make_pass(5, 2)),
    ]
    first, second = list_job_windows(rounds, 2)
    assert (first.first_index, first.last_index, first.number, len(first.steps)) == (0, 1, 0, 1)
    # One pass of the step is not among them. The fifth pass fills no window.
    assert (second.number, second.steps) == (1, ())


def test_a_step_is_of_all_ranks() -> None:
    ranks = [make_pass(0, 0, (0,), (1.0,), rank=rank, ranks=2) for rank in range(2)]
    [window] = list_job_windows([make_round(*ranks)], 1)
    assert len(window.steps) == 2
    [window] = list_job_windows([make_round(ranks[0])], 1)
    assert window.steps == ()


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((0.5, 0.5), True), ((1.0, 1.0), True), ((0.4, 0.6), False), ((0.0, 1.0), False), ((None, 0.5), False)],
)
def test_a_mean_of_means_is_known_by_its_shares(shares: tuple[float | None, float], expected: bool) -> None:
    rounds = [make_round(make_pass(0, 0)), make_round(make_pass(1, 0, (0, 1), shares))]
    assert did_job_average_means(rounds, 0, 2) is expected


def make_uneven_rounds() -> list[InputRound]:
    """Make the rounds of two steps of an epoch, whose last has one pass, and of one more."""
    return [
        make_round(make_pass(0, 0)),
        make_round(make_pass(1, 0, (0, 1), (0.5, 0.5))),
        make_round(make_pass(2, 1, (2,), (1.0,))),
        make_round(trains=False),
        make_round(make_pass(3, 2)),
        make_round(make_pass(4, 2, (3, 4), (0.5, 0.5))),
    ]


def test_a_window_has_as_many_passes_as_the_jobs_step() -> None:
    rounds, size = note_window_sizes(make_uneven_rounds(), 2)
    assert [each.num_in_window for each in rounds] == [2, 2, 1, 0, 2, 2]
    windows = list_job_windows(rounds, size)
    assert [(window.first_index, window.last_index, window.number) for window in windows] == [
        (0, 1, 0),
        (2, 2, 1),
        (4, 5, 2),
    ]
    assert all(window.steps for window in windows)


def test_the_largest_window_is_the_usual_one() -> None:
    """A backend can end a window early and not late."""
    rounds, size = note_window_sizes(make_uneven_rounds()[2:], 1)
    assert ([each.num_in_window for each in rounds], size) == ([1, 0, 2, 2], 2)


def test_what_is_no_whole_step_makes_windows_of_the_usual_size() -> None:
    rounds = make_uneven_rounds()
    assert note_window_sizes(rounds[:2], 2) == (rounds[:2], 2)
    # The first pass of a step is not among them.
    assert note_window_sizes(rounds[1:], 2) == (rounds[1:], 2)
