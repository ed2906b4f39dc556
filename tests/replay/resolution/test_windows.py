"""Which passes are a whole window of the job, in which order windows are replayed, and what a pass weighs in one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from capture.file_format.listing import CaptureLocation
from capture.file_format.segment_record import digest_window
from replay.resolution.windows import (
    InputRound,
    JobPass,
    SelectedCapture,
    WindowOrder,
    compute_token_weight,
    find_training_rounds,
    find_whole_window,
    find_window_size,
)


def make_capture(
    forward: int, step: int, window: Sequence[int] = (), *, rank: int = 0, ranks: int = 1, trains: bool = True
) -> SelectedCapture:
    """A pass before which the job had taken `step` steps; the last pass before a step has the forwards of `window`."""
    return SelectedCapture(
        capture=CaptureLocation(Path(f"{rank}-{forward}.pkl")),
        trains=trains,
        rank=rank,
        forward_number=forward,
        world_size=ranks,
        num_tokens=None,
        optimizer_step=step,
        window_digest=digest_window(window) if window else None,
        has_gradients=False,
    )


def make_steps(*sizes: int) -> list[SelectedCapture]:
    """Make the passes of a job of one rank, whose steps take as many passes as `sizes` say."""
    captures: list[SelectedCapture] = []
    for step, size in enumerate(sizes):
        forwards = range(len(captures), len(captures) + size)
        captures += [make_capture(forward, step, forwards if forward == forwards[-1] else ()) for forward in forwards]
    return captures


def list_forwards(captures: Sequence[SelectedCapture]) -> list[int]:
    return [capture.forward_number or 0 for capture in captures]


@pytest.mark.parametrize(
    ("sizes", "num_passes", "num_data_ranks", "order", "accumulation"),
    [
        # Nothing is typed: every whole window is one, of whatever size.
        ([2, 1, 3], None, 1, [0, 1, 2, 3, 4, 5], 2),
        ([1, 3, 1], None, 1, [0, 1, 2, 3, 4], 1),
        # Two data ranks share the passes of a window evenly.
        ([2, 1, 4], None, 2, [0, 1, 3, 4, 5, 6, 2], 1),
        ([3, 2, 2], None, 2, [3, 4, 5, 6, 0, 1, 2], None),
        # What is typed holds for all windows, whatever the first one's size is.
        ([2, 1, 2], 2, 1, [0, 1, 3, 4, 2], 2),
        ([1, 2, 3], 2, 1, [1, 2, 0, 3, 4, 5], 2),
        ([2, 4], 4, 2, [2, 3, 4, 5, 0, 1], 2),
    ],
)
def test_windows_come_in_the_jobs_order_and_what_is_outside_of_them_last(
    sizes: list[int], num_passes: int | None, num_data_ranks: int, order: list[int], accumulation: int | None
) -> None:
    window_order = WindowOrder(num_passes, num_data_ranks)
    assert list_forwards(list(window_order.sort(make_steps(*sizes)))) == order
    assert window_order.find_accumulation() == accumulation


def test_a_rollout_keeps_its_place_beside_a_window_that_lacks_a_pass() -> None:
    captures = [
        make_capture(0, 0, trains=False),
        # The window is of forwards 1 and 2.
        make_capture(2, 0, (1, 2)),
        make_capture(3, 1, trains=False),
        make_capture(4, 1, (4,)),
    ]
    order = WindowOrder()
    assert list_forwards(list(order.sort(captures))) == [0, 3, 4, 2]
    assert order.find_accumulation() == 1
    assert WindowOrder().find_accumulation() is None


@pytest.mark.parametrize(
    ("captures", "forwards"),
    [
        ([make_capture(0, 0), make_capture(1, 0, (0, 1))], [0, 1]),
        # GradScaler found an overflow behind the first two.
        ([make_capture(number, 0) for number in range(3)] + [make_capture(3, 0, (2, 3))], [2, 3]),
        ([make_capture(1, 0, (0, 1))], []),
        ([make_capture(0, 0), make_capture(1, 0)], []),
        # Ranks may take other numbers of passes, and none may be missing.
        (
            [
                make_capture(0, 0, rank=0, ranks=2),
                make_capture(1, 0, (0, 1), rank=0, ranks=2),
                make_capture(0, 0, (0,), rank=1, ranks=2),
            ],
            [0, 1, 0],
        ),
        ([make_capture(0, 0, (0,), rank=1, ranks=2)], []),
        ([make_capture(0, 0, (0,), rank=0, ranks=2), make_capture(0, 0, rank=1, ranks=2)], []),
        ([], []),
    ],
)
def test_a_whole_window_has_all_passes_of_all_ranks(captures: list[SelectedCapture], forwards: list[int]) -> None:
    assert list_forwards(find_whole_window(captures)) == forwards


def make_round(*num_tokens: int, trains: bool = True, num_in_window: int = 0) -> InputRound:
    return InputRound(trains=trains, num_tokens=num_tokens, has_gradients=False, num_in_window=num_in_window)


def make_job_pass(rank: int) -> JobPass:
    return JobPass(rank=rank, forward=0, world_size=2, num_steps_before=0, step=None, loss_per_mean=1.0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_round_has_the_most_of_its_data_ranks_and_what_they_have_in_common(order: int) -> None:
    few = replace(make_capture(0, 3), num_tokens=5, real_tokens=8, padded_tokens=90, job_pass=make_job_pass(0))
    many = replace(make_capture(0, 3, rank=1), num_tokens=7, real_tokens=50, padded_tokens=60, has_gradients=True)
    whole = [few, replace(many, job_pass=make_job_pass(1))][::order]
    made = InputRound.from_captures(whole)
    assert made.num_tokens == [5, 7][::order]
    assert (made.most_real_tokens, made.most_padded_tokens, made.has_gradients) == (50, 90, True)
    assert [job_pass.rank for job_pass in made.job_passes] == [0, 1][::order]
    assert made.num_steps_before == 3
    # A capture that could not be opened has no tokens, and makes the place of all in the job's steps unknown.
    unread = InputRound.from_captures([few, replace(many, num_tokens=None)][::order])
    assert (unread.num_tokens, unread.job_passes) == ([5, 0][::order], ())
    assert InputRound.from_captures([few, make_capture(0, 4, rank=1)][::order]).num_steps_before is None
    assert not InputRound.from_captures([few]).has_gradients


def test_the_weights_of_a_window_make_the_mean_of_passes_one_over_tokens() -> None:
    """Two data ranks, two rounds of 10 tokens in all: a pass of 3 tokens is 3/10 of the gradient, a mean 1/4."""
    rounds = [make_round(9, 9), make_round(3, 1), make_round(7, 7, trains=False), make_round(2, 4), make_round(9, 9)]
    weights = {
        (index, data_rank): compute_token_weight(rounds, index, data_rank, 1, 2)
        for index in (1, 3)
        for data_rank in (0, 1)
    }
    assert weights == {(1, 0): 1.2, (1, 1): 0.4, (3, 0): 0.8, (3, 1): 1.6}
    # A window without tokens has equal weights, and a short one those of its own tokens.
    assert compute_token_weight([make_round(0), make_round(0)], 1, 0, 0, 2) == 1.0
    assert compute_token_weight([make_round(6), make_round(2)], 1, 0, 1, 1) == 1.0


def test_a_window_is_the_next_training_passes_and_as_many_as_the_jobs() -> None:
    rounds = [make_round(1), make_round(2, trains=False), make_round(3, num_in_window=1), make_round(4)]
    assert [each.num_tokens for each in find_training_rounds(rounds, 0, 2)] == [(1,), (3,)]
    assert [each.num_tokens for each in find_training_rounds(rounds, 3, 2)] == [(4,)]
    assert [find_window_size(rounds, index, 5) for index in (0, 2, 4)] == [5, 1, 5]
