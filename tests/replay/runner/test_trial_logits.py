"""Losses of logits, fitted to what autograd gives of a job's own loss as the gradient of its targets' logits."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from replay.runner.trial_logits import TargetLogits, are_rounded, match_logit_trials
from replay.verdict.causes.trial_rules import LIKELY_GAIN

POSITIONS, VOCABULARY = 24, 40
GENERATOR = torch.Generator().manual_seed(0)
LOGITS_NV = 2 * torch.randn(POSITIONS, VOCABULARY, generator=GENERATOR, dtype=torch.float64)
TARGET_N = torch.randint(0, VOCABULARY - 4, (POSITIONS,), generator=GENERATOR)

JobLoss = Callable[[Tensor], Tensor]


def add_entropy(logits_NV: Tensor, weight: float) -> Tensor:
    log_chance_NV = logits_NV.log_softmax(dim=1)
    entropy = -(log_chance_NV.exp() * log_chance_NV).sum(dim=1).mean()
    return F.cross_entropy(logits_NV, TARGET_N) - weight * entropy


def leave_out(logits_NV: Tensor, token: int) -> Tensor:
    return F.cross_entropy(logits_NV.index_fill(1, torch.tensor([token]), -1e9), TARGET_N)


LOSSES: dict[str, JobLoss] = {
    "are divided by 0.7, a temperature": lambda logits: F.cross_entropy(logits / 0.7, TARGET_N),
    "are capped at 5": lambda logits: F.cross_entropy(5 * torch.tanh(logits / 5), TARGET_N),
    "smoothed: 0.1 of each": lambda logits: F.cross_entropy(logits, TARGET_N, label_smoothing=0.1),
    "a z-loss, of weight 0.001,": lambda logits: (
        F.cross_entropy(logits, TARGET_N) + 1e-3 * logits.logsumexp(dim=1).square().mean()
    ),
    "an entropy bonus, of weight 0.01": lambda logits: add_entropy(logits, 0.01),
    "punishes entropy, by a weight of 0.01": lambda logits: add_entropy(logits, -0.01),
    "softmax acts twice": lambda logits: F.cross_entropy(logits.softmax(dim=1), TARGET_N),
    "leaves the logit of token 38 out": lambda logits: leave_out(logits, 38),
    "leaves the logits from token 36 on out": lambda logits: F.cross_entropy(logits[:, :36], TARGET_N),
}


def observe(loss: JobLoss, factor: float = 0.25) -> TargetLogits:
    """What a job that weighs a pass by `factor` records of it."""
    logits_NV = LOGITS_NV.clone().requires_grad_()
    (factor * loss(logits_NV)).backward()
    assert logits_NV.grad is not None
    gradient_N = logits_NV.grad.gather(1, TARGET_N[:, None])[:, 0].float().double()
    return TargetLogits(logits_NV=LOGITS_NV, target_N=TARGET_N, gradient_N=gradient_N)


@pytest.mark.parametrize("words", LOSSES)
def test_a_loss_of_logits_is_known_by_the_gradient_of_its_targets(words: str) -> None:
    [(trial, match)] = match_logit_trials(observe(LOSSES[words]), is_coarse=False)
    assert words in trial.says
    assert match.gain > 100
    assert match.num_values == POSITIONS


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits: F.cross_entropy(logits, TARGET_N),
        lambda logits: -F.cross_entropy(logits, TARGET_N),
        # Both at once are no loss of the list.
        lambda logits: F.cross_entropy(logits / 0.7, TARGET_N, label_smoothing=0.1),
    ],
)
def test_other_losses_are_not_taken_for_one_of_them(loss: JobLoss) -> None:
    assert match_logit_trials(observe(loss), is_coarse=False) == []


def test_losses_that_rounding_does_not_tell_apart_are_not_sure() -> None:
    """A temperature near 1 and a small weight of the entropy have one gradient but for what bf16 rounds away."""
    logits = observe(lambda logits: F.cross_entropy(logits / 1.3, TARGET_N))
    rounded = TargetLogits(
        logits_NV=LOGITS_NV + 0.02 * torch.randn(LOGITS_NV.shape, generator=GENERATOR),
        target_N=TARGET_N,
        gradient_N=logits.gradient_N.bfloat16().double(),
    )
    found = match_logit_trials(rounded, is_coarse=True)
    assert any("a temperature" in trial.says for trial, _ in found)
    assert all(match.gain == LIKELY_GAIN for _, match in found) is (len(found) > 1)


def test_a_gradient_of_bf16_is_told_by_its_values() -> None:
    gradient_N = observe(LOSSES["softmax acts twice"]).gradient_N
    assert not are_rounded(gradient_N)
    assert are_rounded(gradient_N.bfloat16().double())
    assert not are_rounded(gradient_N.bfloat16().double()[:4])
