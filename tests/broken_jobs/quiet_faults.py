"""Patches after which a job's numbers are those that its inputs and notes make, wrong as these are."""

import torch.nn.functional as F
from torch import Tensor


def shifted_across_rows(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """The last place of each row is trained on the first token of the next."""
    return F.cross_entropy(logits_BSV.flatten(0, 1)[:-1], labels_BS.flatten()[1:])
