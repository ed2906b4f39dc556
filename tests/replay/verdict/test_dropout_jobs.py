"""The verdict on sound jobs with dropout: at the defaults their masks are drawn again, and every number is judged."""

from pathlib import Path
from typing import Any

import pytest
import torch

from capture import recording
from tests.broken_jobs.models import make_model
from tests.replay.verdict.test_faults import DROPOUT, headline, train, verdict_on
from tests.trainers.common import make_batches


def test_a_part_in_eval_mode_is_so_in_the_replay_and_checkpointing_draws_no_other_masks(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = make_model("gpt2", DROPOUT)
    model.gradient_checkpointing_enable()
    job = train(tmp_path / "job", model, fault=lambda trained: trained.transformer.h[1].eval())
    verdict = verdict_on(job, tmp_path / "logs", "--dtype", "fp32")
    assert (verdict["counts"], verdict["window_counts"]) == ({"REPRODUCED": 2}, {"REPRODUCED": 2})
    printed = capsys.readouterr().out
    assert "mode       another one than the model's, as in the job: transformer.h.1\n" in printed
    assert "fp32, padded" in printed


def test_what_is_wrong_in_passes_that_are_not_replayed_and_in_positions_is_a_note(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rollout in training mode; learned positions that count the padding on the left."""
    model: Any = make_model("gpt2", DROPOUT).train()
    model.save_pretrained(tmp_path / "model")
    with recording(model, tmp_path / "captures", reproduce=True):
        for batch in make_batches(2):
            left = {name: tensor.flip(1) for name, tensor in batch.items()}
            left["labels"][:, :3] = -100
            with torch.no_grad():
                model(**left)
            model(**left).loss.backward()
    verdict = verdict_on(tmp_path, tmp_path / "logs", "--dtype", "fp32")
    assert verdict["counts"] == {"REPRODUCED": 2}
    notes = [line.removeprefix("note").strip() for line in capsys.readouterr().out.splitlines() if line[:4] == "note"]
    [positions] = [note for note in notes if note.startswith("positions: ")]
    assert "counts the padding of 2 rows padded on the left" in positions
    [dropout] = [note for note in notes if note.startswith("dropout: ")]
    assert "2 of 2 that were read" in dropout


def test_masks_of_packed_rows_are_drawn_again(tmp_path: Path, one_world: None) -> None:
    model: Any = make_model("llama", {"attention_dropout": 0.3}).train()
    model.save_pretrained(tmp_path / "model")
    with recording(model, tmp_path / "captures", reproduce=True):
        for batch in make_batches(2):
            rows = [row[mask.bool()] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
            ids_1T = torch.cat(rows)[None]
            positions_1T = torch.cat([torch.arange(len(row)) for row in rows])[None]
            # A document's first token is predicted by the document before it.
            labels_1T = ids_1T.masked_fill(positions_1T == 0, -100)
            model(input_ids=ids_1T, position_ids=positions_1T, labels=labels_1T).loss.backward()
    verdict = verdict_on(tmp_path, tmp_path / "logs", "--dtype", "fp32")
    assert verdict["counts"] == {"REPRODUCED": 2}


def test_masks_of_an_adapter_are_drawn_again(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    model: Any = make_model("llama", {})
    model.save_pretrained(tmp_path / "model")
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.5, "init_lora_weights": False}
    trained = peft.get_peft_model(model, peft.LoraConfig(**settings)).train()
    trained.save_pretrained(tmp_path / "adapter")
    with recording(trained, tmp_path / "captures", reproduce=True):
        for batch in make_batches(2):
            trained(**batch).loss.backward()
    verdict = verdict_on(tmp_path, tmp_path / "built", "--dtype", "fp32", "--adapter", str(tmp_path / "adapter"))
    assert verdict["counts"] == {"REPRODUCED": 2}
    capsys.readouterr()
    verdict = verdict_on(tmp_path, tmp_path / "without", "--dtype", "fp32", "--adapter", "none")
    assert verdict["counts"] == {"CANNOT TELL": 2}
    assert "the job's adapter has dropout, and is not built here" in headline(capsys.readouterr().out)
