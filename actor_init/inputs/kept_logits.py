"""Keep the logits of one forward, or their entropies, for a loss that needs more than the action tokens' log-probs.

Shape letters: B rows, A trailing tokens a row with an action mask, N action tokens with a log-prob, V vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from actor_init.attention.ring import sum_over_ring
from actor_init.parallel.vocab_parallel import entropies_of_shards


class KeptLogits:
    """Holds the latest forward's logits, or only their entropies. What is not asked for is not computed."""

    def __init__(self) -> None:
        self._logits: Tensor | None = None
        self._entropy_N: Tensor | None = None

    def keep(
        self, logits: Tensor, predictor_N: Tensor, slot_N: Tensor, shape_BA: tuple[int, ...], ring: Any | None
    ) -> None:
        """Take the model's logits, and where those are that predict an action token.

        ring  the process group whose ranks hold the other tokens' logits, or None
        """
        self._logits, self._predictor_N, self._slot_N, self._shape_BA = logits, predictor_N, slot_N, shape_BA
        self._ring: dist.ProcessGroup | None = ring

    def keep_entropies(self, entropy_N: Tensor, slot_N: Tensor, shape_BA: tuple[int, ...], ring: Any | None) -> None:
        """Take the entropies of distributions whose logits were never whole."""
        self._entropy_N, self._slot_N, self._shape_BA, self._ring = entropy_N, slot_N, shape_BA, ring

    def drop(self) -> None:
        self._logits = self._entropy_N = None

    def of_actions(self) -> tuple[Tensor, Tensor]:
        """Return fp32 logits [N, V] of the action tokens, and each one's index [N] in the flattened [B, A].

        Raises ValueError where a rank holds a part of them alone: under ring attention, or sharded on the vocabulary.
        """
        assert self._logits is not None
        if self._ring is not None or isinstance(self._logits, DTensor):
            raise ValueError(
                "the logits are spread over ranks, so a loss cannot have them. Try: without --ring, without --tp"
            )
        return self._logits.flatten(0, 1)[self._predictor_N].float(), self._slot_N

    def entropies(self) -> Tensor:
        """Return the entropy of the distribution that each action token was predicted with, in nats; fp32 [B, A]."""
        if self._entropy_N is not None:
            entropy_N = self._entropy_N
        elif isinstance(self._logits, DTensor):
            entropy_N = entropies_of_shards(self._logits, self._predictor_N)
        else:
            assert self._logits is not None
            log_probs_NV = torch.log_softmax(self._logits.flatten(0, 1)[self._predictor_N].float(), dim=-1)
            entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(dim=-1)
        flat = entropy_N.new_zeros(self._shape_BA).flatten().index_put((self._slot_N,), entropy_N)
        if self._ring is not None:
            flat = sum_over_ring(flat, self._ring)
        return flat.view(self._shape_BA)
