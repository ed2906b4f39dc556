"""The rules that compare ranks' passes, on made schedules: which pass, which ranks, in which words."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from capture.file_format.end_record import EndRecord
from capture.file_format.optimizer_step import OptimizerStep, ParameterSamples, Sample
from replay.post_mortem.schedule import PlannedPass, RankSchedule, Schedule
from replay.post_mortem.schedule_differences import ScheduleDifference, find_schedule_differences
from replay.post_mortem.text import describe_schedule


def plan(number: int, **values: Any) -> PlannedPass:
    known: dict[str, Any] = {"source": f"pass{number}.pkl", "number": number, "trains": True, "shape": None}
    return PlannedPass(**(known | values))


def plan_all(name: str, values: Sequence[Any], **others: Any) -> list[PlannedPass]:
    """One pass for each of these values of the field `name`."""
    return [plan(number, **{name: value}, **others) for number, value in enumerate(values)]


def step(
    number: int, passes: Sequence[int], shares: Sequence[float | None] | None = None, **more: Any
) -> OptimizerStep:
    return OptimizerStep(number=number, passes=tuple(passes), shares=tuple(shares or [1.0] * len(passes)), **more)


def end(rank: int, num_passes: int, num_steps: int | None = None) -> EndRecord:
    return EndRecord(rank=rank, world_size=0, num_passes=num_passes, num_steps=num_steps, place="", opened="", time="")


def schedule(*ranks: Sequence[PlannedPass], ends: Mapping[int, EndRecord] | None = None, **values: Any) -> Schedule:
    made = [
        RankSchedule(rank=rank, passes={planned.number: planned for planned in passes}, end=(ends or {}).get(rank))
        for rank, passes in enumerate(ranks)
    ]
    return Schedule(ranks=made, **({"world_size": len(ranks)} | values))


def find(*ranks: Sequence[PlannedPass], **settings: Any) -> list[tuple[str, int, tuple[int, ...], str]]:
    return [summarise(difference) for difference in find_schedule_differences(schedule(*ranks), **settings)]


def summarise(difference: ScheduleDifference) -> tuple[str, int, tuple[int, ...], str]:
    return difference.kind, difference.number, difference.ranks, difference.text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((7, 7, 7), None),
        # Most decide, whichever rank comes first; in a tie the first one's.
        ((5, 7, 7), ((0,), "rank 0 trains 5 parameters, and others 7")),
        ((7, 5, 7), ((1,), "rank 1 trains 5 parameters, and others 7")),
        ((5, 7), ((1,), "rank 1 trains 7 parameters, and others 5")),
        # Of several unusual values the first rank's is told.
        ((6, 7, 7, 9), ((0, 3), "ranks 0, 3 train 6 parameters, and others 7")),
        # What is not known of a rank is not compared.
        ((None, 7, 7), None),
        ((None, 7, None, 5), ((3,), "rank 3 trains 5 parameters, and others 7")),
        ((None, 7), None),
    ],
)
def test_ranks_of_another_value_than_most_are_named(
    values: Sequence[int | None], expected: tuple[tuple[int, ...], str] | None
) -> None:
    found = find(*([plan(0), plan(1, num_trained=value)] for value in values))
    assert found == ([] if expected is None else [("trained", 1, *expected)])


def test_each_pass_is_compared_among_the_ranks_that_have_it() -> None:
    ranks = [
        [plan(0, computed_in="bf16"), plan(1, computed_in="bf16"), plan(3, computed_in="fp32")],
        [plan(0, computed_in="bf16"), plan(2, computed_in="fp32"), plan(3, computed_in="bf16")],
        [plan(0, computed_in="bf16"), plan(3, computed_in="bf16")],
    ]
    assert find(*ranks) == [("dtype", 3, (0,), "rank 0 computes in fp32, and others in bf16")]
    assert find(ranks[0]) == []


def test_the_order_of_training_and_rollouts_hides_what_comes_behind_it() -> None:
    """From there on a number is another pass on each rank; before it, and of how many there are, it is told."""
    rollout = {"trains": False}
    ranks = [
        [plan(0, num_trained=3), plan(1), plan(2, computed_in="bf16"), plan(3), plan(4)],
        [plan(0, num_trained=2), plan(1, **rollout), plan(2, computed_in="fp32"), plan(3)],
    ]
    assert find(*ranks) == [
        ("trained", 0, (1,), "rank 1 trains 2 parameters, and others 3"),
        ("order", 1, (1,), "rank 1 runs without autograd, and others do not"),
        ("passes", 4, (1,), "rank 1 has 4 passes, and others up to 5 (as far as captured); the next one of rank 0 is "
         "pass4.pkl"),
    ]  # fmt: skip


def test_what_else_differs_in_the_pass_of_another_order_tells_nothing() -> None:
    ranks = [[plan(0), plan(1, num_trained=3)], [plan(0), plan(1, num_trained=2, trains=False)]]
    assert [kind for kind, *_ in find(*ranks)] == ["order"]


def test_a_difference_says_in_which_jobs_it_does_no_harm() -> None:
    """Whoever reads of a pass without a step under no_sync is not to mend a sound job."""
    ranks = {
        "order": [[plan(0)], [plan(0, trains=False)]],
        "dtype": [[plan(0, computed_in="fp32")], [plan(0, computed_in="bf16")]],
        "steps": [plan_all("optimizer_step", of_rank) for of_rank in ((0, 1), (0, 0))],
        "backward": [[plan(0), plan(1, step=step(0, [0, 1], of_rank))] for of_rank in ((1.0, 1.0), (None, 1.0))],
        "shapes": [[plan(0, shape=(2, 8))], [plan(0, shape=(2, 9))]],
        "trained": [[plan(0, num_trained=2)], [plan(0, num_trained=3)]],
        "passes": [[plan(0), plan(1)], [plan(0)]],
    }
    for kind, made in ranks.items():
        [difference] = find_schedule_differences(schedule(*made), equal_shapes=True, was_cut_short=kind == "steps")
        assert difference.kind == kind
        assert bool(difference.exception) is (kind not in ("trained", "passes"))
        assert difference.remedy


def test_a_missing_pass_comes_after_what_else_differs_in_it() -> None:
    ranks = [
        [plan(0), plan(1, computed_in="bf16"), plan(2)],
        [plan(0), plan(1, computed_in="fp32"), plan(2)],
        [plan(0)],
    ]
    assert [(kind, number, ranks) for kind, number, ranks, _ in find(*ranks)] == [
        ("dtype", 1, (1,)),
        ("passes", 1, (2,)),
    ]


def test_the_fewest_passes_are_those_of_ranks_whose_loop_was_over() -> None:
    numbers = (6, 4, 4, 2)
    ranks = [[plan(number, shape=(2, 8)) for number in range(count)] for count in numbers]
    following = "and others up to 6 (as far as captured); the next one of rank 0 is 2 rows of 8, pass{}.pkl"
    assert find(*ranks) == [("passes", 2, (3,), f"rank 3 has 2 passes, {following.format(2)}")]
    # Of a job that died, ranks 2 and 3 may have gone on.
    assert find(*ranks, was_cut_short=True, ended_loops=[1]) == [
        ("passes", 4, (1,), f"rank 1 has 4 passes, {following.format(4)}")
    ]
    assert find(*ranks, was_cut_short=True, ended_loops=[1, 2]) == [
        ("passes", 4, (1, 2), f"ranks 1, 2 have 4 passes, {following.format(4)}")
    ]
    assert find(*ranks, was_cut_short=True) == []


@pytest.mark.parametrize(("ended", "is_told"), [((0, 1), True), ((0,), False), ((1,), False)])
def test_passes_are_counted_as_far_as_captured_unless_all_recordings_were_closed(
    ended: Sequence[int], is_told: bool
) -> None:
    ranks = [[plan(0), plan(1)], [plan(0)]]
    ends = {rank: end(rank, len(ranks[rank])) for rank in ended}
    [difference] = find_schedule_differences(schedule(*ranks, ends=ends))
    captured = "" if is_told else " (as far as captured)"
    assert difference.text == f"rank 1 has 1 passes, and others up to 2{captured}; the next one of rank 0 is pass1.pkl"


def test_a_closed_recording_has_as_many_passes_as_its_end_says() -> None:
    """The captures of rank 1 ended with a limit, and its loop did not."""
    ranks = [[plan(0), plan(1), plan(2)], [plan(0)]]
    assert find_schedule_differences(schedule(*ranks, ends={1: end(1, 3)})) == []
    [difference] = find_schedule_differences(schedule(*ranks, ends={0: end(0, 5), 1: end(1, 4)}))
    assert summarise(difference) == ("passes", 4, (1,), "rank 1 has 4 passes, and others up to 5")


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        # A rank may have begun its recording later.
        (((0, 0, 1, 1), (5, 5, 6, 6)), None),
        (((0, 0, 1, 1), (5, 5, 5, 6)), (2, (1,), "rank 1 has made 0 optimizer steps by then, and others 1")),
        (
            ((0, 1, 2, 3), (0, 1, 2, 3), (0, 0, 1, 1)),
            (1, (2,), "rank 2 has made 0 optimizer steps by then, and others 1"),
        ),
        (
            ((0, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0)),
            (1, (0,), "rank 0 has made 1 optimizer step by then, and others 0"),
        ),
        # A pass of which the count is not known begins no recording.
        (((0, 0, 1, 1), (None, 0, 1, 1)), None),
        (((0, 0, 1, 1), (None, None, None, None)), None),
    ],
)
def test_steps_are_counted_from_where_each_rank_began(
    counts: Sequence[Sequence[int | None]], expected: tuple[int, tuple[int, ...], str] | None
) -> None:
    found = find(*(plan_all("optimizer_step", of_rank) for of_rank in counts), was_cut_short=True)
    assert found == ([] if expected is None else [("steps", *expected)])
    # No rollout needs a step to have come before it.
    rollouts = [plan_all("optimizer_step", of_rank, trains=False) for of_rank in counts]
    assert find(*rollouts, was_cut_short=True) == []


@pytest.mark.parametrize(
    ("num_steps", "num_passes", "ranks"),
    [
        ((4, 4), (8, 8), None),
        ((4, 3), (8, 8), (1,)),
        ((3, 4, 4), (8, 8, 8), (0,)),
        # Other passes alone explain other steps, and what one rank did not see is not known.
        ((4, 3), (8, 6), None),
        ((4, 3, None), (8, 8, 8), None),
    ],
)
def test_steps_in_the_end_are_compared_where_all_ranks_made_as_many_passes(
    num_steps: Sequence[int | None], num_passes: Sequence[int], ranks: tuple[int, ...] | None
) -> None:
    ends = {rank: end(rank, *counts) for rank, counts in enumerate(zip(num_passes, num_steps, strict=True))}
    made = schedule(*([plan(0)] for _ in num_steps), ends=ends)
    found = [summarise(each)[:3] for each in find_schedule_differences(made) if each.kind == "steps"]
    assert found == ([] if ranks is None else [("steps", max(num_passes) - 1, ranks)])
    assert [each.kind for each in find_schedule_differences(made, was_cut_short=True)] == []


def test_a_last_step_that_one_rank_lacks_is_told_where_all_that_step_have_the_last_pass() -> None:
    def of_rank(*, last: OptimizerStep | None, trains: bool = True, num: int = 2) -> list[PlannedPass]:
        return [plan(0, step=step(0, [0])), plan(1, step=last, trains=trains)][:num]

    with_step, without = of_rank(last=step(1, [1])), of_rank(last=None)
    expected = ("steps", 1, (1,), "rank 1 has made 0 optimizer steps by then, and others 1")
    assert find(with_step, without) == [expected]
    assert find(with_step, without, with_step) == [expected]
    assert find(with_step, with_step) == []
    # A rank that never stepped, or whose last pass was no training pass or was not kept, tells nothing.
    assert find(with_step, plan_all("num_trained", [None, None])) == []
    kinds = [kind for kind, *_ in find(with_step, of_rank(last=None, trains=False))]
    assert kinds == ["order"]
    assert [kind for kind, *_ in find(with_step, without, of_rank(last=None, num=1))] == ["passes"]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (((1.0, 1.0), (1.0, 1.0)), None),
        (((1.0, 1.0), (None, 1.0)), (0, (1,), "rank 1 makes no backward, and others do")),
        (((1.0, 1.0), (1.0, None), (1.0, None)), (1, (1, 2), "ranks 1, 2 make no backward, and others do")),
        # All left it out, and so none waits.
        (((None, 1.0), (None, 1.0)), None),
        # A rank whose losses were never seen, as those of a head of its own, tells nothing.
        (((1.0, 1.0), (None, None)), None),
        (((None, 1.0), (None, None), (1.0, 1.0)), (0, (0,), "rank 0 makes no backward, and others do")),
    ],
)
def test_a_backward_that_some_ranks_leave_out_is_told(
    shares: Sequence[Sequence[float | None]], expected: tuple[int, tuple[int, ...], str] | None
) -> None:
    ranks = [[plan(0), plan(1, step=step(0, [0, 1], of_rank))] for of_rank in shares]
    assert find(*ranks) == ([] if expected is None else [("backward", *expected)])


def test_steps_of_other_passes_are_not_held_against_each_other() -> None:
    ranks = [
        [plan(0), plan(1, step=step(0, [0, 1], [None, 1.0]))],
        [plan(0, step=step(0, [0])), plan(1, step=step(1, [1]))],
    ]
    assert [kind for kind, *_ in find(*ranks, was_cut_short=True)] == []


def sample(*names: str) -> ParameterSamples:
    samples = tuple(Sample(name=name, dtype="float32", shape=(1,), start=0, values=(1.0,)) for name in names)
    return ParameterSamples(samples=samples, num_parameters=9, num_frozen=0, is_sharded=False)


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        (((("a", "b"), ()), (("a",), ("b",))), ((1,), "b has no gradient on rank 1, and one on rank 0")),
        (
            ((("a",), ("b",)), (("a", "b"), ()), (("a",), ("b",)), (("b", "c"), ("a",))),
            ((0, 2), "b has no gradient on ranks 0, 2, and one on ranks 1, 3"),
        ),
        # None has it, or its gradient was not sampled on another rank.
        (((("a",), ("b",)), (("a",), ("b",))), None),
        (((("a",), ()), (("a",), ("b",))), None),
        # A rank without any gradient made no backward, or emptied them all: that is no parameter that it did not use.
        (((("a", "b"), ()), ((), ("a", "b"))), None),
    ],
)
def test_a_parameter_without_a_gradient_on_some_ranks_is_told(
    gradients: Sequence[tuple[Sequence[str], Sequence[str]]], expected: tuple[tuple[int, ...], str] | None
) -> None:
    """Each rank has parameters with a gradient, and others without one."""
    ranks = [
        [plan(0), plan(1, step=step(0, [0, 1], gradients=sample(*with_gradient), without_gradient=tuple(without)))]
        for with_gradient, without in gradients
    ]
    assert find(*ranks) == ([] if expected is None else [("gradients", 1, *expected)])


@pytest.mark.parametrize(
    ("steps", "is_sharded", "ranks"),
    [
        (({"max_norm": 1.0}, {}), True, (1,)),
        (({}, {"grad_norm": 2.0}, {}), True, (0, 2)),
        (({"max_norm": 1.0, "is_part_of_norm": True}, {}), False, (1,)),
        # Whole gradients are clipped by each rank for itself.
        (({"max_norm": 1.0}, {}), False, None),
        (({"max_norm": 1.0}, {"grad_norm": 1.0}), True, None),
        (({}, {}), True, None),
    ],
)
def test_sharded_gradients_are_clipped_by_all_ranks(
    steps: Sequence[dict[str, Any]], is_sharded: bool, ranks: tuple[int, ...] | None
) -> None:
    made = [[plan(0, is_sharded=is_sharded), plan(1, step=step(0, [0, 1], **each))] for each in steps]
    verb = "does" if ranks is not None and len(ranks) == 1 else "do"
    names = "" if ranks is None else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    expected = ("clipping", 1, ranks, f"{names} {verb} not clip sharded gradients, and others do")
    assert find(*made) == ([] if ranks is None else [expected])


@pytest.mark.parametrize(
    ("digests", "other", "expected"),
    [
        # Peers of three passes, of four; three of five are too few to be peers.
        ((1, 2, 3, 4), (1, 2, 3, 9), (3, 3)),
        ((1, 2, 3, 4, 5), (1, 2, 3, 8, 9), None),
        ((9, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 6, 8), (0, 5)),
        # Two thirds are enough.
        ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 6, 0, 0, 0), (6, 6)),
        # Two passes are too few, and so are three of the same tokens.
        ((1, 2, 3), (1, 2, 9), None),
        ((1, 1, 1, 2), (1, 1, 1, 3), None),
        # All alike, and tokens that are not known.
        ((1, 2, 3, 4), (1, 2, 3, 4), None),
        ((1, 2, None, None, 4), (1, 2, None, None, 5), None),
    ],
)
def test_peers_are_fed_the_same_tokens(
    digests: Sequence[int | None], other: Sequence[int | None], expected: tuple[int, int] | None
) -> None:
    found = find(plan_all("digest", digests), plan_all("digest", other))
    number, num_alike = expected or (0, 0)
    text = f"ranks 0, 1 are fed other tokens, and the same in {num_alike} passes"
    assert found == ([] if expected is None else [("inputs", number, (0, 1), text)])


def test_peers_are_compared_in_the_passes_that_both_have() -> None:
    ranks = [
        plan_all("digest", [1, 2, 3, 4, 5]),
        plan_all("digest", [6, 7, 8, 9, 10]),
        plan_all("digest", [1, 2, 3, 4, 9]),
    ]
    assert find(*ranks) == [("inputs", 4, (0, 2), "ranks 0, 2 are fed other tokens, and the same in 4 passes")]
    # Rank 2's pass that was not kept is no difference.
    assert find(*ranks[:2], ranks[2][:4], was_cut_short=True) == []


LENGTHS = (12, 9, 11, 10)


def pad(lengths: Sequence[int], longest: Sequence[int | None], last: tuple[int, int]) -> list[PlannedPass]:
    """Passes of 2 rows of these lengths, in which the longest text has so many tokens; then one of another shape."""
    passes = [
        plan(number, shape=(2, length), longest=needed)
        for number, (length, needed) in enumerate(zip(lengths, longest, strict=True))
    ]
    return [*passes, plan(len(passes), shape=last, longest=4)]


@pytest.mark.parametrize(
    ("lengths", "longest", "other_longest", "is_told"),
    [
        # Padded to the longest text of both, which is on one of them.
        (LENGTHS, (12, 7, 11, 6), (8, 9, 5, 10), True),
        # Each rank fills its rows; or no text fills them; or they have one fixed length; or two.
        (LENGTHS, LENGTHS, LENGTHS, False),
        (LENGTHS, (11, 7, 10, 6), (8, 8, 5, 9), False),
        ((12,) * 4, (12, 7, 12, 6), (8, 12, 5, 12), False),
        ((12, 9, 12, 9), (12, 7, 12, 6), (8, 9, 5, 9), False),
        # Two thirds of the passes are enough, and three lengths.
        ((12, 9, 11, 10, 10), (12, 7, 11, 6, 9), (8, 9, 5, 10, 9), True),
        ((12, 9, 11, 11, 11), (12, 7, 11, 6, 9), (8, 9, 5, 9, 9), False),
        ((12, 9, 11), (12, 7, 11), (8, 9, 5), True),
        # What is not known of one rank is not padded to.
        (LENGTHS, (12, 7, 11, None), (8, 9, 5, 10), False),
        (LENGTHS, (12, 7, None, None), (8, 9, 5, 10), False),
    ],
)
def test_other_shapes_are_told_where_the_ranks_have_padded_to_the_longest_of_all(
    lengths: Sequence[int], longest: Sequence[int | None], other_longest: Sequence[int | None], is_told: bool
) -> None:
    ranks = [pad(lengths, longest, (2, 8)), pad(lengths, other_longest, (2, 8)), pad(lengths, longest, (1, 9))]
    expected = [("shapes", len(lengths), (2,), "rank 2 has 1 rows of 9, and others 2 of 8")]
    assert find(*ranks) == (expected if is_told else [])
    # Whoever says that the job needs equal shapes is believed.
    assert find(*ranks, equal_shapes=True) == expected


def test_a_schedule_is_described_with_what_is_missing_of_it() -> None:
    rollout = {"trains": False}
    ranks = [[plan(0, **rollout), plan(1), plan(2)], [plan(0, **rollout), plan(1), plan(2)]]
    made = schedule(*ranks, world_size=5, left_out=("1 captures with names of another kind",))
    text = "2 ranks, 3 passes, 2 of them training"
    missing = [
        ("no pass", "of rank 2 to 4 of the job's 5; not compared"),
        ("excluded", "1 captures with names of another kind"),
    ]
    assert describe_schedule(made, []) == [("schedule", f"{text}: nothing in them parts the ranks"), *missing]
    difference = ScheduleDifference(
        kind="a", number=1, ranks=(1,), text="rank 1 waits", remedy="wait", exception="none where nobody waits"
    )
    later = ScheduleDifference(kind="b", number=2, ranks=(0,), text="rank 0 ends", remedy="go on")
    assert describe_schedule(made, [difference, later]) == [
        ("schedule", f"{text}: the ranks part at pass 2: rank 1 waits"),
        ("parts", "pass 2: rank 1 waits. None where nobody waits. To mend it: wait"),
        ("parts", "pass 3: rank 0 ends. To mend it: go on"),
        *missing,
    ]


@pytest.mark.parametrize(
    ("world_size", "said"),
    [
        (0, "1 rank, 2 passes, 2 of them training: one rank meets nobody"),
        (1, "1 rank, 2 passes, 2 of them training: one rank meets nobody"),
        (2, "1 rank, 2 passes, 2 of them training: the other ranks have left no passes here, so nothing is compared"),
    ],
)
def test_a_schedule_of_one_rank_is_compared_with_nothing(world_size: int, said: str) -> None:
    assert describe_schedule(schedule([plan(0), plan(1)], world_size=world_size), []) == [("schedule", said)]
