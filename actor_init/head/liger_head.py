"""Compute log-probs from hidden states and the head's weight by Liger's fused linear cross entropy.

Forward computes the gradients of hidden states, weight and bias for a gradient of 1 of each loss, as Liger's loss of a
sum or a mean does, and backward multiplies them by the true one, which all log-probs have to share.

Shape letters: T tokens that the head was fed, N of them whose log-prob is requested, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from actor_init.fused.liger import compute_liger_losses
from actor_init.head.chunks import LogProbRequest, scale_gradients
from actor_init.model_form import HeadForm


def compute_liger_log_probs(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, form: HeadForm, request: LogProbRequest
) -> Tensor:
    """Compute fp32 log-probs [N]. If backward gives them different gradients, those of the head become NaN."""
    log_probs_N: Tensor = _LigerLogProbs.apply(hidden_TH, weight_VH, bias_V, form, request)
    return log_probs_N


class _LigerLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, form: HeadForm, request: LogProbRequest
    ) -> Tensor:
        ctx.shape, ctx.dtype, needs_gradient = hidden_TH.shape, hidden_TH.dtype, ctx.needs_input_grad[:3]
        given = (hidden_TH[request.predictor_N], weight_VH, bias_V)
        if len(request.predictor_N):
            loss_N, *gradients = compute_liger_losses(
                *given, request.target_N, form.find_soft_cap(), needs_gradient=any(needs_gradient)
            )
        else:
            # Liger's function does not take an empty batch.
            loss_N = hidden_TH.new_zeros(0, dtype=torch.float32)
            gradients = [None if tensor is None else torch.zeros_like(tensor) for tensor in given]
        needed_gradients = (
            gradient if needed else None for gradient, needed in zip(gradients, needs_gradient, strict=True)
        )
        ctx.save_for_backward(request.predictor_N, *needed_gradients)
        return -loss_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        predictor_N, *gradients = ctx.saved_tensors
        if len(predictor_N):
            gradients = scale_gradients(tuple(gradients), (ctx.dtype,) * 3, -gradient_N)
        hidden_NH, weight_VH, bias_V = gradients
        hidden_TH = None
        if hidden_NH is not None:
            hidden_TH = hidden_NH.new_zeros(ctx.shape).index_copy_(0, predictor_N, hidden_NH)
        return hidden_TH, weight_VH, bias_V, None, None
