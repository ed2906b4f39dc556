"""Samples of a job's weights are read at their places once, and what cannot be compared is said."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig

from actor_init.adapters import Adapter
from capture.file_format.optimizer_step import ParameterSamples, Sample
from replay.verdict.weight_check import WeightChecker
from tests.helpers.families import tiny_config

# A tiny model has two layers, 0 and 1.
LAYER_2 = "model.layers.2.self_attn.q_proj.lora_A.default.weight"


def test_a_sampled_place_is_read_once() -> None:
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    read: list[int] = []

    def sample(name: str, shape: object, start: int, count: int) -> torch.Tensor:
        read.append(start)
        return torch.arange(8.0)[start : start + count]

    source = SimpleNamespace(config=config, adapter=None, weights=SimpleNamespace(sample=sample))
    checker = WeightChecker(cast(Any, source))
    for value, differs in ((2.0, False), (7.0, True), (2.0, False)):
        job = Sample(name="model.norm.weight", dtype="float32", shape=(8,), start=2, values=(value, 3.0))
        samples = ParameterSamples(samples=(job,), num_parameters=1, num_frozen=0, is_sharded=False)
        assert bool(checker.check(samples).differing) is differs
    assert checker.read_initial_values(checker.match_to_parameters(samples.samples)) == {
        "model.norm.weight": [2.0, 3.0]
    }
    assert read == [2]


@pytest.mark.parametrize(
    ("adapter", "doubt"),
    [
        (None, "the job had an adapter (1 parameter of its modules), which is not built here. Try: --adapter FOLDER"),
        (
            Adapter(name="default", settings={"r": 2, "target_modules": ["q_proj"]}),
            f"this model has no parameter of the name and shape of the job's {LAYER_2}",
        ),
    ],
)
def test_an_adapter_that_is_built_is_not_said_to_be_missing(adapter: Adapter | None, doubt: str) -> None:
    """Its layers may be missing, under --num-layers."""
    source = SimpleNamespace(config=tiny_config("llama"), adapter=adapter, weights=SimpleNamespace())
    job = Sample(name=LAYER_2, dtype="float32", shape=(2, 64), start=0, values=(0.5,))
    samples = ParameterSamples(samples=(job,), num_parameters=1, num_frozen=0, is_sharded=False)
    assert WeightChecker(cast(Any, source)).check(samples).doubt == doubt
