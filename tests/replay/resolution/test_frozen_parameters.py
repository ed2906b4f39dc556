"""What a job trained from a later step on is dated to that step, or it is not known."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from capture.file_format.model_facts import ModelFacts
from replay.resolution.frozen_parameters import date_changes
from tests.replay.resolution.test_job_windows import make_pass, make_round

NAMES = ["embed.weight", "norm.weight", "head.weight"]
# Two passes in each of three steps.
ROUNDS = [make_round(make_pass(forward, forward // 2)) for forward in range(6)]


def make_facts(later: Mapping[int, Sequence[str]], rank: int = 0) -> ModelFacts:
    parameters = {name: {"dtype": "float32", "trained": name != "embed.weight", "hooks": []} for name in NAMES}
    frozen_later = {str(forward): names for forward, names in later.items()}
    return ModelFacts(
        rank=rank, recording="a", forward=0, trains=True, python="", parameters=parameters, frozen_later=frozen_later
    )


def date(later: Mapping[int, Sequence[str]], names: Sequence[str] = NAMES) -> dict[int, frozenset[str]]:
    return date_changes([make_facts(later)], names, ROUNDS)


def test_parameters_are_frozen_and_thawed_at_steps() -> None:
    found = date({2: [], 4: ["norm.weight"]})
    assert found == {0: frozenset({"embed.weight"}), 2: frozenset(), 4: frozenset({"norm.weight"})}


@pytest.mark.parametrize("later", [{}, {3: []}, {1: []}, {9: []}])
def test_a_change_within_a_step_or_behind_all_of_them_is_not_followed(later: Mapping[int, Sequence[str]]) -> None:
    assert date(later) == {}


def test_a_change_in_a_large_model_is_that_of_the_only_step_where_it_may_be() -> None:
    """The recorder looks at 64 modules in a pass: at 190 of them in three, so it may note a change two passes late."""
    many = [*NAMES, *(f"layers.{number}.weight" for number in range(187))]
    assert sorted(date({3: []}, many)) == [0, 2]
    # Two steps begin within the three passes.
    assert date({4: []}, many) == {}


def test_ranks_that_trained_other_parameters_are_not_followed() -> None:
    facts = make_facts({2: []})
    rounds = [
        make_round(*(make_pass(forward, forward // 2, rank=rank, ranks=2) for rank in range(2))) for forward in range(6)
    ]
    assert sorted(date_changes([facts, replace(facts, rank=1)], NAMES, rounds)) == [0, 2]
    assert date_changes([facts, make_facts({4: []}, rank=1)], NAMES, rounds) == {}
    assert date_changes([facts, make_facts({}, rank=1)], NAMES, rounds) == {}
