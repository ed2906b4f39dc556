"""Project features randomly onto a few signs, to compare tensors that are too large to store.

A sketch is linear, so the sketches of several ranks' features add up to the sketch of all. It preserves distances: the
expected squared norm of a sketch of x is that of x, with a relative standard deviation of at most sqrt(2 / NUM_SIGNS)
(D. Achlioptas, "Database-friendly random projections", 2003).

Shape letters: T tokens or rows, F features, K signs.
"""

from functools import lru_cache

import torch
from torch import Tensor

from actor_init.name_hash import mix_bits

# At most 32, the bits of a hash.
NUM_SIGNS = 16
_KEY = 0x5EED5EED
# Elements that are converted to fp32 at a time.
_CHUNK = 1 << 24


def sketch(values_TF: Tensor, *, first_feature: int = 0) -> Tensor:
    """Return the sketch [T, K], fp32, on the values' device; the values are the features from `first_feature` on."""
    num_features = values_TF.shape[1]
    signs_FK = _make_signs(first_feature, num_features, values_TF.device)
    chunks = torch.split(values_TF, max(1, _CHUNK // max(1, num_features)))
    # A user's model in bf16 or fp16 runs under autocast, which would round the products.
    with torch.autocast(values_TF.device.type, enabled=False):
        return torch.cat([chunk.float() @ signs_FK for chunk in chunks])


def sketch_parameter(values: Tensor) -> Tensor:
    """Return the sketch [T, K]: the longest dimension is projected, the others are the rows."""
    longest = values.shape.index(max(values.shape))
    return sketch(values.movedim(longest, -1).reshape(-1, values.shape[longest]))


@lru_cache(maxsize=32)
def _make_signs(first: int, number: int, device: torch.device) -> Tensor:
    """Return [F, K] of plus or minus 1 / sqrt(K), from bits of a hash of the feature's index."""
    index_F = torch.arange(first, first + number, device=device)
    bits_F = mix_bits(mix_bits(index_F ^ _KEY) ^ _KEY)
    bits_FK = (bits_F[:, None] >> torch.arange(NUM_SIGNS, device=device)) & 1
    signs_FK: Tensor = (2 * bits_FK - 1).float() / NUM_SIGNS**0.5
    return signs_FK
