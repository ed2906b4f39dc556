"""What the gradient of a pass's logits tells of the loss, held against autograd's derivatives by the log-probs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from capture import capture_files, recording
from capture.file_format.capture_file import read_call
from capture.file_format.micro_batch import LOSS_GRADIENTS, LOSS_MISFIT, LOSS_TARGETS
from capture.record.logit_gradient import compute_misfit, compute_targets, watch_logits

ROWS, TOKENS, VOCABULARY = 2, 6, 11


def differentiate(weight_BS: Tensor, target_BS: Tensor, logits_BSV: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return the gradient of the logits of minus the weighted log-probs of the targets."""
    logits_BSV = logits_BSV.detach().requires_grad_()
    log_probs_BSV = logits_BSV.log_softmax(-1)
    of_targets_BS = log_probs_BSV.gather(-1, target_BS[..., None])[..., 0]
    loss = -(weight_BS * ((1 - smoothing) * of_targets_BS + smoothing * log_probs_BSV.mean(-1))).sum()
    loss.backward()
    assert logits_BSV.grad is not None
    return logits_BSV.grad


def make_case() -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, weights of both signs, two of them 0, and logits."""
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
    weight_BS = torch.randn(ROWS, TOKENS, generator=generator)
    weight_BS[0, 1] = weight_BS[1, -1] = 0
    return ids_BS, weight_BS, torch.randn(ROWS, TOKENS, VOCABULARY, generator=generator)


@pytest.mark.parametrize("shift", [1, 2])
def test_the_targets_and_weights_are_those_of_the_loss(shift: int) -> None:
    ids_BS, weight_BS, logits_BSV = make_case()
    target_BS = ids_BS.roll(-shift, 1)
    found = compute_targets(differentiate(weight_BS, target_BS, logits_BSV), ids_BS)
    assert torch.equal(found[LOSS_TARGETS].long(), torch.where(weight_BS == 0, -100, target_BS))
    chance_BS = logits_BSV.softmax(-1).gather(-1, target_BS[..., None])[..., 0]
    torch.testing.assert_close(found[LOSS_GRADIENTS] / (chance_BS - 1), weight_BS)


def test_a_next_token_that_is_the_likeliest_is_not_the_target_of_labels_that_are_shifted_twice() -> None:
    ids_BS, weight_BS, logits_BSV = make_case()
    logits_BSV.scatter_(-1, ids_BS.roll(-1, 1)[..., None], 4.0)
    target_BS = (ids_BS.roll(-1, 1) + 1) % VOCABULARY
    found = compute_targets(differentiate(weight_BS, target_BS, logits_BSV), ids_BS)
    assert torch.equal(found[LOSS_TARGETS].long(), torch.where(weight_BS == 0, -100, target_BS))


def test_a_target_is_told_from_the_only_other_likely_token() -> None:
    """Two likely tokens have gradients of one size: the row's own next token is the target."""
    ids_BS = torch.tensor([[3, 5, 7]])
    logits_BSV = torch.full((1, 3, VOCABULARY), -200.0)
    logits_BSV[..., [2, 5, 7]] = 0.0
    logits_BSV[0, 0, 7] = logits_BSV[0, 1, 5] = -200.0
    found = compute_targets(differentiate(torch.tensor([[1.0, -1.0, 0.0]]), ids_BS.roll(-1, 1), logits_BSV), ids_BS)
    assert found[LOSS_TARGETS].tolist() == [[5, 7, -100]]
    torch.testing.assert_close(found[LOSS_GRADIENTS], torch.tensor([[-0.5, 0.5, 0.0]]))


@pytest.mark.parametrize(("smoothing", "temperature", "fits"), [(0.0, 1.0, True), (0.1, 1.0, False), (0.0, 2.0, False)])
def test_a_loss_of_other_numbers_than_the_log_probs_does_not_fit(
    smoothing: float, temperature: float, fits: bool
) -> None:
    ids_BS, weight_BS, logits_BSV = make_case()
    gradient_BSV = differentiate(weight_BS, ids_BS.roll(-1, 1), logits_BSV / temperature, smoothing=smoothing)
    misfit = float(compute_misfit(gradient_BSV.flatten(0, 1), logits_BSV.flatten(0, 1)))
    assert misfit < 1e-6 if fits else misfit > 0.01
    assert torch.isnan(compute_misfit(torch.zeros(2, VOCABULARY), logits_BSV[0, :2]))


def test_logits_that_are_differentiated_twice_do_not_fit_and_an_error_stays_out_of_the_job() -> None:
    ids_BS, weight_BS, logits_BSV = make_case()
    logits_BSV.requires_grad_()
    notes: list[dict[str, Tensor]] = []
    errors: list[Exception] = []

    def fail(note: object) -> None:
        raise ValueError("no room")

    watch_logits(logits_BSV, ids_BS, lambda note: notes.append(dict(note)), errors.append, lambda: 1.0)
    watch_logits(logits_BSV, ids_BS, fail, errors.append, lambda: 1.0)
    for _ in range(2):
        (logits_BSV.log_softmax(-1)[..., 0] * weight_BS).sum().backward()
    misfits = [float(note[LOSS_MISFIT]) for note in notes]
    assert misfits[0] < 1e-6
    assert misfits[1] != misfits[1]
    assert list(map(str, errors)) == ["no room", "no room"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits_BSV: Tensor = self.head(self.embedding(input_ids))
        return logits_BSV


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_the_factor_of_a_scaler_is_taken_out(kind: Any, tmp_path: Path, one_world: None) -> None:
    """A sharded scaler needs a process group, to tell its other ranks of an overflow."""
    noted = record_gradients(kind, tmp_path)
    assert [len(gradients) for gradients in noted] == [2, 2]
    for unscaled, scaled in zip(*noted, strict=True):
        assert unscaled.abs().max() > 0
        torch.testing.assert_close(scaled, unscaled)


def record_gradients(kind: Any, folder: Path) -> list[list[Tensor]]:
    """Return the gradients that were noted of two passes, the first of them scaled, by the scale."""
    ids_BS, _, _ = make_case()
    noted = []
    for scale in (1.0, 512.0):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = kind("cpu", init_scale=scale)

        def compute_loss(model: Model = model) -> Tensor:
            return F.cross_entropy(model(ids_BS)[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())

        with recording(model, folder / str(scale), reproduce=True):
            scaler.scale(compute_loss()).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
            # The scaler has no part in this one.
            compute_loss().backward()
            optimizer.step()
        noted.append([read_call(path).notes[LOSS_GRADIENTS] for path in capture_files(folder / str(scale))])
    return noted


@pytest.mark.parametrize(
    "make_wrapper",
    [
        lambda: SimpleNamespace(loss_scale=512.0),
        lambda: SimpleNamespace(loss_scale_config=SimpleNamespace(cur_scale=512.0)),
    ],
    ids=["zero", "stage 0"],
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_the_factor_of_deepspeeds_engine_is_taken_out(make_wrapper: Any, is_inside: bool, tmp_path: Path) -> None:
    """DeepSpeed refuses fp16 on a CPU: its optimizer here is an object that has the scale where DeepSpeed 0.19 has it.

    The recorded model is the engine, or is inside one, whose parameters then know the optimizer.
    """
    ids_BS, _, _ = make_case()
    torch.manual_seed(0)
    model: Any = Model()
    holder, name = (next(model.parameters()), "_zero_optimizer") if is_inside else (model, "optimizer")
    with recording(model, tmp_path, reproduce=True):
        F.cross_entropy(model(ids_BS)[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten()).backward()
        setattr(holder, name, make_wrapper())
        (512 * F.cross_entropy(model(ids_BS)[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())).backward()
    unscaled, scaled = [read_call(path).notes[LOSS_GRADIENTS] for path in capture_files(tmp_path)]
    assert unscaled.abs().max() > 0
    torch.testing.assert_close(scaled, unscaled)
