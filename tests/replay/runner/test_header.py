"""What the lines above the passes say of the optimizer with which a job began, of weights, and of what is frozen."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from actor_init.model import ModelSource
from actor_init.spec import ActorSpec
from actor_init.weights import RandomWeights
from replay.runner.header import describe_missing_weights, list_frozen


def test_what_is_frozen_in_a_part_of_the_passes_is_named_with_its_pass() -> None:
    source = ModelSource(config=LlamaConfig(), weights=RandomWeights(seed=0, std=0.02), name="a")
    assert list_frozen(source) == ""
    later = {0: frozenset({"b", "c"}), 4: frozenset[str]()}
    source = replace(source, frozen=frozenset({"a"}), frozen_later=later)
    assert list_frozen(source) == "a; b and 1 more from pass 1 on; no other from pass 5 on"


def test_a_model_of_the_users_own_without_weights_is_said_to_be_random() -> None:
    assert describe_missing_weights(ActorSpec(model="mine.py:build")) == {
        "weights": "random: --model mine.py:build builds a model without values. Try: --weights FOLDER, with the job's"
    }


@pytest.mark.parametrize(
    "actor",
    [
        ActorSpec(model="mine.py:build", weights=Path("ckpt.pt")),
        ActorSpec(model="mine.py:build", random_weights=True),
        ActorSpec(),
    ],
)
def test_weights_that_were_given_or_wanted_random_are_no_matter(actor: ActorSpec) -> None:
    assert describe_missing_weights(actor) == {}
