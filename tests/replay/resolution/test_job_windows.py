"""A window of a replay is a step of the job where it has the same passes, on all of its ranks."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from capture.file_format.optimizer_step import OptimizerStep
from replay.resolution.job_windows import (
    did_job_average_means,
    find_steps_of_job,
    list_job_windows,
    note_window_sizes,
)
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


@pytest.mark.parametrize("usual", [1, 2])
def test_a_later_window_may_be_the_largest(usual: int) -> None:
    steps = [(0,), (1, 2, 3), (4, 5)]
    rounds = [
        make_round(make_pass(forward, number, forwards if forward == forwards[-1] else (), (1.0,) * len(forwards)))
        for number, forwards in enumerate(steps)
        for forward in forwards
    ]
    noted, size = note_window_sizes(rounds, usual)
    assert ([each.num_in_window for each in noted], size) == ([1, 3, 3, 3, 2, 2], 3)
    assert not any(each.is_incomplete for each in noted)


def make_steps(*steps: Sequence[int], without: Sequence[int] = ()) -> list[InputRound]:
    """Rounds of one rank's passes by their forwards; `without` are not recorded, and the last pass has the step."""
    return [
        replace(
            make_round(make_pass(forward, number, step if forward == step[-1] else (), (1.0,) * len(step))),
            num_steps_before=number,
        )
        for number, step in enumerate(steps)
        for forward in step
        if forward not in without
    ]


@pytest.mark.parametrize(
    ("rounds", "usual", "sizes", "incomplete"),
    [
        # Of the first step a pass is missing: no pass of the next step joins the others.
        (make_steps(range(4), range(4, 8), without=[0]), 4, [3, 3, 3, 4, 4, 4, 4], 3),
        (make_steps(range(2), range(2, 6), range(6, 8), without=[3]), 4, [2, 2, 3, 3, 3, 2, 2], 3),
        # What is missing of the last step may still come.
        (make_steps(range(2), range(2, 6), without=[5]), 4, [2, 2, 4, 4, 4], 0),
        # A step that lacks a pass is divided into windows of the usual size, and what is left of it.
        (make_steps(range(6), range(6, 8), without=[1]), 2, [2, 2, 2, 2, 1, 2, 2], 1),
        (make_steps(range(5), range(5, 8), without=[1]), 2, [2, 2, 2, 2, 3, 3, 3], 0),
    ],
)
def test_what_is_left_of_a_step_that_lacks_a_pass_is_a_window_of_its_own(
    rounds: list[InputRound], usual: int, sizes: list[int], incomplete: int
) -> None:
    noted, largest = note_window_sizes(rounds, usual)
    assert [each.num_in_window for each in noted] == sizes
    assert largest == max(sizes)
    assert sum(each.is_incomplete for each in noted) == incomplete
    assert all(each.num_in_window < usual for each in noted if each.is_incomplete)


def test_passes_of_which_the_step_is_not_known_make_windows_of_the_usual_size() -> None:
    unread = [InputRound(trains=True, num_tokens=[0], has_gradients=False) for _ in range(3)]
    assert note_window_sizes(unread, 2) == (unread, 2)
    noted, largest = note_window_sizes([*make_steps(range(3)), *unread], 2)
    assert ([each.num_in_window for each in noted], largest) == ([3, 3, 3, 2, 2, 2], 3)
    windows = list_job_windows(noted, 2)
    assert [(window.place, window.number, len(window.steps)) for window in windows] == [(0, 0, 1), (1, None, 0)]


def make_two_ranks(first: JobPass | None = None, second: JobPass | None = None) -> list[JobPass]:
    """Two passes each of two ranks, round by round, which are a step; the last pass of a rank may be another one."""
    return [
        *(make_pass(0, 0, rank=rank, ranks=2) for rank in range(2)),
        first or make_pass(1, 0, (0, 1), (0.25, 0.25), rank=0, ranks=2),
        second or make_pass(1, 0, (0, 1), (0.25, 0.25), rank=1, ranks=2),
    ]


@pytest.mark.parametrize(
    ("passes", "num_steps"),
    [
        (make_two_ranks(), 2),
        (make_two_ranks(second=make_pass(1, 0, rank=1, ranks=2)), 0),  # rank 1 recorded no step
        (make_two_ranks(first=make_pass(1, 0, rank=0, ranks=2)), 0),
        (make_two_ranks(second=make_pass(2, 0, (0, 1, 2), (0.2,) * 3, rank=1, ranks=2)), 0),  # its forward 1 lacks
        (make_two_ranks(first=make_pass(2, 0, (0, 1, 2), (0.2,) * 3, rank=0, ranks=2)), 0),
        (make_two_ranks(second=make_pass(1, 1, (0, 1), (0.25, 0.25), rank=1, ranks=2)), 0),  # of the next step
        (make_two_ranks()[::2], 0),  # rank 0's alone
    ],
)
def test_a_step_is_whole_if_each_rank_has_all_its_passes(passes: list[JobPass], num_steps: int) -> None:
    assert len(find_steps_of_job(passes)) == num_steps


@pytest.mark.parametrize(
    ("rank_shares", "loss_per_mean", "expected"),
    [
        (((0.25, 0.25), (0.25, 0.25)), 1.0, True),
        (((0.25, 0.25), (0.25, 0.5)), 1.0, False),  # one pass of one rank
        (((0.25, 0.25), (0.5, 0.25)), 1.0, False),
        # The first pass summed its losses and divided by half its tokens: a loss of half the share weighs the same.
        (((0.125, 0.25), (0.25, 0.25)), 2.0, True),
        (((0.25, 0.25), (0.25, 0.25)), 2.0, False),
        (((0.0, 0.0), (0.0, 0.0)), 1.0, False),
    ],
)
def test_all_ranks_passes_weigh_the_same_in_a_mean_of_means(
    rank_shares: Sequence[Sequence[float]], loss_per_mean: float, expected: bool
) -> None:
    last = [make_pass(1, 0, (0, 1), shares, rank=rank, ranks=2) for rank, shares in enumerate(rank_shares)]
    first, other, *_ = make_two_ranks()
    rounds = [make_round(replace(first, loss_per_mean=loss_per_mean), other), make_round(*last)]
    assert did_job_average_means(rounds, 0, 2) is expected


def test_where_a_pass_is_not_known_nothing_is_said_of_its_weight() -> None:
    first, last = make_pass(0, 0), make_pass(1, 0, (0, 1), (0.5, 0.5))
    rounds = [make_round(first), make_round(last)]
    assert did_job_average_means(rounds, 0, 2)
    assert not did_job_average_means(rounds, 0, 3)  # the window is longer than what is there
    assert not did_job_average_means([make_round(), make_round(last)], 0, 2)
    assert not did_job_average_means([make_round(first), make_round()], 0, 2)
    assert not did_job_average_means([make_round(replace(first, forward=None)), make_round(last)], 0, 2)


def test_what_is_no_whole_step_makes_windows_of_the_usual_size() -> None:
    rounds = make_uneven_rounds()
    assert note_window_sizes(rounds[:2], 2) == (rounds[:2], 2)
    # The first pass of a step is not among them.
    assert note_window_sizes(rounds[1:], 2) == (rounds[1:], 2)
