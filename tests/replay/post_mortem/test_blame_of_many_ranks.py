"""Who was behind among three ranks and more, where clauses of a rule part them that two ranks do not show."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from capture.black_box.incidents import Incident
from capture.black_box.stacks import StackFrame
from capture.file_format.end_record import EndRecord
from capture.record.observer import TrainingPhase
from replay.post_mortem.blocking_ranks import End, LastSighting, find_blocking_ranks, find_world_size
from replay.post_mortem.text import describe_hang
from replay.watch.stacks import NUM_INNERMOST

OWN = (StackFrame(file="train.py", line="27", function="compute_loss"),)
IN_BACKWARD = (StackFrame(file="torch/autograd/graph.py", line="979", function="_engine_run_backward"),)
IN_COLLECTIVE = (
    StackFrame(file="torch/distributed/distributed_c10d.py", line="5", function="barrier"),
    StackFrame(file="train.py", line="44", function="main"),
)
IN_BROADCAST = (
    StackFrame(file="torch/nn/parallel/distributed.py", line="23", function="_distributed_broadcast_coalesced"),
    *OWN,
)
LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:2947."


def see(
    end: End,
    forward: int | None,
    place: TrainingPhase | str,
    frames: Sequence[StackFrame] = (),
    *,
    at: int = 0,
    what: str = "signal",
    where: str = "SIGTERM",
    **incident: Any,
) -> LastSighting:
    """What is known of a rank, `at` seconds after nine; the rank is set by `blame`."""
    time = f"2026-03-01T09:00:{at:02d}.000000+00:00"
    made = Incident(what=what, where=where, forward=forward, time=time, place=place, **incident)
    return LastSighting(rank=0, end=end, time=time, forward=forward, place=place, frames=frames, incident=made)


def close(num_passes: int, place: str = "after the optimizer's step") -> LastSighting:
    time = "2026-03-01T09:00:00.000000+00:00"
    record = EndRecord(rank=0, world_size=3, num_passes=num_passes, num_steps=None, place=place, opened=time, time=time)
    return LastSighting(rank=0, end=End.CLOSED, time=time, forward=num_passes - 1, place=place, closed=record)


def gave_up(forward: int, place: str, *, at: int, message: str = LOST) -> LastSighting:
    return see(End.GAVE_UP, forward, place, at=at, what="exception", where="main thread", message=message)


WAITS = see(End.SIGNALLED, 4, "in backward", IN_BACKWARD)
MEETS = see(End.SIGNALLED, 4, "after forward", IN_COLLECTIVE)
SLEEPS = see(End.SIGNALLED, 4, "after forward", OWN)

CASES: dict[str, tuple[Sequence[LastSighting], tuple[int, ...], str]] = {
    # The others lost the one that was ended: all of them, and only after it.
    "ended from outside, and lost by all others": (
        [gave_up(4, "in forward", at=2), see(End.SIGNALLED, 4, "in backward", IN_BACKWARD, at=1),
         gave_up(4, "in forward", at=3)],
        (1,),
        "it was ended from outside (SIGTERM)",
    ),
    "ended from outside, and lost by one of two others": (
        [gave_up(4, "in forward", at=2), see(End.SIGNALLED, 4, "in backward", IN_BACKWARD, at=1),
         see(End.SLOW, 3, "after forward", OWN, at=3, what="slow step", where="watch")],
        (2,),
        "others are in pass 5",
    ),
    "ended from outside only after another was lost": (
        [gave_up(4, "in backward", at=1), see(End.SIGNALLED, 4, "in forward", OWN, at=2),
         gave_up(4, "in backward", at=3)],
        (1,),
        "others are in the backward of pass 5",
    ),
    "ended after the first of the others lost a connection": (
        [gave_up(4, "in forward", at=1), see(End.SIGNALLED, 5, "in forward", OWN, at=2),
         gave_up(4, "in forward", at=3)],
        (0, 2),
        "others are in pass 6",
    ),
    "two that were ended from outside": (
        [gave_up(4, "in backward", at=3), see(End.SIGNALLED, 4, "in backward", IN_BACKWARD, at=1),
         see(End.SIGNALLED, 4, "after forward", OWN, at=1)],
        (2,),
        "others are in the backward of pass 5",
    ),
    # Of two that failed the first in time; of two that crashed, both.
    "the first of three that failed": (
        [see(End.FAILED, 4, "in forward", at=5, message="ValueError: b"),
         see(End.FAILED, 4, "in forward", at=4, message="ValueError: a"),
         see(End.FAILED, 4, "in forward", at=6, message="ValueError: c")],
        (1,),
        "ValueError: a",
    ),
    "two of three that crashed": (
        [see(End.CRASHED, 4, "in forward", message="Segmentation fault"), WAITS,
         see(End.CRASHED, 4, "in forward", message="Segmentation fault")],
        (0, 2),
        "Segmentation fault",
    ),
    "a crash before a kill": (
        [see(End.KILLED, 4, "in forward"), WAITS, see(End.CRASHED, 4, "in forward", message="Segmentation fault")],
        (2,),
        "Segmentation fault",
    ),
    "a kill before one that was ended": (
        [gave_up(4, "in forward", at=2), see(End.SIGNALLED, 4, "in backward", IN_BACKWARD, at=1),
         see(End.KILLED, 4, "in forward")],
        (2,),
        "it was killed (by hand, for memory, by a launcher that it did not answer), or it left by os._exit",
    ),
    # The backward that others are in is that of the earliest pass, and the ranks ahead of it may have made it.
    "no backward of the earliest pass that others are in": (
        [see(End.SIGNALLED, 3, "in backward", IN_BACKWARD, last_backward=3),
         see(End.SIGNALLED, 5, "in backward", IN_BACKWARD, last_backward=5),
         see(End.SIGNALLED, 5, "in forward", IN_COLLECTIVE, last_backward=2)],
        (2,),
        "it made no backward of pass 4, in which others are",
    ),
    "a backward that nobody saw is not left out": (
        [see(End.SIGNALLED, 3, "in backward", IN_BACKWARD, last_backward=3),
         see(End.SIGNALLED, 4, "in forward", IN_COLLECTIVE),
         see(End.SIGNALLED, 4, "in forward", IN_COLLECTIVE, last_backward=3)],
        (0,),
        "others are in pass 5",
    ),
    # A forward that others are in tells of no backward.
    "a pass that was begun without a backward of its own": (
        [see(End.SIGNALLED, 3, "after forward", OWN, last_backward=2),
         see(End.SIGNALLED, 4, "in forward", IN_COLLECTIVE, last_backward=1)],
        (0,),
        "others are in pass 5",
    ),
    # Of several early ranks those that stand in code of their own; without any, all of them.
    "early, and one of two waits": (
        [see(End.SIGNALLED, 3, "in forward", IN_COLLECTIVE), see(End.SIGNALLED, 3, "in forward", OWN), MEETS],
        (1,),
        "others are in pass 5",
    ),
    "early, and both wait": (
        [see(End.SIGNALLED, 3, "in forward", IN_COLLECTIVE), see(End.SIGNALLED, 3, "in forward", IN_COLLECTIVE), MEETS],
        (0, 1),
        "it waits in a collective of its own, and others are in pass 5",
    ),
    "early, and the loop of one of two was over": (
        [see(End.SIGNALLED, 3, "after the optimizer's step", OWN), close(4), MEETS],
        (1,),
        "its loop was over after 4 passes, and others are in pass 5",
    ),
    "before any pass": (
        [see(End.SIGNALLED, None, "in forward", OWN), see(End.SIGNALLED, 0, "in forward", IN_COLLECTIVE)],
        (0,),
        "others are in pass 1",
    ),
    # The last pass that others are in is told, not the next.
    "ranks of three passes": (
        [see(End.SIGNALLED, 7, "in forward", IN_COLLECTIVE), see(End.SIGNALLED, 3, "in forward", OWN), MEETS],
        (1,),
        "others are in pass 8",
    ),
    # In one pass the earliest place counts, unless all there wait for one that stands further on.
    "the earliest of three places": (
        [WAITS, see(End.SIGNALLED, 4, "in forward", OWN), MEETS],
        (1,),
        # At one place of several: that of the first of them.
        "others are ",
    ),
    "further on in own code, and all others wait": (
        [see(End.SIGNALLED, 4, "in forward", IN_COLLECTIVE), see(End.SIGNALLED, 4, "in forward", IN_COLLECTIVE),
         SLEEPS],
        (2,),
        "it stands in code of its own, and others wait in a collective",
    ),
    "further on in own code, and one of the others does not wait": (
        [see(End.SIGNALLED, 4, "in forward", IN_COLLECTIVE), see(End.SIGNALLED, 4, "in forward", OWN), SLEEPS],
        (1,),
        "others are after the forward of pass 5",
    ),
    "a loop that was over at an earlier place": (
        [see(End.SIGNALLED, 3, "after the optimizer's step", IN_COLLECTIVE), close(4, "after backward"),
         see(End.SIGNALLED, 3, "after backward", IN_COLLECTIVE)],
        (1,),
        "its loop was over there, and others are after the optimizer's step that followed pass 4",
    ),
    "early in one pass, and all of these wait": (
        [see(End.SIGNALLED, 4, "in forward", IN_COLLECTIVE), see(End.SIGNALLED, 4, "in forward", IN_COLLECTIVE), WAITS],
        (0, 1),
        "others are in the backward of pass 5",
    ),
    "ended from outside in the moment in which the others lost it": (
        [gave_up(4, "in forward", at=2), see(End.SIGNALLED, 4, "in backward", IN_BACKWARD, at=2),
         gave_up(4, "in forward", at=2)],
        (1,),
        "it was ended from outside (SIGTERM)",
    ),
    # A backward waits in C++, and so does a broadcast of buffers; what a collective called long ago does not.
    "in a backward, at a place that is not known": (
        [see(End.SIGNALLED, 3, "", IN_BACKWARD), see(End.SIGNALLED, 3, "", OWN)],
        (1,),
        "the others wait in a collective or a backward, and it stands in code of its own",
    ),
    "in a broadcast of buffers": (
        [see(End.SIGNALLED, 3, "", IN_BROADCAST), see(End.SIGNALLED, 3, "", OWN)],
        (1,),
        "the others wait in a collective or a backward, and it stands in code of its own",
    ),
    "in a hook far below a collective": (
        [see(End.SIGNALLED, 3, "", (*OWN * NUM_INNERMOST, *IN_COLLECTIVE)), see(End.SIGNALLED, 3, "", IN_COLLECTIVE)],
        (0,),
        "the others wait in a collective or a backward, and it stands in code of its own",
    ),
    # A place that is not known keeps places from being compared; what stands in its own code is told all the same.
    "a place that is not known": (
        [see(End.SIGNALLED, 3, "", IN_COLLECTIVE), see(End.SIGNALLED, 9, "in forward", OWN), MEETS],
        (1,),
        "the others wait in a collective or a backward, and it stands in code of its own",
    ),
    "aborted where no place is known": (
        [see(End.ABORTED, 3, ""), see(End.DIED, 3, ""), see(End.DIED, 3, "")],
        (0,),
        "native code aborted it",
    ),
}  # fmt: skip


def number_ranks(sightings: Sequence[LastSighting]) -> list[LastSighting]:
    return [replace(sighting, rank=rank) for rank, sighting in enumerate(sightings)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_mirrored", [False, True], ids=["", "mirrored"])
def test_the_rank_that_the_others_waited_for_is_told_among_several(name: str, is_mirrored: bool) -> None:
    sightings, ranks, reason = CASES[name]
    last = len(sightings) - 1
    seen = number_ranks(sightings[::-1] if is_mirrored else sightings)
    blame = find_blocking_ranks(seen, len(seen))
    assert blame.ranks == (tuple(sorted(last - rank for rank in ranks)) if is_mirrored else ranks)
    assert blame.reason.startswith(reason)


def test_ranks_that_left_nothing_are_listed_where_no_rule_parts_the_others() -> None:
    alike = number_ranks([SLEEPS, SLEEPS, SLEEPS])
    assert find_blocking_ranks(alike, 3).reason == "the ranks were at the same place of the same pass"
    assert find_blocking_ranks(alike, 5).reason == (
        "ranks 3, 4 of the job's 5 left nothing here; copy what their hosts have"
    )
    [first, _, third] = alike
    assert find_blocking_ranks([first, third], 3).reason.startswith("rank 1 of the job's 3 left nothing here")
    # One rank of several is not the only one, and one of a job of one rank is.
    assert find_blocking_ranks([third], 3).ranks == ()
    assert find_blocking_ranks([third], 1).ranks == find_blocking_ranks([third], 0).ranks == (2,)


def test_the_world_is_the_largest_that_any_rank_knows() -> None:
    known = [replace(each.incident, world_size=size) for each, size in ((SLEEPS, None), (WAITS, 4)) if each.incident]
    seen = [replace(SLEEPS, incident=incident) for incident in known]
    assert find_world_size(seen) == 4
    assert find_world_size([*seen, replace(close(1), rank=9)]) == 4
    assert find_world_size([seen[0], close(1)]) == 3
    assert find_world_size([seen[0]]) == find_world_size([]) == 0


def test_where_ranks_stood_is_said_of_the_blamed_ones_and_of_each() -> None:
    stuck = see(
        End.SIGNALLED, 3, "after forward", (*IN_COLLECTIVE[:1], *OWN), last_collective="all_reduce 12", world_size=3
    )
    done = describe_hang(number_ranks([WAITS, stuck, stuck]))
    place = "after the forward of pass 4, at train.py:27 in compute_loss, in "
    assert done[0] == (
        "hang",
        f"ranks 1, 2 were behind: {place}{IN_COLLECTIVE[0]}: it waits in a collective of its own, and others are in "
        "pass 5",
    )
    assert done[1:] == [
        ("rank 0", f"in the backward of pass 5, at {IN_BACKWARD[0]}; SIGTERM"),
        ("rank 1", f"{place}{IN_COLLECTIVE[0]}; SIGTERM; last collective all_reduce 12"),
        ("rank 2", f"{place}{IN_COLLECTIVE[0]}; SIGTERM; last collective all_reduce 12"),
    ]


def test_of_many_ranks_the_blamed_ones_have_lines_in_the_order_of_ranks() -> None:
    ranks = number_ranks([MEETS] * 18 + [see(End.SIGNALLED, 3, "in forward", OWN)] * 2)
    labels = [label for label, _ in describe_hang(ranks)]
    assert labels == ["hang", *(f"rank {rank}" for rank in (*range(14), 18, 19)), "ranks"]
    assert describe_hang(ranks)[-1] == ("ranks", "4 more")
    assert describe_hang(ranks)[0][1].startswith("ranks 18, 19 were behind: in the forward of pass 4, at train.py:27 ")


@pytest.mark.parametrize(
    ("blamed", "verb"),
    [
        (see(End.FAILED, 3, "in forward", message="ValueError: a"), "failed"),
        (see(End.CRASHED, 3, "in forward"), "crashed in native code"),
        (see(End.KILLED, 3, "in forward"), "died without a word"),
        (see(End.SLOW, 3, "in forward", OWN), "was behind"),
        (close(4), "was behind"),
    ],
)
def test_what_became_of_the_blamed_rank_is_said(blamed: LastSighting, verb: str) -> None:
    assert describe_hang(number_ranks([MEETS, MEETS, blamed]))[0][1].startswith(f"rank 2 {verb}: ")
