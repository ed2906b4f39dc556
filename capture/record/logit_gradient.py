"""Take from the gradient of a pass's logits which token each position's loss is of, and how much it weighs.

Where a loss depends on the logits z of a position through the log-prob of one token y alone, its gradient there is
w (softmax(z) - onehot(y)), w being minus the derivative by that log-prob. Then y has the entry of the largest size, as
large as all others together, and they have the other sign. So with the gradient of that one logit a replay has the
gradient of the job's loss, whatever computed it: cross entropy in the job's own loop, the loss of a policy, and others.

Shape letters: B rows, S tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from capture.file_format.micro_batch import IGNORED_LABEL, LOSS_GRADIENTS, LOSS_MISFIT, LOSS_TARGETS


def watch_logits(
    logits_BSV: Tensor,
    ids_BS: Tensor,
    on_gradient: Callable[[Mapping[str, Tensor]], None],
    on_error: Callable[[Exception], None],
) -> None:
    """Call `on_gradient` in the job's backward, with what is noted of the pass; `on_error` if that cannot be computed.

    Where a job differentiates the same logits twice, LOSS_MISFIT of the second note is 1, and a later note counts.
    """
    num_calls = 0

    def take(gradient_BSV: Tensor | None) -> None:
        nonlocal num_calls
        # DDP passes all outputs through one function, also logits that nobody differentiates.
        if gradient_BSV is None:
            return
        num_calls += 1
        try:
            on_gradient(compute_targets(gradient_BSV.detach(), ids_BS, is_whole=num_calls == 1))
        except Exception as error:
            on_error(error)

    logits_BSV.register_hook(take)


@torch.no_grad()
def compute_targets(gradient_BSV: Tensor, ids_BS: Tensor, *, is_whole: bool = True) -> dict[str, Tensor]:
    """Return LOSS_TARGETS, LOSS_GRADIENTS and LOSS_MISFIT of the gradient of a pass's logits.

    Where two entries are of one size, the row's own next token is the target. No entry of the vocabulary's size is
    made, and nothing waits for the device.

    is_whole  False: other gradients of these logits were seen before, so this one tells nothing, and LOSS_MISFIT is 1
    """
    least_BS, least_id_BS = gradient_BSV.min(dim=-1)
    most_BS, most_id_BS = gradient_BSV.max(dim=-1)
    is_positive_BS = most_BS > -least_BS
    target_BS = torch.where(is_positive_BS, most_id_BS, least_id_BS)
    value_BS = torch.where(is_positive_BS, most_BS, least_BS)
    next_BS = ids_BS.roll(-1, dims=1).long().clamp(0, gradient_BSV.shape[-1] - 1)
    of_next_BS = gradient_BSV.gather(-1, next_BS[..., None])[..., 0]
    is_next_BS = (of_next_BS == least_BS) | (of_next_BS == most_BS)
    target_BS = torch.where(is_next_BS, next_BS, target_BS)
    value_BS = torch.where(is_next_BS, of_next_BS, value_BS).float()
    sizes_BS = torch.linalg.vector_norm(gradient_BSV, ord=1, dim=-1, dtype=torch.float32)
    misfit = (sizes_BS - 2 * value_BS.abs()).abs().sum() / sizes_BS.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return {
        LOSS_TARGETS: torch.where(value_BS == 0, IGNORED_LABEL, target_BS).int(),
        LOSS_GRADIENTS: value_BS,
        LOSS_MISFIT: misfit if is_whole else torch.ones_like(misfit),
    }
