"""Random weights depend on seed and name alone; a folder's weights are the folder's; tied weights stay tied."""

import copy
import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from actor_init import name_hash
from actor_init.adapters import Adapter
from actor_init.model import (
    ModelVectors,
    build_on_meta,
    count_parameters,
    find_model,
    find_parameter_shapes,
    list_parameter_names,
    materialise,
    share_meta_model,
)
from actor_init.spec import ActorSpec, UsageError
from actor_init.weights import NORM_SPREAD, RandomWeights

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",  # has biases
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CPU = torch.device("cpu")
GOLDEN = "a2941b2a14b53da6122b73bd44c09f7af425e5ccee7ae7d6484ea182297bbf84"


def build_model(spec: ActorSpec, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    source = find_model(spec, config, "test")
    model = build_on_meta(source.config, attention="eager", dtype=dtype)
    materialise(model, source.weights, CPU)
    return model


def copy_state(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value.float() for name, value in model.state_dict().items()}


def test_fewer_layers_leave_the_others_as_they_are() -> None:
    whole, cut = copy_state(build_model(ActorSpec(), CONFIG)), copy_state(build_model(ActorSpec(num_layers=1), CONFIG))
    assert set(cut) < set(whole)
    for name, value in cut.items():
        assert torch.equal(value, whole[name]), name


def test_bf16_weights_are_the_fp32_ones() -> None:
    full, half = (
        copy_state(build_model(ActorSpec(), CONFIG)),
        copy_state(build_model(ActorSpec(), CONFIG, torch.bfloat16)),
    )
    for name, value in half.items():
        assert torch.equal(value, full[name]), name


def test_a_model_that_is_only_looked_at_is_built_once_and_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [find_model(ActorSpec(num_layers=num_layers), CONFIG, "test").config for num_layers in (2, 1)]
    adapter = Adapter(name="default", settings={"r": 2, "target_modules": ["q_proj"]})
    built: list[int] = []

    def build_and_note(config: Any, **settings: Any) -> PreTrainedModel:
        built.append(config.num_hidden_layers)
        return build_on_meta(config, **settings)

    monkeypatch.setattr("actor_init.model.build_on_meta", build_and_note)
    for config in configs:
        theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        shapes = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
        for _ in range(2):
            assert find_parameter_shapes(config) == shapes
            assert list_parameter_names(config) == list(shapes)
            assert count_parameters(config) == sum(map(math.prod, shapes.values()))
            for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):
                vector = ModelVectors(config).make_vector(name)
                assert torch.equal(vector, torch.full(vector.shape, float("norm" in name)))
            assert all(parameter.is_meta for parameter in share_meta_model(config).parameters())
        assert any("lora_A" in name for name in list_parameter_names(config, adapter))
        assert list_parameter_names(config) == list(shapes)
    # Once to look at, and once with the adapter in it.
    assert built == [2, 2, 1, 1]


def test_another_seed_and_another_name_give_other_values() -> None:
    values = torch.empty(3, 64, 64)
    for tensor, (seed, name) in zip(values, ((0, "a"), (1, "a"), (0, "b")), strict=True):
        RandomWeights(seed=seed, std=0.02).fill(name, tensor)
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_every_part_that_is_filled_is_reported() -> None:
    whole, reports = torch.empty(2100, 1000), list[int]()
    RandomWeights(seed=0, std=0.02).fill("a", whole, reports.append)
    assert len(reports) == 3
    assert sum(reports) == whole.numel()


@pytest.mark.parametrize("threads", [1, 2])
def test_values_of_a_name_never_change(threads: int) -> None:
    """Captures and logs name them "random v2": the digest is of the first release that did."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = torch.empty(1100, 1000)
        RandomWeights(seed=7, std=0.02).fill("model.layers.0.mlp.up_proj.weight", values)
    finally:
        torch.set_num_threads(before)
    assert hashlib.sha256(values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()).hexdigest() == GOLDEN


@pytest.mark.parametrize("first", [0, 2**22, 2**32 - 2**22, 2**32, 5 * 2**32 + 2**23])
def test_32_bits_give_what_64_bits_define(first: int) -> None:
    """On a CPU, and as on another device, which this test runs on the CPU too."""
    keys, count = (0x9E3779B9, 0x7F4A7C15), 3 * 2**15 + 5
    expected = name_hash.compute_values(torch.arange(first, first + count), keys, 0.02)
    filled = torch.empty(count)
    name_hash.fill_on_cpu(filled, first, keys, 0.02)
    assert torch.equal(filled, expected.to(torch.bfloat16).float())
    assert torch.equal(name_hash.compute_on_device(first, count, CPU, keys, 0.02), expected)


def test_every_module_that_is_filled_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_model(ActorSpec(), CONFIG, "test")
    model = build_on_meta(source.config, attention="sdpa", dtype=torch.float32)
    reports: list[int] = []
    monkeypatch.setattr(RandomWeights, "fill", lambda *_: False)
    materialise(model, source.weights, CPU, on_progress=reports.append)
    # Each block has nine linear layers and norms.
    assert len(reports) >= 3 * 9


def test_values_are_uniform_with_the_config_s_deviation() -> None:
    values = torch.empty(1000, 1000)
    RandomWeights(seed=3, std=0.02).fill("x", values)
    # 5 standard errors of 0.02 / 1000.
    assert values.mean().item() == pytest.approx(0, abs=1e-4)
    assert values.std().item() == pytest.approx(0.02, rel=2e-3)
    assert values.abs().max().item() == pytest.approx(0.02 * math.sqrt(3), rel=1e-2)
    neighbours = torch.corrcoef(torch.stack([values.flatten()[:-1], values.flatten()[1:]]))[0, 1]
    assert abs(neighbours.item()) < 5e-3


def test_norms_lie_around_1_and_biases_around_0() -> None:
    values = copy_state(build_model(ActorSpec(), CONFIG))
    norm, bias = values["model.norm.weight"], values["model.layers.0.self_attn.q_proj.bias"]
    assert norm.mean().item() == pytest.approx(1, abs=5 * NORM_SPREAD / 32**0.5)
    assert norm.std().item() == pytest.approx(NORM_SPREAD, rel=0.3)
    assert bias.mean().item() == pytest.approx(0, abs=5 * 0.02 / 32**0.5)
    assert bias.std().item() == pytest.approx(0.02, rel=0.3)
    assert not torch.equal(bias, values["model.layers.1.self_attn.q_proj.bias"])


@pytest.mark.parametrize(
    ("model_type", "sizes", "name", "low", "high"),
    [
        ("gemma2", {"head_dim": 8}, "model.norm.weight", -0.04, 0.04),  # multiplies by 1 + weight
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 2}, "model.layers.1.self_attn.sinks", -0.2, 0.2),
        ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1}, "backbone.layers.1.mixer.dt_bias", -7.6, -2.0),
        ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1}, "backbone.layers.0.mixer.A_log", -0.1, 2.3),
    ],
)
def test_vectors_that_are_no_norms_keep_the_range_of_the_model_s_init_and_are_the_same_each_time(
    model_type: str, sizes: dict[str, Any], name: str, low: float, high: float
) -> None:
    """Some of these inits draw at random: another state of the generator gives the same values."""
    config = {**CONFIG, "model_type": model_type, **sizes}
    torch.manual_seed(1)
    first = copy_state(build_model(ActorSpec(), config))
    torch.manual_seed(2)
    half = copy_state(build_model(ActorSpec(), config, torch.bfloat16))
    assert low < first[name].min() <= first[name].max() < high
    for name, value in half.items():
        assert torch.equal(value, first[name]), name


def test_samples_are_the_values_that_a_model_gets_vectors_too() -> None:
    source = find_model(ActorSpec(), CONFIG, "test")
    for name, value in copy_state(build_model(ActorSpec(), CONFIG)).items():
        shape = tuple(value.shape)
        sample = source.weights.sample(name, shape, 3, 5)
        assert sample is not None
        assert torch.equal(sample, value.flatten()[3:8]), name


def test_rotary_frequencies_are_hugging_face_s() -> None:
    source = find_model(ActorSpec(), CONFIG, "test")
    plain = AutoModelForCausalLM.from_config(source.config)
    model = build_model(ActorSpec(), CONFIG)
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)


def test_tied_embeddings_stay_one_parameter() -> None:
    model = build_model(ActorSpec(), {**CONFIG, "tie_word_embeddings": True})
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def saved(folder: Path, config: dict[str, Any]) -> PreTrainedModel:
    source = find_model(ActorSpec(), config, "test")
    torch.manual_seed(5)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(source.config)
    # It makes several files.
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


# Ten experts and more have names whose order as text is another one.
MANY_EXPERTS = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


@pytest.mark.parametrize(
    "config",
    [CONFIG | {"tie_word_embeddings": True}, CONFIG | {"tie_word_embeddings": False}, MANY_EXPERTS],
    ids=["tied", "not tied", "twelve experts"],
)
def test_a_folder_s_weights_are_loaded(tmp_path: Path, config: dict[str, Any]) -> None:
    model = saved(tmp_path, config)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = copy_state(build_model(ActorSpec(model=str(tmp_path)), {}))
    for name, value in copy_state(model).items():
        assert torch.equal(loaded[name], value), name


def test_random_weights_pass_over_a_folder_s(tmp_path: Path) -> None:
    saved(tmp_path, CONFIG)
    values = copy_state(build_model(ActorSpec(model=str(tmp_path), random_weights=True), {}))
    assert torch.equal(values["lm_head.weight"], copy_state(build_model(ActorSpec(), CONFIG))["lm_head.weight"])


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, CONFIG)
    with pytest.raises(UsageError, match="no weights named"):
        build_model(ActorSpec(model=str(only(tmp_path, "config.json", 1))), {})
    next(tmp_path.glob("*.safetensors")).write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(UsageError, match="cannot be read"):
        build_model(ActorSpec(model=str(tmp_path)), {})


def only(folder: Path, config: str, num_files: int) -> Path:
    """A folder with the config and the first weight files of `folder`."""
    part = folder / "part"
    part.mkdir()
    for path in [folder / config, *sorted(folder.glob("*.safetensors"))[:num_files]]:
        (part / path.name).write_bytes(path.read_bytes())
    return part


def test_a_buffer_that_no_init_sets_comes_from_the_folder_or_is_refused(tmp_path: Path) -> None:
    # The activation of apertus has buffers.
    config = {**CONFIG, "model_type": "apertus"}
    with pytest.raises(UsageError, match=r"does not say what model.layers.0.mlp.act_fn.\w+ holds"):
        build_model(ActorSpec(), config)
    fields = {name: value for name, value in config.items() if name != "model_type"}
    saved = AutoModelForCausalLM.from_config(AutoConfig.for_model("apertus", **fields))
    saved.save_pretrained(tmp_path)
    expected = {name: value.float() for name, value in saved.state_dict().items()}
    assert any("act_fn" in name for name in expected)
    loaded = copy_state(build_model(ActorSpec(model=str(tmp_path)), {}))
    assert loaded.keys() == expected.keys()
    for name, value in loaded.items():
        assert torch.equal(value, expected[name]), name
