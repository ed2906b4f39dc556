"""What the gradient of a pass's logits tells of the loss, held against autograd's derivatives by the log-probs."""

import pytest
import torch
from torch import Tensor

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

    watch_logits(logits_BSV, ids_BS, lambda note: notes.append(dict(note)), errors.append)
    watch_logits(logits_BSV, ids_BS, fail, errors.append)
    for _ in range(2):
        (logits_BSV.log_softmax(-1)[..., 0] * weight_BS).sum().backward()
    misfits = [float(note[LOSS_MISFIT]) for note in notes]
    assert misfits[0] < 1e-6
    assert misfits[1] != misfits[1]
    assert list(map(str, errors)) == ["no room", "no room"]
