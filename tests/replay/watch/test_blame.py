"""Which rank the others wait for: a table of what three or more ranks may look like when nothing goes on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from replay.watch.blame import Sighting, find_missing_ranks, report_departed_rank, report_hang, report_termination
from replay.watch.progress import RankPhase, RankPosition


def make_sighting(
    rank: int,
    phase: RankPhase = RankPhase.FORWARD,
    *,
    index: int = 4,
    counts: Mapping[str, int] | None = None,
    inside: bool = True,
    unforeseen: int = 0,
    failed: bool = False,
    answers: bool = True,
) -> Sighting:
    source = f"input_{rank}.pkl" if phase not in (RankPhase.OPENING, RankPhase.OUT_OF_INPUTS) else None
    position = RankPosition(index=index, phase=phase, source=source, rows=2, padded_tokens=40, real_tokens=38)
    return Sighting(
        rank=rank,
        position=position,
        answers=answers,
        idle_seconds=5.0,
        collectives=counts or {},
        num_unforeseen=unforeseen,
        waits_for_device=not inside and phase is RankPhase.DEVICE_SYNC,
        in_collective=inside,
        collective_failed=failed,
        standing_at="torch/x.py:1 in wait",
    )


CASES: dict[str, tuple[list[Sighting], tuple[int, ...]]] = {
    "the only rank": ([make_sighting(0)], (0,)),
    "one does not answer, whatever the others do": (
        [
            make_sighting(0, RankPhase.READING, inside=False),
            make_sighting(1, answers=False, inside=False),
            make_sighting(2, RankPhase.WAITING_FOR_RANKS),
        ],
        (1,),
    ),
    "one still reads its file": (
        [
            make_sighting(0, RankPhase.STARTING),
            make_sighting(1, RankPhase.READING, inside=False),
            make_sighting(2, RankPhase.STARTING),
        ],
        (1,),
    ),
    "one is a whole pass behind": (
        [make_sighting(0, index=4), make_sighting(1, index=3, inside=False), make_sighting(2, index=4)],
        (1,),
    ),
    "one opens the actor, the others wait to begin": (
        [
            make_sighting(0, RankPhase.OPENING, index=-1, inside=False),
            make_sighting(1, RankPhase.STARTING, index=0),
            make_sighting(2, RankPhase.STARTING, index=0),
        ],
        (0,),
    ),
    "one ran out of inputs": (
        [
            make_sighting(0, RankPhase.STARTING, index=5),
            make_sighting(1, RankPhase.OUT_OF_INPUTS, index=5, inside=False),
            make_sighting(2, RankPhase.STARTING, index=5),
        ],
        (1,),
    ),
    "two ran out of inputs, at different times": (
        [
            make_sighting(0, RankPhase.OUT_OF_INPUTS, index=3, inside=False),
            make_sighting(1, RankPhase.OUT_OF_INPUTS, index=4, inside=False),
            make_sighting(2, RankPhase.STARTING, index=4),
        ],
        (0, 1),
    ),
    "one ran out of inputs, and the others are in different passes": (
        [
            make_sighting(0, RankPhase.STARTING, index=4),
            make_sighting(1, RankPhase.OUT_OF_INPUTS, index=5, inside=False),
            make_sighting(2, RankPhase.STARTING, index=6),
        ],
        (1,),
    ),
    "one is still in the last pass, the others are through": (
        [
            make_sighting(0, RankPhase.OUT_OF_INPUTS, index=5, inside=False),
            make_sighting(1, RankPhase.GATHERING, index=4, inside=False),
            make_sighting(2, RankPhase.OUT_OF_INPUTS, index=5, inside=False),
        ],
        (1,),
    ),
    "two behind, of whom one waits for the other": (
        [
            make_sighting(0),
            make_sighting(1, inside=False),
            make_sighting(2, RankPhase.WAITING_FOR_RANKS),
            make_sighting(3, RankPhase.WAITING_FOR_RANKS),
        ],
        (1,),
    ),
    "one went past a collective in which the others wait": (
        [make_sighting(0), make_sighting(1), make_sighting(2, RankPhase.BACKWARD)],
        (2,),
    ),
    "one waits in a collective that the others never reach": (
        [make_sighting(0, RankPhase.BACKWARD), make_sighting(1), make_sighting(2, RankPhase.BACKWARD)],
        (1,),
    ),
    "one of two waits in a collective before the other's, and more do not wait behind than ahead": (
        [make_sighting(0), make_sighting(1, RankPhase.BACKWARD)],
        (0,),
    ),
    "two of four went past a collective, and as many wait in it": (
        [
            make_sighting(0, RankPhase.BACKWARD),
            make_sighting(1),
            make_sighting(2, RankPhase.BACKWARD),
            make_sighting(3),
        ],
        (1, 3),
    ),
    "fewer collectives in the same phase": (
        [
            make_sighting(0, counts={"0": 8}),
            make_sighting(1, counts={"0": 7}, inside=False),
            make_sighting(2, counts={"0": 8}),
        ],
        (1,),
    ),
    "fewer collectives in a group of which one rank is no member": (
        [
            make_sighting(0, counts={"a": 8}),
            make_sighting(1, counts={"a": 7}),
            make_sighting(2, counts={"b": 3}),
            make_sighting(3, counts={"b": 3}),
        ],
        (1,),
    ),
    "a rank that complains first has arrived, and is not named": (
        [
            make_sighting(0, counts={"0": 9}),
            make_sighting(1, counts={"0": 8}, inside=False),
            make_sighting(2, counts={"0": 9}),
        ],
        (1,),
    ),
    "one more than in any pass before, and all wait for their devices": (
        [
            make_sighting(0, RankPhase.DEVICE_SYNC, counts={"0": 7}, inside=False),
            make_sighting(1, RankPhase.DEVICE_SYNC, counts={"0": 8}, inside=False, unforeseen=1),
        ],
        (1,),
    ),
    "one more than in any pass before, and the other is stuck in an earlier phase": (
        [
            make_sighting(0, RankPhase.BACKWARD, counts={"0": 7}, inside=False),
            make_sighting(1, RankPhase.DEVICE_SYNC, counts={"0": 8}, inside=False, unforeseen=1),
        ],
        (1,),
    ),
    "one waits in a collective that no pass before had, the other in the usual one": (
        [make_sighting(0, counts={"0": 7}), make_sighting(1, counts={"0": 8}, unforeseen=1)],
        (1,),
    ),
    "one left a collective that no pass before had, and none failed": (
        [
            make_sighting(0),
            make_sighting(1, inside=False, unforeseen=1),
            make_sighting(2, inside=False),
        ],
        (1, 2),
    ),
    "one's collective failed, two more returned in the same phase": (
        [
            make_sighting(0, RankPhase.WAITING_FOR_RANKS, failed=True),
            make_sighting(1, RankPhase.WAITING_FOR_RANKS, counts={"0": 8}, inside=False),
            make_sighting(2, RankPhase.WAITING_FOR_RANKS, counts={"0": 9}, inside=False, unforeseen=1),
        ],
        (2,),
    ),
    "all ranks reach a collective that no pass before had": (
        [make_sighting(0, counts={"0": 8}, unforeseen=1), make_sighting(1, counts={"0": 9}, unforeseen=1)],
        (0,),
    ),
    "equal numbers, and one outside": (
        [
            make_sighting(0, counts={"0": 8}),
            make_sighting(1, counts={"0": 8}),
            make_sighting(2, counts={"0": 8}, inside=False),
        ],
        (2,),
    ),
    "contradicting numbers, all inside": (
        [
            make_sighting(0, counts={"0": 8, "1": 3}),
            make_sighting(1, counts={"0": 7, "1": 4}),
            make_sighting(2, counts={"0": 8, "1": 4}),
        ],
        (),
    ),
    "no difference": (
        [make_sighting(0, counts={"0": 8}), make_sighting(1, counts={"0": 8}), make_sighting(2, counts={"0": 8})],
        (),
    ),
    "none answers but for one's own": (
        [make_sighting(0), make_sighting(1, answers=False), make_sighting(2, answers=False)],
        (1, 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rank_that_did_not_arrive_is_named(name: str) -> None:
    sightings, expected = CASES[name]
    assert find_missing_ranks(sightings).ranks == expected


@pytest.mark.parametrize("name", CASES)
def test_the_order_in_which_ranks_are_heard_decides_nothing(name: str) -> None:
    sightings, expected = CASES[name]
    assert tuple(sorted(find_missing_ranks(sightings[::-1]).ranks)) == expected


REASONS = {
    "the only rank": "it is the only rank",
    "one does not answer, whatever the others do": (
        "it does not answer: it is stopped, or native code holds Python's lock"
    ),
    "one ran out of inputs": "it has run out of inputs after 5 passes, and others are in a later one",
    "two ran out of inputs, at different times": (
        "they have run out of inputs after 3, 4 passes, and others are in a later one"
    ),
    "one still reads its file": "it has not reached the phase of the others (waiting to start)",
    "two behind, of whom one waits for the other": "it has not reached the phase of the others (waiting after forward)",
    "one went past a collective in which the others wait": (
        "it is in a later phase and went past the collective in which the others wait"
    ),
    "one waits in a collective that the others never reach": (
        "it waits in a collective of its own, before the phase of the others (backward): the ranks reach different "
        "collectives"
    ),
    "fewer collectives in the same phase": "it entered fewer collectives than the others, who wait in one",
    "one's collective failed, two more returned in the same phase": (
        "it entered a collective of its own: more of them than any pass before this one"
    ),
    "equal numbers, and one outside": "the other ranks stand in a collective, and it does not",
    "no difference": "all ranks are in the same phase, after equal or contradicting numbers of collectives",
}


@pytest.mark.parametrize("name", REASONS)
def test_the_rule_that_names_a_rank_is_said(name: str) -> None:
    assert find_missing_ranks(CASES[name][0]).reason == REASONS[name]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "in a collective, at torch/x.py:1 in wait"),
        # Of a rank in a collective it says nothing that its device has work to do.
        ({"waits_for_device": True}, "in a collective, at torch/x.py:1 in wait"),
        ({"in_collective": False, "waits_for_device": True}, "waiting for its device, at torch/x.py:1 in wait"),
        ({"in_collective": False, "standing_at": "", "answers": False}, "does not answer"),
    ],
)
def test_a_line_says_where_a_rank_stands(changes: dict[str, Any], says: str) -> None:
    sighting = replace(make_sighting(3), **changes)
    assert sighting.describe() == (
        f"rank 3: pass 5 on input_3.pkl (2 rows, 40 tokens, 38 of them real), phase forward, {says}"
    )
    elsewhere = replace(sighting, position=None)
    assert elsewhere.describe() == f"rank 3: a pass that rank3.position.json on its own node says, {says}"


def test_a_hang_is_of_the_first_rank_that_did_not_arrive_and_names_them_all() -> None:
    sightings, _ = CASES["two ran out of inputs, at different times"]
    failure = report_hang(sightings[::-1], "no progress for 9 s")
    assert failure.headline.startswith("no progress for 9 s: ranks 1, 0 did not arrive: they have run out")
    assert (failure.rank, failure.position) == (1, sightings[1].position)
    alone = report_hang([make_sighting(2)], "no progress for 9 s", ". Try: more")
    assert alone.headline == (
        "no progress for 9 s in pass 5 on input_2.pkl (2 rows, 40 tokens, 38 of them real), phase forward, at "
        "torch/x.py:1 in wait. Try: more"
    )


def test_where_it_cannot_be_told_nobody_is_named() -> None:
    failure = report_hang([make_sighting(0), make_sighting(1)], "no progress for 120 s")
    assert failure.rank is None
    assert "which rank did not arrive cannot be told" in failure.headline
    assert "did not arrive: " not in failure.headline


def test_every_rank_has_a_line_with_its_input_and_phase() -> None:
    failure = report_hang(
        [make_sighting(0, RankPhase.WAITING_FOR_RANKS), make_sighting(1, inside=False)],
        "no progress for 120 s",
        advice=". Try: --timeout 600",
    )
    assert failure.text("logs/x").splitlines() == [
        "replay: no progress for 120 s: rank 1 did not arrive: it has not reached the phase of the others "
        "(waiting after forward). Try: --timeout 600",
        "  rank 0: pass 5 on input_0.pkl (2 rows, 40 tokens, 38 of them real), phase waiting after forward, "
        "in a collective, at torch/x.py:1 in wait",
        "  rank 1: pass 5 on input_1.pkl (2 rows, 40 tokens, 38 of them real), phase forward, at torch/x.py:1 in wait",
        "replay: the run ends; finished passes and rank<k>.stack.txt are in logs/x",
    ]


@pytest.mark.parametrize(
    ("interrupted", "kind", "text"),
    [(True, "interrupted", "was interrupted (Ctrl-C)"), (False, "failed", "refused the run")],
)
def test_a_rank_that_said_goodbye_says_why(interrupted: bool, kind: str, text: str) -> None:
    failure = report_departed_rank(2, interrupted=interrupted)
    assert (failure.kind, failure.rank, failure.headline, failure.error) == (kind, 2, f"rank 2 {text}", text)


def test_a_signal_to_all_ranks_names_none_of_them() -> None:
    positions = {rank: make_sighting(rank).position for rank in range(3)}
    assert report_termination([0, 1, 2], positions).rank is None
    some = report_termination([1, 2], {**positions, 1: make_sighting(1, index=8).position})
    assert (some.rank, some.position and some.position.index, some.kind, some.error) == (1, 8, "terminated", "SIGTERM")
    assert some.headline.startswith("rank 1 was ended from outside (SIGTERM) in pass 9 on input_1.pkl")
    assert report_termination([1], positions).rank == 1
    assert report_termination([0], {0: make_sighting(0).position}).rank == 0
