"""What the lines above the passes say of the optimizer with which a job began, and of what it did not train."""

from dataclasses import replace

from transformers import LlamaConfig

from actor_init.model import ModelSource
from actor_init.weights import RandomWeights
from replay.runner.header import list_frozen


def test_what_is_frozen_in_a_part_of_the_passes_is_named_with_its_pass() -> None:
    source = ModelSource(config=LlamaConfig(), weights=RandomWeights(seed=0, std=0.02), name="a")
    assert list_frozen(source) == ""
    later = {0: frozenset({"b", "c"}), 4: frozenset[str]()}
    source = replace(source, frozen=frozenset({"a"}), frozen_later=later)
    assert list_frozen(source) == "a; b and 1 more from pass 1 on; no other from pass 5 on"
