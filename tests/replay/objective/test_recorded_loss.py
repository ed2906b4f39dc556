"""Jobs that compute their loss from the model's logits, recorded without a note: their gradients are judged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capture import capture_files, recording
from capture.file_format.capture_file import read_call
from capture.folder_tools.redact import TokenRedaction, redact_folder
from replay.command_line.cli import main
from tests.trainers.common import make_model

pytestmark = pytest.mark.usefixtures("one_world")

NUM_STEPS, NUM_PASSES = 2, 2
IGNORED = -100
Loss = Callable[[Tensor, Tensor], Tensor]


def compute_cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), labels_BS[:, 1:].flatten())


def compute_mean_over_padding(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    logits, labels = logits_BSV[:, :-1].flatten(0, 1).float(), labels_BS[:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="none").mean()


def compute_sum_of_step(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return NUM_PASSES * compute_cross_entropy(logits_BSV, labels_BS)


def compute_policy_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Clip the ratio of each token, with advantages that differ from row to row and an estimate of the KL."""
    is_action_BS = labels_BS[:, 1:] != IGNORED
    log_probs_BS = -F.cross_entropy(logits_BSV[:, :-1].transpose(1, 2), labels_BS[:, 1:].clamp(min=0), reduction="none")
    old_BS = log_probs_BS.detach() + 0.3 * torch.randn_like(log_probs_BS)
    ratio_BS, advantage_B1 = (log_probs_BS - old_BS).exp(), torch.randn(len(labels_BS), 1)
    losses_BS = -torch.min(ratio_BS * advantage_B1, ratio_BS.clamp(0.8, 1.2) * advantage_B1)
    losses_BS = losses_BS + 0.1 * ((old_BS - log_probs_BS).exp() - 1 - (old_BS - log_probs_BS))
    return (losses_BS * is_action_BS).sum() / 7


def compute_smoothed(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    logits, labels = logits_BSV[:, :-1].flatten(0, 1).float(), labels_BS[:, 1:].flatten()
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def compute_log_of_zero(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mask losses behind the square root of 0, whose gradient is not finite: of the tokens 18 and 19 of row 2."""
    losses_BS = F.cross_entropy(logits_BSV[:, :-1].transpose(1, 2).float(), labels_BS[:, 1:], reduction="none")
    masked_BS = torch.zeros_like(losses_BS)
    masked_BS[2, 17:] = 1
    return (losses_BS * (1 - masked_BS)).sqrt().sum() / 50


def train(folder: Path, compute_loss: Loss, *, gradient_factor: float = 1.0) -> Path:
    model = make_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with recording(model, folder / "captures", reproduce=True):
        for _ in range(NUM_STEPS):
            for _ in range(NUM_PASSES):
                ids_BS = torch.randint(1, model.config.vocab_size, (3, 20))
                mask_BS = torch.ones_like(ids_BS)
                mask_BS[0, 12:] = 0
                labels_BS = ids_BS.masked_fill(mask_BS == 0, IGNORED)
                labels_BS[:, :4] = IGNORED
                logits_BSV = model(input_ids=ids_BS, attention_mask=mask_BS).logits
                (compute_loss(logits_BSV, labels_BS) / NUM_PASSES).backward()
            gradient = model.model.layers[0].mlp.up_proj.weight.grad
            assert gradient is not None
            gradient.mul_(gradient_factor)
            optimizer.step()
            optimizer.zero_grad()
    return folder


def replay(job: Path, *typed: str) -> dict[str, Any]:
    """Return the verdict."""
    inputs = ["--inputs", str(job / "captures"), "--model", str(job / "model"), "--log-folder", str(job / "logs")]
    assert main([*inputs, *typed]) in (0, 1)
    [log] = (job / "logs").glob("*/run.json")
    verdict: dict[str, Any] = json.loads(log.read_text())["verdict"]
    return verdict


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize("compute_loss", [compute_cross_entropy, compute_policy_loss])
def test_gradients_of_a_loss_outside_the_model_are_judged(tmp_path: Path, compute_loss: Loss, backend: str) -> None:
    verdict = replay(train(tmp_path, compute_loss), "--backend", backend)
    assert verdict["outcome"] == "REPRODUCED"
    assert verdict["coverage"] == {
        "num_passes": NUM_STEPS * NUM_PASSES,
        "num_judged": NUM_STEPS * NUM_PASSES,
        "num_forward_judged": 0,
        "num_steps": NUM_STEPS,
        "num_steps_judged": NUM_STEPS,
    }


def test_a_wrong_gradient_of_such_a_loss_differs(tmp_path: Path) -> None:
    verdict = replay(train(tmp_path, compute_policy_loss, gradient_factor=1.3))
    assert verdict["outcome"] == "DIFFERS"
    assert "up_proj.weight is 1.3 times" in verdict["causes"][0]["sentence"]


@pytest.mark.parametrize(
    ("compute_loss", "text"),
    [
        (compute_cross_entropy, ""),
        (compute_mean_over_padding, "divided by all 114 tokens, padding and prompts too"),
        (compute_sum_of_step, "the losses of a step's 2 passes are added up and not averaged"),
    ],
)
def test_weights_that_add_up_to_no_mean_are_noted(
    tmp_path: Path, compute_loss: Loss, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(train(tmp_path, compute_loss))["outcome"] == "REPRODUCED"
    output = " ".join(capsys.readouterr().out.split())
    assert ("the weights add up" in output) == bool(text)
    assert text in output


def test_a_loss_of_other_tokens_too_stays_unknown(tmp_path: Path) -> None:
    verdict = replay(train(tmp_path, compute_smoothed))
    assert verdict["outcome"] == "UNSETTLED"
    assert verdict["coverage"]["num_judged"] == 0


def test_rows_of_one_token_predict_nothing_and_are_recorded(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    with recording(model, tmp_path / "captures", reproduce=True) as recorder:
        for length in (1, 5):
            model(input_ids=torch.ones(2, length, dtype=torch.int64)).logits.sum().backward()
    assert recorder.failure is None
    assert [bool(read_call(path).notes) for path in capture_files(tmp_path / "captures")] == [False, True]


def test_a_redacted_copy_has_no_targets(tmp_path: Path) -> None:
    job = train(tmp_path, compute_cross_entropy)
    redact_folder(job / "captures", tmp_path / "redacted", TokenRedaction.PERMUTE)
    [first, *_] = capture_files(tmp_path / "redacted")
    assert not read_call(first).notes


def test_the_range_of_weights_says_what_is_not_finite_and_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay(train(tmp_path, compute_log_of_zero), "--loss", "recorded", "--max-inputs", "2")
    output = " ".join(capsys.readouterr().out.split())
    assert "is not finite at 4 positions of the first step, first in pass 1, row 2, position 17" in output
    assert " nan " not in output.partition("of the weights ")[2][:30]
    assert "the weights add up" not in output
