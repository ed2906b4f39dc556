"""A mixture of experts whose loss holds its routers' auxiliary loss is not said to differ for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM

from capture import recording
from replay.command_line.cli import main

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "router_aux_loss_coef": 0.5,
    "sliding_window": None,
}


@pytest.mark.parametrize(
    ("in_config", "in_call", "outcome"),
    [(True, {}, "UNSETTLED"), (True, {"output_router_logits": False}, "REPRODUCED"), (False, {}, "REPRODUCED")],
)
def test_the_loss_is_judged_only_without_the_routers(
    in_config: bool, in_call: dict[str, Any], outcome: str, tmp_path: Path, one_world: None
) -> None:
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(MixtralConfig(**SIZES, output_router_logits=in_config))
    model.config.save_pretrained(tmp_path / "model")
    save_file(model.state_dict(), tmp_path / "model" / "model.safetensors")  # not under the names of older releases
    ids_BS = torch.randint(64, (2, 12))
    with recording(model, tmp_path / "captures", reproduce=True):
        model(input_ids=ids_BS, labels=ids_BS, **in_call).loss.backward()
    command = ["--inputs", tmp_path / "captures", "--model", tmp_path / "model", "--log-folder", tmp_path / "logs"]
    main([*map(str, command), "--dtype", "fp32", "--backend", "ddp", "--loss", "sft"])
    [run] = (tmp_path / "logs").glob("*/run.json")
    verdict = json.loads(run.read_text())["verdict"]
    assert verdict["outcome"] == outcome
    assert ("auxiliary loss" in json.dumps(verdict)) is (outcome == "UNSETTLED")
