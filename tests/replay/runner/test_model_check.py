"""The replay's own model is described as it is built, so that the same model in a job differs in nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from actor_init.backends.ddp import cast_own_weights
from actor_init.model import build_on_meta, find_model, make_trainable, materialise
from actor_init.spec import ActorSpec
from capture import recording
from capture.record.job_facts import find_adapter_configs
from capture.record.model_facts import collect_model_facts
from replay.command_line.cli import main
from replay.runner.model_check import describe_own_model, find_config_differences
from replay.verdict.model_comparison import compare_models
from replay.verdict.model_facts import ModelDifference
from tests.helpers.families import tiny_config, tiny_model
from tests.helpers.read_logs import read_log

FAMILIES = ("llama", "gpt2", "mixtral", "mistral", "gemma", "qwen3", "gpt_oss", "olmo_hybrid", "hunyuan_v1_moe")


def compare(model: Any, *, merged: bool = False) -> list[ModelDifference]:
    """Compare a job's model with a replay's that is built from its config alone, under DDP with fp32 masters."""
    adapters = find_adapter_configs(model)
    captured = json.loads(json.dumps(model.config.to_dict(), default=str))
    source = find_model(ActorSpec(adapter="none" if merged else None), captured, "the job", adapters)
    actor = build_on_meta(source.config, attention="eager", dtype=torch.float32)
    make_trainable(actor, source)
    materialise(actor, source.weights, torch.device("cpu"))
    for module in list(actor.modules()):
        cast_own_weights(module, torch.bfloat16)
    job = collect_model_facts(model, forward=0, trains=True).to_model_facts()
    return compare_models([job], describe_own_model(source, actor, adapters, job))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_job_differs_in_nothing(family: str, dtype: torch.dtype) -> None:
    config = tiny_config(family)
    model = build_on_meta(config, attention="sdpa" if family == "llama" else "eager", dtype=dtype)
    assert compare(tiny_model(config) if dtype is torch.float32 else model) == []


@pytest.mark.parametrize("merged", [False, True], ids=["built", "merged"])
def test_an_adapter_is_compared_with_the_jobs_even_where_it_is_merged_here(merged: bool) -> None:
    model: Any = get_peft_model(
        tiny_model(tiny_config("llama")), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    )
    assert compare(model, merged=merged) == []
    model.base_model.model.model.layers[1].self_attn.q_proj.scaling["default"] = 4.0
    [found] = compare(model, merged=merged)
    assert (found.kind.value, found.where, found.key) == ("attribute", "model.layers.1.self_attn.q_proj", "scaling")
    assert (found.job, found.replay) == ("{'default': 4.0}", "{'default': 2.0}")


def scale_attention(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 1.0


def skip_layer(model: Any) -> None:
    model.model.layers[1].forward = lambda hidden, *_, **__: hidden


def untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def turn_faster(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


@pytest.mark.parametrize(
    ("change", "kind", "where"),
    [
        (scale_attention, "attribute", "model.layers.0.self_attn"),
        (skip_layer, "forward", "model.layers.1"),
        (untie, "tied weights", "lm_head.weight and model.embed_tokens.weight"),
        (turn_faster, "buffer", "model.rotary_emb.inv_freq"),
    ],
)
def test_what_a_job_changed_is_named_at_its_place(change: Callable[[Any], None], kind: str, where: str) -> None:
    model = tiny_model(tiny_config("llama", tie_word_embeddings=True))
    change(model)
    [found] = compare(model)
    assert (found.kind.value, found.where) == (kind, where)


def test_a_config_that_was_changed_as_the_job_ran_is_compared_without_a_model_folder() -> None:
    captured = json.loads(json.dumps(tiny_config("llama").to_dict(), default=str))
    source = find_model(ActorSpec(), captured, "the job")
    assert find_config_differences(ActorSpec(), source, captured, {}) == []
    [found] = find_config_differences(ActorSpec(), source, captured, {"rms_norm_eps": 0.5})
    assert (found.where, found.job, found.replay) == ("rms_norm_eps", "0.5", str(captured["rms_norm_eps"]))


def test_facts_that_cannot_be_read_are_said_and_the_passes_are_replayed(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tiny_config("llama"))
    ids = torch.arange(6)[None]
    with recording(model, tmp_path / "captures", reproduce=True):
        model(input_ids=ids, labels=ids).loss.backward()
    [path] = (tmp_path / "captures").glob("model_rank0_*.json")
    path.write_text("{}")
    command = ["--inputs", str(tmp_path / "captures"), "--loss", "sft", "--backend", "ddp"]
    assert main([*command, "--log-folder", str(tmp_path / "logs")]) == 0
    assert f"job model  not compared: {path.name}: no facts of a model of format 1. Delete" in capsys.readouterr().out
    [log] = (tmp_path / "logs").iterdir()
    run, _ = read_log(log)
    assert run["facts"]["model_problem"].startswith(f"{path.name}: no facts of a model")
    assert run["verdict"]["model_differences"] == []
