"""Patches after which a job's numbers are those that its inputs and notes make, wrong as these are."""

import torch
import torch.nn.functional as F
from torch import Tensor


def shifted_across_rows(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """The last place of each row is trained on the first token of the next."""
    return F.cross_entropy(logits_BSV.flatten(0, 1)[:-1], labels_BS.flatten()[1:])


def old_log_probs_shifted(noted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The old policy's log-probs stand one place too early."""
    return noted | {"old_log_probs": F.pad(noted["old_log_probs"][:, 1:], (0, 1))}


def old_log_probs_of_other_rows(noted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows were sorted, and the old policy's log-probs were not."""
    return noted | {"old_log_probs": noted["old_log_probs"].roll(1, 0)}


def no_advantages(noted: dict[str, Tensor]) -> dict[str, Tensor]:
    """All rewards are alike, so that their mean leaves nothing of them."""
    return noted | {"advantages": torch.zeros_like(noted["advantages"])}
