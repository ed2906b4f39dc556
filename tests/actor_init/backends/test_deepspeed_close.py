"""A closed actor leaves the process as it was: what DeepSpeed replaces for good is torch's own again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from actor_init.backends.deepspeed import DeepSpeedBackend
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec, Dtype, ParallelSpec
from actor_init.weights import RandomWeights
from actor_init.world import World

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.from_env(ParallelSpec()) as opened:
        yield opened


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_linear_layers_are_computed_by_torchs_function_again(
    zero_stage: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch._C._nn.linear
    # Another test of this process may have left an actor open.
    monkeypatch.setattr(nn.functional, "linear", own)
    source = ModelSource(name="tiny", config=LlamaConfig(**TINY), weights=RandomWeights(seed=0, std=0.02))
    spec = ActorSpec(backend="deepspeed", zero_stage=zero_stage, dtype=Dtype.FP32, optimizer="adamw").with_defaults()
    for _ in range(2):
        backend = DeepSpeedBackend.open(spec, source, world)
        assert (nn.functional.linear is own) == (zero_stage != 3)
        backend.close()
        assert nn.functional.linear is own
