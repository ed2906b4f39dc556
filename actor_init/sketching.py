"""Random projections of features onto a few signs, by which tensors that no memory could keep are compared.

A sketch is linear, so what several ranks hold of a token's features adds up to the sketch of all; and it keeps
distances: the expected squared norm of a sketch of x is that of x, its relative standard deviation sqrt(2 / SIGNS)
at most (D. Achlioptas, "Database-friendly random projections", 2003).

Shape letters: T tokens or rows, F features, K signs.
"""

from functools import lru_cache

import torch
from torch import Tensor

from actor_init.weights import mix

SIGNS = 16  # at most 32, the bits of a hash
_KEY = 0x5EED5EED
_CHUNK = 1 << 24  # elements that are brought to fp32 at once


def sketch(values_TF: Tensor, *, first_feature: int = 0) -> Tensor:
    """[T, K], fp32, on the values' device; they are the features from `first_feature` on of those that count."""
    num_features = values_TF.shape[1]
    signs_FK = _signs(first_feature, num_features, values_TF.device)
    chunks = torch.split(values_TF, max(1, _CHUNK // max(1, num_features)))
    return torch.cat([chunk.float() @ signs_FK for chunk in chunks])


def sketch_of_parameter(values: Tensor) -> Tensor:
    """[T, K]: the longest dim is projected, the others are the rows."""
    longest = values.shape.index(max(values.shape))
    return sketch(values.movedim(longest, -1).reshape(-1, values.shape[longest]))


@lru_cache(maxsize=32)
def _signs(first: int, number: int, device: torch.device) -> Tensor:
    """[F, K] of 1 / sqrt(K) or its negative: bits of a hash of the feature's index."""
    index_F = torch.arange(first, first + number, device=device)
    bits_F = mix(mix(index_F ^ _KEY) ^ _KEY)
    bits_FK = (bits_F[:, None] >> torch.arange(SIGNS, device=device)) & 1
    signs_FK: Tensor = (2 * bits_FK - 1).float() / SIGNS**0.5
    return signs_FK
