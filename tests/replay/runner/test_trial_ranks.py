"""What ranks found of a hypothesis is joined to the same on all of them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from replay.runner.trial_ranks import OwnTrial, join_ranks
from replay.runner.trials import run_trials
from replay.tolerances.job_bounds import LOSS
from replay.verdict.causes.cause import CauseName
from replay.verdict.causes.trial import TrialMatch
from replay.verdict.judge import PassEvidence
from replay.verdict.recorded_pass import ReplayedPass
from tests.helpers.made_records import record
from tests.helpers.made_verdicts import make_verdict
from tests.helpers.thread_ranks import CPU, call_on_ranks

AGREES, BETTER, NOT = (
    TrialMatch(agrees=True, gain=40.0, num_values=3),
    TrialMatch(agrees=True, gain=90.0, num_values=5),
    TrialMatch(agrees=False),
)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # Of each rank: is its unchanged pass wrong, and what came of each hypothesis.
        ([(True, {"a": AGREES}), (True, {"a": BETTER})], [("a", "says a", True, 40.0, 8)]),
        ([(True, {"a": AGREES}), (True, {"a": NOT})], [("a", "says a", False, 0.0, 0)]),
        ([(True, {"a": AGREES}), (True, {})], [("a", "says a", False, 0.0, 0)]),
        ([(True, {}), (True, {"a": AGREES})], [("a", "says a", False, 0.0, 0)]),
        # A rank whose unchanged pass is right has no say, for or against.
        ([(False, {"a": NOT}), (True, {"a": BETTER})], [("a", "says a, on rank 1 alone", True, 90.0, 5)]),
        ([(False, {"b": AGREES}), (True, {"a": NOT})], [("a", "says a, on rank 1 alone", False, 0.0, 0)]),
        (
            [(True, {"a": AGREES}), (False, {}), (True, {"a": AGREES, "b": NOT})],
            [("a", "says a, on rank 0, 2 alone", True, 40.0, 6), ("b", "says b, on rank 0, 2 alone", False, 0.0, 0)],
        ),
        ([(False, {"a": AGREES}), (False, {"a": AGREES})], []),
    ],
)
def test_a_hypothesis_has_to_hold_on_each_rank_that_is_wrong(
    ranks: Sequence[tuple[bool, dict[str, TrialMatch]]], expected: list[tuple[Any, ...]]
) -> None:
    def join_on_rank(world: Any) -> list[tuple[Any, ...]]:
        is_wrong, matches = ranks[world.rank]
        own = {
            name: OwnTrial(match=match, cause=CauseName.MASK, says=f"says {name}", try_next="")
            for name, match in matches.items()
        }
        results = join_ranks(own, world, is_wrong=is_wrong)
        return [(result.name, result.says, result.agrees, result.gain, result.num_values) for result in results]

    assert call_on_ranks(join_on_rank, [CPU] * len(ranks)) == [expected] * len(ranks)


@pytest.mark.parametrize(
    ("has_pass", "are_tried"), [([True, True], True), ([True, False], False), ([False, True], False)]
)
def test_a_pass_that_a_rank_does_not_have_is_tried_on_none(has_pass: list[bool], are_tried: bool) -> None:
    """With uneven inputs. A rank that tried it alone would wait for the others in its first forward."""
    passes = [
        PassEvidence(record(index, rank=rank), None, ReplayedPass())
        for rank, is_there in enumerate(has_pass)
        for index in ((2, 3) if is_there else (2,))
    ]
    # Under tensor parallelism no trial runs, and that is told.
    spec = SimpleNamespace(
        measure=SimpleNamespace(steps=False), actor=SimpleNamespace(parallel=SimpleNamespace(tp=2, ring=1))
    )
    nothing: Any = None

    def try_on_rank(world: Any) -> bool:
        repeater: Any = SimpleNamespace(spec=spec, world=world)
        return run_trials(repeater, passes, make_verdict((3, LOSS, None)), nothing) is not None

    assert call_on_ranks(try_on_rank, [CPU] * 2, limit=60) == [are_tried] * 2
