"""Buffers and vectors of a model that is built twice, as before transformers 5.0, are those of its class."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from actor_init import model as model_module
from actor_init.model import build_on_meta, make_random_weights, materialise
from actor_init.weights import build_with_values

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SCALING = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 16
}
CONFIGS = {
    "rotary": AutoConfig.for_model("llama", **SIZES),
    "scaled rotary": AutoConfig.for_model("llama", **SIZES, rope_parameters=SCALING),
    "scaled embedding": AutoConfig.for_model("gemma3_text", **SIZES),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_buffers_are_those_of_a_model_built_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers before 5.0 neither fills buffers in `_init_weights` nor spares the weights that are filled."""
    config = CONFIGS[name]
    expected = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="sdpa")
    new = build_on_meta(config, attention="sdpa", dtype=torch.float32)
    materialise(new, make_random_weights(config, 0), torch.device("cpu"))
    monkeypatch.setattr(model_module, "INIT_FILLS_BUFFERS", False)

    def init_of_4_57(self: nn.Module, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_()

    old = build_on_meta(config, attention="sdpa", dtype=torch.float32)
    monkeypatch.setattr(type(old), "_init_weights", init_of_4_57)
    # The vectors of these weights too come from a model of the old kind.
    weights = make_random_weights(config, 0)
    # The backends materialise a model block by block.
    for prefix in ("model.layers.0", "model.layers.1", ""):
        materialise(old, weights, torch.device("cpu"), prefix=prefix)
    buffers, old_buffers = dict(expected.named_buffers()), dict(old.named_buffers())
    assert buffers
    assert buffers.keys() == old_buffers.keys()
    assert all(torch.equal(buffers[name], old_buffers[name]) for name in buffers)
    parameters = dict(new.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in old.named_parameters())


def test_matrices_are_never_filled() -> None:
    built = build_with_values(CONFIGS["rotary"], attention="sdpa", dtype=torch.float32)
    assert {p.is_meta for p in built.parameters() if p.ndim > 1} == {True}
    assert {p.is_meta for p in built.parameters() if p.ndim < 2} == {False}
    assert not any(buffer.is_meta for buffer in built.buffers())
