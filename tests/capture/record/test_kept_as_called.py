"""Batches of every kind that trainers make are kept as they were called; what cannot be replayed says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from capture import CaptureError, MicroBatch, Origin, capture_files, read_micro_batch, recording, write_call
from capture.cli import main
from capture.file_format.capture_file import read_call
from replay.command_line.cli import main as replay_main

IDS_BS = torch.tensor([[3, 5, 9, 7, 8, 2], [3, 3, 4, 1, 6, 2]])
EMBEDDINGS_BSH = torch.linspace(0, 1, 2 * 6 * 8).view(2, 6, 8)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def make_flattened_arguments() -> dict[str, Any]:
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=False)
    features = [{"input_ids": row, "labels": row} for row in ([4, 5, 6], [7, 8], [9, 1, 2, 3])]
    made: dict[str, Any] = dict(collate(features))
    return made


CALLS: dict[str, dict[str, Any]] = {
    "labels": {"input_ids": IDS_BS, "labels": IDS_BS.masked_fill(IDS_BS == 3, -100)},
    "position ids": {"input_ids": IDS_BS, "position_ids": torch.arange(6).expand(2, 6) + 2},
    "positions that start again": {"input_ids": IDS_BS[:1], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]])},
    "a packing collator's": make_flattened_arguments(),
    "embeddings": {"inputs_embeds": EMBEDDINGS_BSH, "attention_mask": torch.ones(2, 6), "labels": IDS_BS},
    "embeddings in bf16": {"inputs_embeds": EMBEDDINGS_BSH[:1].bfloat16()},
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_is_kept_as_it_was(kind: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    called = CALLS[kind]
    with recording(model.to(called.get("inputs_embeds", torch.ones(1)).dtype), tmp_path) as recorder:
        model(**called)
    assert (recorder.num_written, recorder.num_dropped) == (1, 0)
    kept = read_call(capture_files(tmp_path)[0])
    tensors = {name: value for name, value in called.items() if isinstance(value, torch.Tensor)}
    assert kept.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert kept.tensors[name].dtype == tensor.dtype
        assert torch.equal(kept.tensors[name], tensor)
    assert {name: value for name, value in called.items() if name not in tensors} == dict(kept.call_facts)
    assert kept.left_out == {}
    assert main(["check", str(tmp_path)]) == 0


def test_a_packing_collators_borders_are_what_they_are_called_here() -> None:
    """The names that `actor_init.inputs.documents` reads."""
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "position_ids"} < CALLS["a packing collator's"].keys()


def test_embeddings_are_not_replayed_and_every_reader_says_why(
    model: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str], one_world: None
) -> None:
    source = tmp_path / "in"
    with recording(model.float(), source):
        model(**CALLS["embeddings"])
        model(**CALLS["labels"])
    with pytest.raises(CaptureError, match="called with inputs_embeds, without token ids"):
        read_micro_batch(capture_files(source)[0])
    assert main(["redact", str(source), str(tmp_path / "out")]) == 1
    assert "called with inputs_embeds" in capsys.readouterr().out
    arguments = ["--inputs", str(source), "--quiet", "--optimizer", "none", "--zero-stage", "0"]
    assert replay_main([*arguments, "--log-folder", str(tmp_path / "logs")]) == 0
    out = capsys.readouterr().out
    assert "1 capture cannot be replayed" in out
    assert "damaged" not in out
    assert replay_main(["inspect", str(source)]) == 0
    out = capsys.readouterr().out
    assert "1 that cannot be replayed" in out
    assert "1 capture cannot be replayed" in out
    assert "damaged" not in out
    assert main(["check", str(source)]) == 0
    assert "1 of them cannot be replayed: actor_inputs" in capsys.readouterr().out
    alone = ["--input-file", str(capture_files(source)[0])]
    assert replay_main([*arguments[2:], *alone, "--log-folder", str(tmp_path / "logs")]) == 2
    assert "nothing to replay: 1 capture cannot be replayed" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "tensors",
    [
        {"inputs_embeds": IDS_BS},
        {"inputs_embeds": EMBEDDINGS_BSH[0]},
        {"inputs_embeds": EMBEDDINGS_BSH[:0]},
        {"inputs_embeds": EMBEDDINGS_BSH, "labels": IDS_BS[:, :3]},
        {"inputs_embeds": EMBEDDINGS_BSH, "attention_mask": IDS_BS},
    ],
)
def test_embeddings_that_fit_nothing_are_refused(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(CaptureError):
        write_call(tmp_path, tensors, {}, trains=True, origin=Origin(source=""))
    assert list(tmp_path.iterdir()) == []


def test_a_micro_batch_still_has_token_ids() -> None:
    with pytest.raises(TypeError):
        MicroBatch(trains=True, origin=Origin(source=""))  # type: ignore[call-arg]
