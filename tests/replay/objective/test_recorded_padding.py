"""The job's loss may weigh a target that is padding: the first one behind a row, where its mask is not shifted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from capture import recording
from replay.command_line.cli import main
from tests.helpers.families import tiny_config, tiny_model


@pytest.mark.parametrize("layout", [(), ("--no-packing",)])
def test_a_target_of_padding_has_its_weight_in_the_replay(
    layout: tuple[str, ...], tmp_path: Path, one_world: None
) -> None:
    """The loss of the job, by torch's cross entropy, is that of the replay, and so is its gradient."""
    torch.manual_seed(0)
    model: Any = tiny_model(tiny_config("llama"))
    model.save_pretrained(tmp_path / "model")
    ids_BS = torch.randint(3, 60, (3, 12))
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[0, 8:], mask_BS[1, 10:] = 0, 0
    ids_BS[mask_BS == 0] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, tmp_path / "captures", reproduce=True):
        logits_BSV = model(input_ids=ids_BS, attention_mask=mask_BS).logits[:, :-1]
        losses = F.cross_entropy(logits_BSV.transpose(1, 2), ids_BS[:, 1:], reduction="none")
        loss = (losses * mask_BS[:, :-1]).sum() / mask_BS[:, :-1].sum()
        loss.backward()
        optimizer.step()
    command = ["--inputs", tmp_path / "captures", "--model", tmp_path / "model", "--log-folder", tmp_path / "logs"]
    main([*map(str, command), "--dtype", "fp32", "--backend", "ddp", *layout])
    [run] = (tmp_path / "logs").glob("*/run.json")
    verdict = json.loads(run.read_text())["verdict"]
    line = json.loads((run.parent / "rank0.jsonl").read_text().splitlines()[0])
    assert verdict["outcome"] == "REPRODUCED"
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
