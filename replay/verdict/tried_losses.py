"""Hold the losses that were tried of a pass's log-probs, where its objective's loss is not the job's."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedLoss:
    """One loss of a pass's log-probs, for `the job's loss ...`.

    loss            its value
    gradient_apart  how far the gradient of the targets' logits is from the job's, as a share of that: 0 where it is a
                    positive multiple of it; None where the job's is not known
    num_changes     of the objective
    is_fitted       to the job's loss, so that its value proves nothing
    """

    name: str
    says: str
    try_next: str
    loss: float
    gradient_apart: float | None
    num_changes: int = 1
    is_fitted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedLosses:
    """The objective's loss and others in one pass.

    own            the objective's
    others         those that could be computed
    num_gradients  tokens whose gradient in the job is known
    """

    own: TriedLoss
    others: Sequence[TriedLoss]
    num_gradients: int
