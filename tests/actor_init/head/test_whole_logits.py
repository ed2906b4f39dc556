"""Log-probs of whole logits are those of a softmax in float64, and gradients reach the logits alone that predict."""

import pytest
import torch

from actor_init.head.whole_logits import compute_eager_log_probs

ROWS, TOKENS, VOCABULARY = 2, 12, 31


# Few targets: their rows are selected; many: the loss is that of all tokens.
@pytest.mark.parametrize("num_targets", [0, 5, 16, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_and_gradient(num_targets: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, TOKENS, VOCABULARY, dtype=dtype, requires_grad=True)
    predictor_N = torch.randperm(ROWS * TOKENS)[:num_targets]
    target_ids_N = torch.randint(VOCABULARY, (num_targets,))
    weight_N = torch.randn(num_targets)

    log_probs_N = compute_eager_log_probs(logits, predictor_N, target_ids_N)
    (log_probs_N * weight_N).sum().backward()

    exact = logits.detach().double().requires_grad_()
    probs_NV = exact.flatten(0, 1)[predictor_N].softmax(-1)
    expected_N = probs_NV[torch.arange(num_targets), target_ids_N].log()
    (expected_N * weight_N.double()).sum().backward()
    assert log_probs_N.dtype == torch.float32
    torch.testing.assert_close(log_probs_N.double(), expected_N, atol=1e-5, rtol=1e-5)
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-6 if dtype is torch.float32 else 1e-2, rtol=0)


def test_without_a_backward_a_token_may_have_several_targets() -> None:
    logits = torch.randn(ROWS, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    predictor_N, target_ids_N = torch.arange(ROWS * TOKENS).repeat_interleave(2), torch.arange(48) % VOCABULARY
    expected_N = logits.flatten(0, 1).log_softmax(-1)[predictor_N, target_ids_N]
    torch.testing.assert_close(compute_eager_log_probs(logits, predictor_N, target_ids_N), expected_N)
