"""Inputs of an objective with known numbers, and what it means that two losses agree.

Shape letters: B rows, A columns of the action mask (the last tokens of each row).
"""

from typing import Any

import torch
from torch import Tensor

from replay.objective.inputs import ObjectiveData, ObjectiveInputs

BOUND = 1e-5  # fp32 sums in another order
ROWS, ACTIONS = 4, 7


def made(seed: int = 0, **others: Tensor) -> ObjectiveInputs:
    """Rows of ragged masks; the ratio to the old policy is between 0.5 and 2."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: float, high: float) -> Tensor:
        return torch.rand(ROWS, ACTIONS, generator=generator) * (high - low) + low

    mask_BA = drawn(0, 1) > 0.3
    mask_BA[:, 0] = True
    log_probs_BA = (drawn(-4, 0) * mask_BA).requires_grad_()
    tensors = {
        "advantages": drawn(-2, 2),
        "old_log_probs": log_probs_BA.detach() + drawn(-0.7, 0.7),
        "ref_log_probs": log_probs_BA.detach() + drawn(-1, 1),
    }
    recorded = ObjectiveData(
        tensors=tensors | others,
        numbers={},
        left_out={},
        sequence_BA=torch.arange(ROWS)[:, None].expand(ROWS, ACTIONS),
        num_sequences=ROWS,
        has_action_mask=True,
        num_job_ranks=1,
        source="a capture",
    )
    return ObjectiveInputs(
        log_probs_BA=log_probs_BA,
        action_mask_BA=mask_BA,
        recorded=recorded,
        num_window_tokens=int(mask_BA.sum()),
        num_window_passes=1,
    )


def gradient(loss: Tensor, inputs: ObjectiveInputs) -> Tensor:
    return torch.autograd.grad(loss, inputs.log_probs_BA, retain_graph=True)[0]


def agree(ours: Tensor, theirs: Tensor, inputs: ObjectiveInputs) -> None:
    """Hold loss and gradient against each other."""
    assert abs(ours.item() - theirs.item()) <= BOUND * max(1, abs(theirs.item()))
    torch.testing.assert_close(gradient(ours, inputs), gradient(theirs, inputs), rtol=BOUND, atol=BOUND)
    assert gradient(theirs, inputs).abs().max() > 1e-3, "nothing to compare"


def fields_of(instance: Any) -> dict[str, Any]:
    return {name: getattr(instance, name) for name in instance.__dataclass_fields__}
