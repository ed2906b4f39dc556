"""A job's adapter is built as PEFT has it: the same logits, and the same parameters are trained.

About 4 seconds.
"""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from actor_init.adapters import Adapter, add_adapter, list_trained_parameters, read_adapter
from actor_init.model import ModelSource, build_on_meta, find_model, list_broken_ties, materialise
from actor_init.spec import ActorSpec, Dtype, UsageError
from tests.helpers.families import tiny_config, tiny_model

CPU = torch.device("cpu")
IDS_BS = torch.arange(3, 15).view(2, 6)
CONFIGS: dict[str, dict[str, Any]] = {
    "LoRA": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
    "DoRA": {"r": 2, "target_modules": ["v_proj"], "use_dora": True},
    "rank-stabilised, of one layer, with the head": {
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["o_proj"],
        "layers_to_transform": [1],
        "modules_to_save": ["lm_head"],
    },
    "of experts, whose matrices are parameters": {
        "r": 2,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


def build_model(source: ModelSource) -> Any:
    model = build_on_meta(source.config, attention="eager", dtype=torch.float32)
    add_adapter(model, source.adapter)
    materialise(model, source.weights, CPU)
    return model.eval()


def list_trained_names(model: nn.Module) -> set[str]:
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name.removeprefix("base_model.model.") for name in trained}


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_adapter_is_as_in_the_job(kind: str, tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe" if "target_parameters" in CONFIGS[kind] else "llama")
    base = tiny_model(config)
    base.save_pretrained(tmp_path / "base")
    theirs = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **CONFIGS[kind]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            # B begins at 0, where the adapter changes nothing.
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(tmp_path / "adapter")
    spec = ActorSpec(model=str(tmp_path / "base"), adapter=str(tmp_path / "adapter"), dtype=Dtype.FP32)
    ours = build_model(find_model(spec, None, ""))
    with torch.no_grad():
        expected, alone = theirs.eval()(input_ids=IDS_BS).logits, base.eval()(input_ids=IDS_BS).logits
        torch.testing.assert_close(ours(input_ids=IDS_BS).logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, alone, atol=1e-3)
    assert list_trained_names(ours) == list_trained_names(theirs)
    assert len(list_trained_parameters(ours)) == len(list_trained_names(theirs))


def test_a_tied_embedding_that_is_trained_whole_is_tied_as_in_the_job(tmp_path: Path) -> None:
    """The head is the trained copy, and its gradient has the head's part. PEFT changes no list of ours."""
    config = tiny_config("llama", tie_word_embeddings=True)
    base = tiny_model(config)
    base.save_pretrained(tmp_path / "base")
    settings = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True}
    theirs = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **copy.deepcopy(settings)))
    theirs.save_pretrained(tmp_path / "adapter")
    spec = ActorSpec(model=str(tmp_path / "base"), adapter=str(tmp_path / "adapter"), dtype=Dtype.FP32)
    source = find_model(spec, None, "")
    ours = build_model(source)
    assert ours.get_input_embeddings().weight is ours.get_output_embeddings().weight
    gradients = []
    for model in (theirs.eval(), ours):
        model(input_ids=IDS_BS, labels=IDS_BS).loss.backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    assert source.adapter is not None
    assert list_broken_ties(config, source.adapter) == []
    assert source.adapter.describe_training() == (
        "model.embed_tokens trained whole with what is tied to it; the rest is frozen"
    )
    in_job = Adapter.from_configs({"default": settings | {"peft_type": "LORA"}}, "captures")
    add_adapter(build_on_meta(config, attention="eager", dtype=torch.float32), in_job)
    assert in_job.settings["modules_to_save"] == ["lm_head"]


@pytest.mark.parametrize(
    ("whole", "targets", "trained", "others"),
    [
        (["lm_head"], ["q_proj"], ["lm_head"], ["model.embed_tokens"]),
        (["embed_tokens"], ["q_proj"], ["model.embed_tokens"], ["lm_head"]),
        (["lm_head", "embed_tokens"], ["q_proj"], ["model.embed_tokens", "lm_head"], []),
        (None, ["q_proj", "lm_head"], ["lm_head"], ["model.embed_tokens"]),
    ],
)
def test_a_broken_tie_is_found_and_peft_warns_of_none(
    whole: list[str] | None, targets: list[str], trained: list[str], others: list[str]
) -> None:
    adapter = Adapter(name="default", settings={"r": 2, "target_modules": targets, "modules_to_save": whole})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = list_broken_ties(tiny_config("llama", tie_word_embeddings=True), adapter)
    assert found == [(trained, others)]
    assert list_broken_ties(tiny_config("llama", tie_word_embeddings=False), adapter) == []


def test_what_an_adapter_does_to_a_tied_model_is_not_told_where_it_leaves_the_tie() -> None:
    adapter = Adapter(name="default", settings={"r": 2, "target_modules": ["q_proj"]})
    assert list_broken_ties(tiny_config("llama", tie_word_embeddings=True), adapter) == []
    assert adapter.describe_training() == "the rest is frozen"


def test_matrices_that_tied_layers_share_are_refused() -> None:
    adapter = Adapter(
        name="default", settings={"r": 2, "target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    )
    model = build_on_meta(tiny_config("llama", tie_word_embeddings=True), attention="eager", dtype=torch.float32)
    with pytest.raises(UsageError, match=r"shares its matrices between tied layers \(ensure_weight_tying\)"):
        add_adapter(model, adapter)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3, which is not built here; LoRA and DoRA are. Try: adapter='none'"),
        ({"peft_type": "LORA", "r": 4, "bias": "all"}, "an adapter with bias, which is not built here"),
    ],
)
def test_other_kinds_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=message):
        read_adapter(tmp_path, "default")


def test_several_adapters_and_a_folder_without_one_are_refused(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4}
    with pytest.raises(UsageError, match=r"has 2 adapters \(first, second\), and one can be built"):
        Adapter.from_configs({"first": config, "second": config}, "captures")
    with pytest.raises(UsageError, match=r"adapter_config.json: No such file or directory. Give a folder with"):
        read_adapter(tmp_path, "default")


def test_modules_that_the_model_has_not_are_refused() -> None:
    config = tiny_config("llama")
    model = build_on_meta(config, attention="eager", dtype=torch.float32)
    adapter = Adapter(name="default", settings={"r": 2, "target_modules": ["not_there"]})
    with pytest.raises(UsageError, match="peft refuses the LoRA of rank 2 on not_there"):
        add_adapter(model, adapter)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "the rest is frozen"),
        ({"modules_to_save": ["lm_head", "norm"]}, "lm_head, norm trained whole; the rest is frozen"),
        # PEFT adds the whole name of what it ties to a module that was named by its end.
        (
            {"modules_to_save": ["lm_head", "embed_tokens", "model.embed_tokens"], "ensure_weight_tying": True},
            "lm_head, embed_tokens trained whole with what is tied to it; the rest is frozen",
        ),
    ],
)
def test_each_module_that_is_trained_whole_is_named_once(settings: dict[str, Any], words: str) -> None:
    assert Adapter(name="default", settings=settings).describe_training() == words
