"""A recording says what its model is: classes, code, settings, hooks, parameters, and what is put in their place."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from capture import recording
from capture.file_format.model_facts import ModelFacts, read_model_facts
from capture.record.model_facts import collect_model_facts

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.fixture
def attend() -> Iterator[Callable[..., Any]]:
    """torch's attention, which is back after the test."""
    own = F.scaled_dot_product_attention
    yield own
    F.scaled_dot_product_attention = own


def describe(model: nn.Module) -> ModelFacts:
    return collect_model_facts(model, forward=0, trains=True).to_model_facts()


def double_output(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return 2 * output


def double_gradient(gradient: Tensor) -> Tensor:
    return 2 * gradient


def test_equal_layers_are_written_once(model: LlamaForCausalLM) -> None:
    facts = describe(model)
    assert [name for name in facts.modules if "self_attn" in name] == [
        "model.layers.*.self_attn",
        *(f"model.layers.*.self_attn.{letter}_proj" for letter in "qkvo"),
    ]
    attention = facts.modules["model.layers.*.self_attn"]
    assert attention["class"] == "transformers.models.llama.modeling_llama:LlamaAttention"
    assert attention["attributes"] == {
        "layer_idx": "*",
        "head_dim": 8,
        "num_key_value_groups": 2,
        "scaling": 8**-0.5,
        "attention_dropout": 0.0,
        "is_causal": True,
    }
    assert "forward" not in attention
    assert "hooks" not in attention
    assert facts.attention is not None
    assert facts.attention["function"][0] == "transformers.integrations.sdpa_attention:sdpa_attention_forward"
    assert facts.loss_function is not None
    assert facts.loss_function[0] == "transformers.loss.loss_utils:ForCausalLMLoss"
    assert {"apply_rotary_pos_emb", "eager_attention_forward"} <= facts.functions[
        "transformers.models.llama.modeling_llama"
    ].keys()
    assert (facts.patches, facts.tied, facts.wrappers, facts.compiled, facts.frozen) == ({}, [], [], [], [])


def test_the_layer_that_is_another_one_is_named(model: LlamaForCausalLM) -> None:
    layers: Any = model.model.layers
    layers[1].self_attn.scaling = 1.0
    layers[2].mlp.forward = lambda hidden: hidden
    layers[0].forward, layers[1].forward = layers[1].forward, layers[0].forward
    layers[2].self_attn.o_proj.register_forward_hook(double_output)
    layers[2].self_attn.q_proj.weight.register_hook(double_gradient)
    layers[0].mlp.up_proj.weight.requires_grad_(False)
    layers[0].input_layernorm.weight.data = layers[0].input_layernorm.weight.data.bfloat16()
    facts = describe(model)
    scalings = {
        name: values["attributes"]["scaling"] for name, values in facts.modules.items() if name.endswith("self_attn")
    }
    assert scalings == {"model.layers.[0,2].self_attn": 8**-0.5, "model.layers.1.self_attn": 1.0}
    forwards = {name: values["forward"][0] for name, values in facts.modules.items() if "forward" in values}
    assert forwards.pop("model.layers.2.mlp").startswith("test_model_facts.py:")
    assert forwards == {
        "model.layers.0": "the forward of model.layers.1",
        "model.layers.1": "the forward of model.layers.0",
    }
    hooks = {name: values["hooks"] for name, values in facts.modules.items() if "hooks" in values}
    [(name, [[kind, hook, _]])] = hooks.items()
    assert (name, kind) == ("model.layers.2.self_attn.o_proj", "forward hook")
    assert hook == "test_model_facts.py:double_output"
    gradient_hooks = {name: values["hooks"] for name, values in facts.parameters.items() if "hooks" in values}
    [(name, [[kind, hook, _]])] = gradient_hooks.items()
    assert (name, kind) == ("model.layers.2.self_attn.q_proj.weight", "gradient hook")
    assert hook == "test_model_facts.py:double_gradient"
    assert facts.frozen == ["model.layers.0.mlp.up_proj.weight"]
    assert facts.parameters["model.layers.0.input_layernorm.weight"]["dtype"] == "bfloat16"


def test_functions_in_the_place_of_the_librarys_are_named(
    model: LlamaForCausalLM, attend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend_twice(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = attend(*args, **kwargs)
        return 2 * found

    def rotate(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return query, key

    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", rotate)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", lambda self, hidden: hidden)
    F.scaled_dot_product_attention = attend_twice
    model.loss_function = lambda logits, labels, **_: logits.mean()
    facts = describe(model)
    assert list(facts.patches) == ["torch.nn.functional.scaled_dot_product_attention"]
    prefix = "test_model_facts.py:"
    replaced = facts.functions["transformers.models.llama.modeling_llama"]["apply_rotary_pos_emb"]
    assert replaced[0].startswith(prefix)
    assert facts.modules["model.layers.*.mlp"]["forward"][0].startswith(prefix)
    assert facts.loss_function is not None
    assert facts.loss_function[0].startswith(prefix)


def test_tied_weights_and_frequencies_are_stated() -> None:
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    facts = describe(tied)
    assert facts.tied == [["lm_head.weight", "model.embed_tokens.weight"]]
    assert facts.buffers["model.rotary_emb.inv_freq"]["values"] == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)
    tied.lm_head.weight = nn.Parameter(tied.lm_head.weight.detach().clone())
    assert describe(tied).tied == []


def test_wrappers_are_in_no_name(model: LlamaForCausalLM) -> None:
    compiled: Any = torch.compile(model, backend="eager")
    facts = describe(compiled)
    assert facts.modules.keys() == describe(model).modules.keys()
    assert facts.compiled == [""]
    for layer in model.model.layers[:2]:
        layer.compile(backend="eager")
    assert describe(model).compiled == ["model.layers.[0-1]"]


def test_a_recording_writes_the_facts_of_its_first_pass_that_trains(model: LlamaForCausalLM, tmp_path: Path) -> None:
    ids = torch.arange(6)[None]
    with recording(model, tmp_path, reproduce=True):
        model.config.rms_norm_eps = 1e-3
        with torch.no_grad():
            model(input_ids=ids)
        model.lm_head.weight.requires_grad_(False)
        model(input_ids=ids, labels=ids).loss.backward()
        model.model.norm.weight.requires_grad_(False)
        model(input_ids=ids, labels=ids).loss.backward()
    [facts] = read_model_facts(tmp_path)
    assert (facts.rank, facts.forward, facts.trains) == (0, 1, True)
    assert facts.frozen == ["lm_head.weight"]
    assert facts.frozen_later == {"2": ["model.norm.weight", "lm_head.weight"]}
    assert facts.config == {"rms_norm_eps": 1e-3}
    # Hooks of the recorder are none of the job's.
    assert not any("hooks" in values for values in (*facts.modules.values(), *facts.parameters.values()))
    [path] = tmp_path.glob("model_rank0_*.json")
    assert path.stat().st_size < 8192


def test_a_recording_of_rollouts_has_facts_too(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with recording(model, tmp_path, reproduce=True), torch.no_grad():
        model(input_ids=torch.arange(6)[None])
        model(input_ids=torch.arange(6)[None])
    [facts] = read_model_facts(tmp_path)
    assert (facts.forward, facts.trains) == (0, False)


def test_facts_that_cannot_be_taken_cost_a_warning_alone(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no facts today")

    monkeypatch.setattr("capture.record.model_facts.collect_wrapper_facts", fail)
    with warnings.catch_warnings(record=True) as caught, recording(model, tmp_path, reproduce=True) as recorder:
        warnings.simplefilter("always")
        model(input_ids=torch.arange(6)[None])
        model(input_ids=torch.arange(6)[None])
    assert [str(warning.message) for warning in caught] == [
        "capture: what the model is will not be kept: RuntimeError: no facts today"
    ]
    assert recorder.num_written == 2
    assert read_model_facts(tmp_path) == []


def test_no_path_of_the_machine_is_kept(model: LlamaForCausalLM, tmp_path: Path) -> None:
    model.model.layers[0].data_folder = str(tmp_path)
    model.lm_head.register_forward_hook(double_output)
    text = str(describe(model))
    assert "data_folder" not in text
    assert str(Path(__file__).parent) not in text
