"""Training passes that a recording could not keep are counted, and a replay says that they are missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from capture import recording
from capture.file_format.end_record import count_not_recorded
from replay.command_line.cli import main as replay_main
from tests.trainers.common import make_batches, make_model

GIVEN_A_CACHE = "2 training passes given a cache of earlier tokens"


def train_with_caches(folder: Path, *, only_second_halves: bool = False) -> Path:
    """Three steps with a cache: of whole rows once, then of their first tokens and of the rest, which sees the first.

    only_second_halves  the first tokens are not a pass of their own: the cache is filled with autograd off
    """
    model: Any = make_model(folder).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, folder / "captures", reproduce=True):
        for number, batch in enumerate(make_batches()):
            cache = DynamicCache(config=model.config)
            if number == 0 and not only_second_halves:
                loss = model(**batch, past_key_values=cache, use_cache=True).loss
            else:
                first, rest = ({name: tensor[:, part] for name, tensor in batch.items()} for part in _HALVES)
                with torch.set_grad_enabled(not only_second_halves):
                    loss = model(**first, past_key_values=cache, use_cache=True).loss
                rest["attention_mask"] = batch["attention_mask"]
                loss = loss + model(**rest, past_key_values=cache, use_cache=True).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return folder


_HALVES = slice(0, 5), slice(5, None)


def test_a_pass_with_an_empty_cache_is_replayed_and_one_with_a_full_cache_is_said_to_be_missing(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = train_with_caches(tmp_path)
    typed = ["--inputs", str(job / "captures"), "--model", str(job / "model"), "--loss", "sft", "--dtype", "fp32"]
    assert replay_main([*typed, "--backend", "fsdp2", "--log-folder", str(tmp_path / "logs")]) == 0
    summary = capsys.readouterr().out.partition("verdict    REPRODUCED (1 of 3 passes)\n")[2]
    assert f"missing    {GIVEN_A_CACHE}; no replay could make them" in summary
    [run] = (tmp_path / "logs").glob("*/run.json")
    assert json.loads(run.read_text())["inputs"]["not_recorded"] == {"given a cache of earlier tokens": 2}
    assert replay_main(["inspect", str(job / "captures")]) == 0
    assert f"missing    {GIVEN_A_CACHE}" in capsys.readouterr().out


def test_a_folder_without_a_capture_says_which_passes_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captures = train_with_caches(tmp_path, only_second_halves=True) / "captures"
    assert count_not_recorded(captures) == {"given a cache of earlier tokens": 3}
    assert replay_main(["--inputs", str(captures)]) == 2
    assert "holds no captures. Missing: 3 training passes given a cache" in capsys.readouterr().err
    assert replay_main(["inspect", str(captures)]) == 0
    assert "missing    3 training passes given a cache" in capsys.readouterr().out
