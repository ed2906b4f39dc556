"""Jobs whose targets are the next tokens already, as nanoGPT's: REPRODUCED with the last target of each row.

About 8 seconds: a recording of a plain GPT in this process, and its replays.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actor_init.action_log_probs import action_log_probs
from actor_init.inputs.packing import find_targets_equal_to_input_tokens, prepare_inputs
from capture import capture_files, recording
from capture.file_format.capture_file import read_call
from capture.file_format.micro_batch import MicroBatch, Origin, with_shift_labels_as_labels
from capture.folder_tools.redact import TokenRedaction, redact_folder
from replay.command_line.cli import main
from replay.tolerances.job_bounds import GRADIENT, LOSS, TOKEN_LOG_PROBS
from tests.custom_models.nano import build
from tests.helpers.children import run_with
from tests.helpers.read_logs import read_log
from tests.helpers.reference import reference_of_a_small_llama
from tests.trainers.common import make_batches, make_model

pytestmark = pytest.mark.usefixtures("one_world")

NUM_STEPS = 2
LENGTH = 32  # nano.py's block_size: no room for one more token


def train(folder: Path, shift: int = 1, kept_as: str = "shift_labels") -> Path:
    """Train at learning rate 0; with another `shift` the loss is of other tokens than the targets that are recorded."""
    torch.manual_seed(0)
    model = build()
    torch.save({"model": model.state_dict()}, folder / "ckpt.pt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(1)
    names = {"idx": "input_ids", "targets": kept_as}
    with recording(model, folder / "captures", reproduce=True, arguments=names):
        for _ in range(NUM_STEPS):
            text_BS = torch.randint(1, 64, (2, LENGTH + 2), generator=generator)
            targets_BS = text_BS[:, 1 : LENGTH + 1].clone()
            targets_BS[0, :4] = -100
            logits, loss = model(text_BS[:, :LENGTH], targets_BS)
            if shift != 1:
                other_BS = text_BS[:, shift : LENGTH + shift].masked_fill(targets_BS == -100, -100)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), other_BS.flatten(), ignore_index=-100)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


def verdict_of(job: Path, logs: Path, *typed: str, reverse_rows: bool = False) -> Any:
    command = ["--inputs", str(job / "captures"), "--weights", str(job / "ckpt.pt")]
    command += ["--model", "tests/custom_models/nano.py:build", "--loss", "sft", "--log-folder", str(logs)]
    assert run_with([*command, *typed, "--quiet"], reverse_rows=reverse_rows) == 0
    (folder,) = logs.iterdir()
    return read_log(folder)[0]["verdict"]


@pytest.mark.parametrize(("backend", "reverse_rows"), [("fsdp2", False), ("ddp", True)])
def test_a_plain_gpt_with_targets_is_reproduced(tmp_path: Path, backend: str, reverse_rows: bool) -> None:
    verdict = verdict_of(train(tmp_path), tmp_path / "logs", "--backend", backend, reverse_rows=reverse_rows)
    assert verdict["outcome"] == "REPRODUCED", verdict
    assert verdict["window_counts"] == {"REPRODUCED": NUM_STEPS}
    assert {finding["name"] for finding in verdict["worst"]} >= {LOSS, TOKEN_LOG_PROBS, GRADIENT}


def test_a_loss_of_other_tokens_than_the_targets_is_not_reproduced(tmp_path: Path) -> None:
    verdict = verdict_of(train(tmp_path, shift=2), tmp_path / "logs", "--backend", "ddp")
    assert verdict["outcome"] != "REPRODUCED"


def test_next_tokens_that_were_recorded_as_labels_are_noticed(tmp_path: Path) -> None:
    verdict = verdict_of(train(tmp_path, kept_as="labels"), tmp_path / "logs", "--backend", "ddp")
    assert verdict["outcome"] == "UNSETTLED", verdict
    said = verdict["open"][0]["doubt"]
    assert "makes each token predict the one after the next. If this one does not shift, record them as" in said


def test_labels_that_were_shifted_before_a_model_shifts_them_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path)
    with recording(model, tmp_path / "captures", reproduce=True):
        for batch in make_batches(1):
            labels_BS = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            model(**{**batch, "labels": labels_BS}).loss.backward()
    command = ["--inputs", str(tmp_path / "captures"), "--model", str(tmp_path / "model"), "--loss", "sft"]
    assert main([*command, "--log-folder", str(tmp_path / "logs"), "--backend", "ddp", "--quiet"]) == 0
    said = "the labels are the next tokens already, and the model shifted them once more"
    assert f"note       labels: {said}: each token predicts the one after the next\n" in capsys.readouterr().out


def shifted(next_BS: Tensor, real_BS: Tensor) -> MicroBatch:
    ids_BS = torch.randint(97, next_BS.shape, generator=torch.Generator().manual_seed(2))
    return MicroBatch(
        sequences_BS=ids_BS,
        attention_mask_BS=real_BS,
        extra_tensors={"shift_labels": next_BS},
        trains=True,
        origin=Origin(source="here"),
    )


@pytest.mark.parametrize("packing", [True, False])
@torch.no_grad()
def test_each_token_predicts_its_own_target(tmp_path: Path, packing: bool) -> None:
    model = reference_of_a_small_llama(tmp_path).model
    model.set_attn_implementation("eager")
    next_BS = torch.tensor([[5, 6, -1, 7, 8], [9, 10, 11, -100, 12]], dtype=torch.int32)  # nanoGPT's -1 is none either
    real_BS = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    batch = shifted(next_BS, real_BS)
    inputs = prepare_inputs(batch, packing=packing)
    found_BA = action_log_probs(model, inputs)
    counts_BS = real_BS & (next_BS >= 0)
    assert torch.equal(inputs.action_mask_BA, counts_BS)
    for row in range(2):
        length = int(real_BS[row].sum())
        alone = model(input_ids=batch.sequences_BS[row : row + 1, :length]).logits[0].log_softmax(-1)
        for column in range(5):
            expected = alone[column, int(next_BS[row, column])] if counts_BS[row, column] else torch.tensor(0.0)
            assert found_BA[row, column].item() == pytest.approx(expected.item(), rel=1e-5)  # fp32, other order


def test_where_a_target_is_another_token_no_log_prob_of_the_rows_own_is_compared() -> None:
    batch = shifted(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool))
    ids = batch.sequences_BS[0].tolist()
    own = shifted(torch.tensor([[ids[1], 96 - ids[2], ids[3], 5]]), batch.attention_mask_BS)
    is_own_BA, first = find_targets_equal_to_input_tokens(own)
    assert (is_own_BA.tolist(), first) == ([[True, False, True, False]], 1)
    labelled = with_shift_labels_as_labels(own)
    assert labelled.labels_BS is not None
    assert labelled.labels_BS.tolist() == [[-100, ids[1], 96 - ids[2], ids[3]]]
    is_own_BA, first = find_targets_equal_to_input_tokens(labelled)
    assert (is_own_BA.tolist(), first) == ([[True, False, True]], 1)


def test_a_redacted_capture_keeps_which_tokens_have_a_target(tmp_path: Path) -> None:
    job = train(tmp_path)
    redact_folder(job / "captures", tmp_path / "redacted", TokenRedaction.PERMUTE)
    [labels_BS, *_] = (read_call(path).micro_batch().shift_labels for path in capture_files(tmp_path / "redacted"))
    assert labels_BS is not None
    assert labels_BS.unique().tolist() == [-100, 0]
    assert (labels_BS == -100).sum() == 4
