"""Run torch's own attention of documents of any length."""

from inspect import signature
from typing import Any

from torch import Tensor

from actor_init.attention.signature import Asked, for_packed_rows, window
from actor_init.declarations.attention.varlen import LIMITS


@for_packed_rows(LIMITS)
def torch_varlen_attn(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, asked: Asked) -> Tensor:
    """Run torch.nn.attention.varlen on one packed row. Raises UsageError for what its declaration says it lacks."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 groups queries by their shapes; later releases need an argument for it
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        borders,
        borders,
        longest,
        longest,
        scale=asked.scaling,
        window_size=window(asked),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out
