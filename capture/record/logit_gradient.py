"""Take from the gradient of a pass's logits which token each position's loss is of, and how much it weighs.

Where a loss depends on the logits z of a position through the log-prob of one token y alone, its gradient there is
w (softmax(z) - onehot(y)), w being minus the derivative by that log-prob. Then y has the entry of the largest size, as
large as all others together, which have the other sign, and they are as the probabilities are. So with the gradient of
that one logit a replay has the gradient of the job's loss, whatever computed it: cross entropy in the job's own loop,
the loss of a policy, and others.

Shape letters: B rows, S tokens, N sampled positions, V vocabulary.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from capture.file_format.micro_batch import IGNORED_LABEL, LOSS_GRADIENTS, LOSS_MISFIT, LOSS_TARGETS
from capture.record.optimizer_hooks import find_loss_scale
from capture.record.outputs import find_sampled_positions, select_rows

# Rounding leaves entries of one size so far apart.
SAME_SIZE = 0.99


def watch_logits(
    logits_BSV: Tensor,
    ids_BS: Tensor,
    on_gradient: Callable[[Mapping[str, Tensor]], None],
    on_error: Callable[[Exception], None],
    read_engine_scale: Callable[[], float],
) -> None:
    """Call `on_gradient` in the job's backward, with what is noted of the pass; `on_error` if that cannot be computed.

    Where a job differentiates the same logits twice, LOSS_MISFIT of the second note is nan, and a later note counts.
    The factor of a GradScaler and that of DeepSpeed's engine, `read_engine_scale()`, are taken out again, as these take
    them out of the parameters' gradients.
    """
    positions_N = find_sampled_positions(ids_BS.shape[0], ids_BS.shape[1], logits_BSV.device).before_N
    # The job may let go of its logits before the backward. These few are kept until then.
    sampled_NV = select_rows(logits_BSV.detach(), positions_N)

    def take(gradient_BSV: Tensor | None) -> None:
        nonlocal sampled_NV
        # DDP passes all outputs through one function, also logits that nobody differentiates.
        if gradient_BSV is None:
            return
        gradient_BSV = gradient_BSV.detach()
        try:
            misfit = compute_misfit(select_rows(gradient_BSV, positions_N), sampled_NV)
            targets = compute_targets(gradient_BSV, ids_BS)
            if (scale := find_loss_scale()) is not None:
                targets[LOSS_GRADIENTS] = targets[LOSS_GRADIENTS] / scale.to(gradient_BSV.device, non_blocking=True)
            # Without an engine a division would cost every pass of every job one more operation on the device.
            if (engine_scale := read_engine_scale()) != 1:
                targets[LOSS_GRADIENTS] = targets[LOSS_GRADIENTS] / engine_scale
            on_gradient({**targets, LOSS_MISFIT: misfit})
        except Exception as error:
            on_error(error)
        # Without them a second gradient of the same logits has no misfit.
        sampled_NV = sampled_NV.new_empty(0)

    logits_BSV.register_hook(take)


@torch.no_grad()
def compute_targets(gradient_BSV: Tensor, ids_BS: Tensor) -> dict[str, Tensor]:
    """Return LOSS_TARGETS and LOSS_GRADIENTS of the gradient of a pass's logits.

    Where two entries are nearly of one size, the row's own next token is the target. No tensor of the gradient's
    size is made, and nothing waits for the device.
    """
    least_BS, least_id_BS = gradient_BSV.min(dim=-1)
    most_BS, most_id_BS = gradient_BSV.max(dim=-1)
    is_positive_BS = most_BS > -least_BS
    target_BS = torch.where(is_positive_BS, most_id_BS, least_id_BS)
    value_BS = torch.where(is_positive_BS, most_BS, least_BS)
    next_BS = ids_BS.roll(-1, dims=1).long().clamp(0, gradient_BSV.shape[-1] - 1)
    of_next_BS = gradient_BSV.gather(-1, next_BS[..., None])[..., 0]
    # A likely token that is not the target has a gradient of the other sign, which is smaller.
    is_next_BS = (of_next_BS == least_BS) | (of_next_BS == most_BS)
    is_next_BS &= of_next_BS.abs() >= SAME_SIZE * value_BS.abs()
    target_BS = torch.where(is_next_BS, next_BS, target_BS)
    value_BS = torch.where(is_next_BS, of_next_BS, value_BS)
    return {
        LOSS_TARGETS: torch.where(value_BS == 0, IGNORED_LABEL, target_BS).int(),
        LOSS_GRADIENTS: value_BS.float(),
    }


@torch.no_grad()
def compute_misfit(gradient_NV: Tensor, logits_NV: Tensor) -> Tensor:
    """Return which share of the gradient of some positions' logits is of another form than that above, one number.

    The share is of the entries' sizes, added up. It is nan where no position has a gradient, or there are no logits.
    """
    if not len(logits_NV):
        return gradient_NV.new_full((), torch.nan, dtype=torch.float32)
    gradient_NV, chances_NV = gradient_NV.float(), logits_NV.float().softmax(dim=-1)
    targets_N1 = gradient_NV.abs().argmax(dim=-1, keepdim=True)
    values_N1 = gradient_NV.gather(-1, targets_N1)
    doubts_N1 = (1 - chances_NV.gather(-1, targets_N1)).clamp(min=torch.finfo(torch.float32).eps)
    fitting_NV = (-values_N1 / doubts_N1 * chances_NV).scatter(-1, targets_N1, values_N1)
    return (gradient_NV - fitting_NV).abs().sum() / gradient_NV.abs().sum()
