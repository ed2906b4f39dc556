"""A closed actor leaves the process as it was: what DeepSpeed replaces for good is torch's own again."""

import pytest
import torch
from torch import nn

from actor_init.backends.deepspeed import DeepSpeedBackend
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec, Dtype
from actor_init.weights import RandomWeights
from actor_init.world import World
from tests.helpers.families import tiny_config


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_linear_layers_are_computed_by_torchs_function_again(
    zero_stage: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch._C._nn.linear
    # Another test of this process may have left an actor open.
    monkeypatch.setattr(nn.functional, "linear", own)
    source = ModelSource(name="tiny", config=tiny_config("llama"), weights=RandomWeights(seed=0, std=0.02))
    spec = ActorSpec(backend="deepspeed", zero_stage=zero_stage, dtype=Dtype.FP32, optimizer="adamw").with_defaults()
    for _ in range(2):
        backend = DeepSpeedBackend.open(spec, source, world)
        assert (nn.functional.linear is own) == (zero_stage != 3)
        backend.close()
        assert nn.functional.linear is own
