"""The config of --model is held against the job's, and what computes otherwise is said before the first pass."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from capture import recording
from replay.command_line.cli import main
from tests.helpers.read_logs import read_log
from tests.trainers.common import make_batches

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pass of a mixture, whose job set what a loop sets, and its weights."""
    home = tmp_path_factory.mktemp("job")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, norm_topk_prob=True, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(home / "model")
    model.config.use_cache = False
    model.config.pad_token_id = 0
    model.config._name_or_path = "somewhere/else"
    [batch] = make_batches(1)
    with recording(model, home / "captures", reproduce=True):
        model(**batch).loss.backward()
    return home


def replay_job(job: Path, logs: Path, *typed: str, **changes: Any) -> dict[str, Any]:
    """run.json of a replay from the job's weights, with other settings in the folder's config."""
    folder = logs / "model"
    folder.mkdir(parents=True)
    for path in (job / "model").iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((job / "model" / "config.json").read_text()) | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    command = ["--inputs", str(job / "captures"), "--model", str(folder), "--loss", "sft", "--backend", "fsdp2"]
    assert main([*command, *typed, "--log-folder", str(logs / "logs")]) == 0
    [log] = (logs / "logs").iterdir()
    return read_log(log)[0]


def test_what_computes_otherwise_is_named_before_the_first_pass(
    job: Path, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    rope = {"rope_theta": 5000.0, "rope_type": "default"}
    run = replay_job(job, tmp_path, rope_parameters=rope, norm_topk_prob=False)
    said = "norm_topk_prob True in the job, False here; rope_parameters.rope_theta 10000.0 in the job, 5000.0 here"
    header = capsys.readouterr().out.partition("pass 1 of 1")[0].splitlines()
    assert sorted(run["facts"]["config_differences"].split("; ")) == said.split("; ")
    assert f"config     other than the job's: {run['facts']['config_differences']}" in header
    assert run["verdict"]["outcome"] == "DIFFERS"
    differences = run["verdict"]["model_differences"]
    # Causes come first.
    assert {(found["kind"], found["where"]) for found in differences[:2]} == {
        ("config", "rope_parameters.rope_theta"),
        ("config", "norm_topk_prob"),
    }
    # The job computes with what its config says.
    assert ("buffer", "model.rotary_emb.inv_freq") in [(found["kind"], found["where"]) for found in differences]


def test_nothing_is_said_of_names_tokens_dtypes_and_layers_that_are_left_out(
    job: Path, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {"architectures": ["Other"], "dtype": "bfloat16", "eos_token_id": 3, "transformers_version": "5.0.0"}
    run = replay_job(job, tmp_path / "whole", "--dtype", "fp32", **others)
    assert run["verdict"]["outcome"] == "REPRODUCED"
    assert run["verdict"]["model_differences"] == []
    cut = replay_job(job, tmp_path / "cut", "--num-layers", "1")
    assert {"config_differences"} & {*run["facts"], *cut["facts"]} == set()
    assert "other than the job's: " not in capsys.readouterr().out.partition("recorded")[0]


def test_of_another_model_the_first_settings_are_named(
    job: Path, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = {"model_type": "llama", **{key: value for key, value in SIZES.items() if "expert" not in key}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**llama, "hidden_act": "gelu", "rms_norm_eps": 1e-5, "attention_bias": True}))
    command = ["--inputs", str(job / "captures"), "--model", str(path), "--loss", "sft", "--backend", "fsdp2"]
    assert main([*command, "--log-folder", str(tmp_path / "logs")]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("config ")]
    assert line.startswith("config     other than the job's: model_type qwen3_moe in the job, llama here; ")
    assert line.endswith("; and 1 more, in run.json")
