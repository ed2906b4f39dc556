"""FSDP2 gathers embedding, head and the rest of the root by themselves, and reduces in the dtype that it states."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from actor_init.backends.fsdp2 import FSDP2Backend, find_embedding_and_head
from actor_init.inputs.packing import prepare_inputs
from actor_init.model import ModelSource, build_on_meta
from actor_init.schedule_and_norm import TORCH_DTYPES
from actor_init.spec import ActorSpec, Dtype, ParallelSpec
from actor_init.weights import RandomWeights
from actor_init.world import World
from capture.file_format.capture_file import read_micro_batch
from capture.file_format.listing import capture_files
from capture.record.wrapper_facts import collect_wrapper_facts
from replay.options.spec import find_sample_folder

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


def opened(world: World, **config: Any) -> Any:
    return open_fsdp2_backend(world, **config).model


def open_fsdp2_backend(
    world: World, *, dtype: Dtype = Dtype.FP32, optimizer: str = "auto", **config: Any
) -> FSDP2Backend:
    source = ModelSource(name="tiny", config=LlamaConfig(**TINY | config), weights=RandomWeights(seed=0, std=0.02))
    spec = ActorSpec(backend="fsdp2", dtype=dtype, optimizer=optimizer, packing=True).with_defaults()
    return FSDP2Backend.open(spec, source, world)


@pytest.mark.parametrize(("optimizer", "dtype"), [("adamw", "fp32"), ("none", "bf16")])
def test_gradients_of_fp32_masters_are_reduced_in_fp32(optimizer: str, dtype: str, world: World) -> None:
    """Read from the groups as a recorder reads them. On one rank no number shows it."""
    backend = open_fsdp2_backend(world, dtype=Dtype.BF16, optimizer=optimizer)
    [facts] = collect_wrapper_facts([], list(backend.model.modules()))
    assert (facts["param_dtype"], facts["reduce_dtype"]) == ("bfloat16", {"fp32": "float32", "bf16": "bfloat16"}[dtype])
    assert backend.facts()["reduce_dtype"] == dtype


def list_modules_gathered_with_root(model: LlamaForCausalLM) -> set[str]:
    root: Any = model
    root.unshard()
    return list_gathered_modules(model)


def list_gathered_modules(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}


def test_the_root_s_group_has_neither_embedding_nor_head(world: World) -> None:
    assert list_modules_gathered_with_root(opened(world)) == {"model.norm.weight"}


def test_a_weight_of_both_stays_in_the_root_s_group(world: World) -> None:
    tied = opened(world, tie_word_embeddings=True)
    assert list_modules_gathered_with_root(tied) == {"model.norm.weight", "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("config", "is_apart"),
    [
        (LlamaConfig(**TINY), True),
        (LlamaConfig(**TINY, tie_word_embeddings=True), False),
        (GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, tie_word_embeddings=False), True),
    ],
)
def test_embedding_and_head_are_apart_unless_tied(config: PretrainedConfig, is_apart: bool) -> None:
    model = build_on_meta(config, attention="eager", dtype=TORCH_DTYPES[Dtype.FP32])
    modules = find_embedding_and_head(model)
    expected = (model.get_input_embeddings(), model.get_output_embeddings()) if is_apart else (None, None)
    assert all(module is other for module, other in zip(modules, expected, strict=True))


def test_a_user_s_model_names_neither() -> None:
    assert find_embedding_and_head(nn.Linear(2, 2)) == (None, None)


def test_the_head_stays_gathered_for_a_backward_alone(world: World) -> None:
    backend = open_fsdp2_backend(world, vocab_size=264)
    inputs = prepare_inputs(read_micro_batch(capture_files(find_sample_folder())[0]), packing=True)
    with torch.no_grad():
        backend.forward(inputs, train_mode=False)
    assert "lm_head.weight" not in list_gathered_modules(backend.model)
    log_probs = backend.forward(inputs, train_mode=True)
    assert list_gathered_modules(backend.model) == {"lm_head.weight", "model.norm.weight"}
    backend.backward(-log_probs.mean())
    assert list_gathered_modules(backend.model) == set()
