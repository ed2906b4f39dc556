"""A replay packs what its model keeps apart, and pads the rest by itself; so the job is reproduced."""

import json
from pathlib import Path
from typing import Any

import pytest

from capture import recording
from replay.command_line.cli import main
from tests.helpers.each_alone import batch
from tests.helpers.families import tiny_config, tiny_model


def record_rows(family: str, folder: Path) -> list[str]:
    """Record a pass of rows that are padded on both sides, and return the arguments that replay it."""
    model: Any = tiny_model(tiny_config(family), "sdpa" if family != "mamba" else "eager").train()
    model.save_pretrained(folder / "model")
    ids_BS, real_BS = batch().sequences_BS, batch().attention_mask_BS
    # A job would predict the first token of a row from padding.
    is_first_BS = real_BS & (real_BS.cumsum(dim=1) == 1)
    labels_BS = ids_BS.masked_fill(~real_BS | is_first_BS, -100)
    with recording(model, folder / "captures", reproduce=True):
        model(input_ids=ids_BS, attention_mask=real_BS.long(), labels=labels_BS, use_cache=False).loss.backward()
    command = ["--inputs", folder / "captures", "--model", folder / "model", "--log-folder", folder / "logs"]
    return [*map(str, command), "--dtype", "fp32", "--backend", "ddp", "--loss", "sft"]


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("llama", "packed"),
        ("falcon", "packed, documents kept apart by a mask (its own masks do not see where one begins)"),
        ("mamba", "padded on the right, a document a row (packed documents of mamba see each other: "),
    ],
)
def test_a_job_is_reproduced_with_rows_that_its_model_keeps_apart(
    family: str, rows: str, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(record_rows(family, tmp_path)) == 0
    [run] = (tmp_path / "logs").glob("*/run.json")
    written = json.loads(run.read_text())
    assert written["facts"]["rows"].startswith(rows)
    assert written["spec"]["actor"]["packing"] is rows.startswith("packed")
    assert written["verdict"]["outcome"] == "REPRODUCED"
    assert rows in capsys.readouterr().out


def test_packing_that_was_typed_is_refused_in_a_line(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*record_rows("mamba", tmp_path), "--packing"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("replay: ")]
    assert line.startswith("replay: --packing: packed documents of mamba see each other")
    assert "Try: --no-packing" in line
    assert not list((tmp_path / "logs").glob("*"))
