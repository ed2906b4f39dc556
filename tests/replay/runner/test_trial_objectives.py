"""Policy losses with a mistake, written out here, are known by their value and by the gradient of their logits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capture.file_format.micro_batch import IGNORED_LABEL, LOSS_GRADIENTS, LOSS_TARGETS
from replay.objective.inputs import ObjectiveData, ObjectiveInputs
from replay.options.spec import ObjectiveSpec
from replay.runner.trial_logits import TargetLogits
from replay.runner.trial_objectives import PolicyCase, fit_temperature, list_policy_trials

ROWS, ACTIONS, VOCABULARY = 4, 6, 12
GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


LOGITS_BAV = draw(ROWS, ACTIONS, VOCABULARY)
TARGET_BA = torch.randint(0, VOCABULARY, (ROWS, ACTIONS), generator=GENERATOR)
MASK_BA = torch.arange(ACTIONS) < torch.tensor([[6], [3], [5], [2]])
LOG_PROBS_BA = LOGITS_BAV.log_softmax(-1).gather(-1, TARGET_BA[..., None])[..., 0]
OLD_BA, REFERENCE_BA = LOG_PROBS_BA + 0.3 * draw(ROWS, ACTIONS), LOG_PROBS_BA + 0.2 * draw(ROWS, ACTIONS)
ADVANTAGES_B = draw(ROWS)

# What a job's loop has: log-probs, the clipped ratio's gain and the unclipped one, and the entropy.
Loop = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def average(tokens_BA: Tensor) -> Tensor:
    return tokens_BA[MASK_BA].mean()


def clip(log_probs_BA: Tensor, low: float, high: float) -> Tensor:
    ratio_BA, advantages_BA = (log_probs_BA - OLD_BA).exp(), ADVANTAGES_B[:, None]
    return torch.min(ratio_BA * advantages_BA, ratio_BA.clamp(1 - low, 1 + high) * advantages_BA)


def clip_with(log_probs_BA: Tensor, old_BA: Tensor, advantages_BA: Tensor) -> Tensor:
    ratio_BA = (log_probs_BA - old_BA).exp()
    return torch.min(ratio_BA * advantages_BA, ratio_BA.clamp(0.8, 1.2) * advantages_BA)


def move(values_BA: Tensor, places: int) -> Tensor:
    """Move each token's number so many places towards the end of its row."""
    before, after = max(places, 0), max(-places, 0)
    return torch.nn.functional.pad(values_BA, (before, after))[:, after : ACTIONS + after]


def estimate(log_probs_BA: Tensor) -> Tensor:
    difference_BA = REFERENCE_BA - log_probs_BA
    return difference_BA.exp() - difference_BA - 1


LOOPS: dict[str, Loop] = {
    "does not clip the ratio": lambda logp, gain, whole, h: -average(whole),
    "has the other sign": lambda logp, gain, whole, h: average(gain),
    "takes the larger": lambda logp, gain, whole, h: (
        -average(torch.max(whole, (logp - OLD_BA).exp().clamp(0.8, 1.2) * ADVANTAGES_B[:, None]))
    ),
    "the mean of the sequences' means": lambda logp, gain, whole, h: -((gain * MASK_BA).sum(1) / MASK_BA.sum(1)).mean(),
    "divided by the 4 rows": lambda logp, gain, whole, h: -(gain * MASK_BA).sum() / ROWS,
    "divided by all 24 places": lambda logp, gain, whole, h: -(gain * MASK_BA).mean(),
    "no ratio to the old log-probs": lambda logp, gain, whole, h: -average(ADVANTAGES_B[:, None] * logp),
    "no more than 1.28": lambda logp, gain, whole, h: -average(clip(logp, 0.2, 0.28)),
    "to 0.9 ... 1.1": lambda logp, gain, whole, h: -average(clip(logp, 0.1, 0.1)),
    "the old log-prob of the next one": lambda logp, gain, whole, h: (
        -average(clip_with(logp, move(OLD_BA, -1), ADVANTAGES_B[:, None]))
    ),
    "the old log-prob of the one before": lambda logp, gain, whole, h: (
        -average(clip_with(logp, move(OLD_BA, 1), ADVANTAGES_B[:, None]))
    ),
    "the old log-probs of the rows in reverse order": lambda logp, gain, whole, h: (
        -average(clip_with(logp, OLD_BA.flip(0), ADVANTAGES_B[:, None]))
    ),
    "the advantage of the one before": lambda logp, gain, whole, h: (
        -average(clip_with(logp, OLD_BA, move(ADVANTAGES_B[:, None].expand(ROWS, ACTIONS), 1)))
    ),
    "adds 0.04 times k3": lambda logp, gain, whole, h: average(-gain + 0.04 * estimate(logp)),
    "it subtracts 0.1 times k3": lambda logp, gain, whole, h: average(-gain - 0.1 * estimate(logp)),
    "adds 0.1 times k1": lambda logp, gain, whole, h: average(-gain + 0.1 * (logp - REFERENCE_BA)),
    "subtracts 0.01 times the entropy": lambda logp, gain, whole, h: average(-gain - 0.01 * h),
    "it adds 0.01 times the entropy": lambda logp, gain, whole, h: average(-gain + 0.01 * h),
    "does not clip the ratio and is the mean of the sequences' means": lambda logp, gain, whole, h: (
        -((whole * MASK_BA).sum(1) / MASK_BA.sum(1)).mean()
    ),
}


def run_loop(loop: Loop) -> tuple[float, Tensor, Tensor]:
    """Return the loop's loss, the gradients [B, A] of its targets' logits, and the entropies."""
    logits_BAV = LOGITS_BAV.clone().requires_grad_()
    all_BAV = logits_BAV.log_softmax(-1)
    log_probs_BA = all_BAV.gather(-1, TARGET_BA[..., None])[..., 0]
    entropy_BA = -(all_BAV.exp() * all_BAV).sum(-1)
    whole_BA = (log_probs_BA - OLD_BA).exp() * ADVANTAGES_B[:, None]
    loss = loop(log_probs_BA, clip(log_probs_BA, 0.2, 0.2), whole_BA, entropy_BA)
    # Half of it, as where a step has two passes.
    (gradient_BAV,) = torch.autograd.grad(0.5 * loss, logits_BAV)
    return float(loss.detach()), gradient_BAV.gather(-1, TARGET_BA[..., None])[..., 0], entropy_BA.detach()


def make_case(loop: Loop) -> PolicyCase:
    loss, gradient_BA, entropy_BA = run_loop(loop)
    # Behind two tokens of a prompt; a position predicts the next token.
    gradient_BS = torch.nn.functional.pad(gradient_BA, (1, 1))
    tensors = {
        "advantages": ADVANTAGES_B,
        "old_log_probs": OLD_BA,
        "ref_log_probs": REFERENCE_BA,
        LOSS_GRADIENTS: gradient_BS,
        LOSS_TARGETS: torch.where(gradient_BS == 0, IGNORED_LABEL, 1),
    }
    data = ObjectiveData(
        tensors=tensors,
        numbers={},
        left_out={},
        sequence_BA=torch.arange(ROWS)[:, None].expand(ROWS, ACTIONS),
        num_sequences=ROWS,
        has_action_mask=True,
        num_job_ranks=1,
        source="a.pkl",
    )
    inputs = ObjectiveInputs(
        log_probs_BA=torch.where(MASK_BA, LOG_PROBS_BA, 0.0).requires_grad_(),
        action_mask_BA=MASK_BA,
        recorded=data,
        num_window_tokens=int(MASK_BA.sum()),
        num_window_passes=1,
    )
    return PolicyCase.make(inputs, ObjectiveSpec(), loss, entropy_BA)


@pytest.mark.parametrize("words", LOOPS)
def test_a_policys_loss_is_known_by_its_value_and_its_gradient(words: str) -> None:
    case = make_case(LOOPS[words])
    fitting = [
        trial
        for trial in list_policy_trials(case)
        if abs(trial.loss - case.job_loss) < 1e-6 and trial.gradient_apart is not None and trial.gradient_apart < 1e-5
    ]
    fewest = min(trial.num_changes for trial in fitting)
    # Several changes may come to one loss where no ratio of the pass tells them apart.
    told = [trial for trial in fitting if trial.num_changes == fewest]
    assert any(words in trial.says for trial in told)
    assert len({round(trial.loss, 9) for trial in told}) == 1


def test_the_replays_own_loss_has_the_jobs_gradient_where_nothing_is_wrong() -> None:
    case = make_case(lambda logp, gain, whole, h: -average(gain))
    assert case.plain_residual is not None
    assert case.plain_residual < 1e-6
    assert not any(trial.is_fitted and trial.num_changes == 1 for trial in list_policy_trials(case))


def test_the_temperature_of_a_policys_loss_is_fitted_to_its_gradient() -> None:
    logits_NV, target_N = LOGITS_BAV[MASK_BA], TARGET_BA[MASK_BA]
    old_N, advantages_N = OLD_BA[MASK_BA], ADVANTAGES_B[:, None].expand(ROWS, ACTIONS)[MASK_BA]
    own_NV = logits_NV.clone().requires_grad_()
    log_probs_N = (own_NV / 0.8).log_softmax(-1).gather(-1, target_N[:, None])[:, 0]
    ratio_N = (log_probs_N - old_N).exp()
    (-torch.min(ratio_N * advantages_N, ratio_N.clamp(0.8, 1.2) * advantages_N).mean()).backward()
    assert own_NV.grad is not None
    gradient_N = own_NV.grad.gather(-1, target_N[:, None])[:, 0]
    logits = TargetLogits(logits_NV=logits_NV, target_N=target_N, gradient_N=gradient_N)
    temperature, residual = fit_temperature(logits, advantages_N, old_N, ObjectiveSpec())
    assert (temperature, residual < 1e-5) == (0.8, True)
