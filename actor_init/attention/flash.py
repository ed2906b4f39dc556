"""Run flash-attn 2 on packed rows. Raises UsageError for what its declaration says that it lacks."""

from torch import Tensor

from actor_init.attention.signature import Asked, for_packed_rows, window
from actor_init.declarations.attention.flash import FLASH_ATTN


@for_packed_rows(FLASH_ATTN)
def flash_attn_varlen(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, asked: Asked) -> Tensor:
    """Run flash-attn on one packed row.

    It is a shorter path than transformers' own, and compiles once for all layers: transformers' reads `layer_idx`, for
    which dynamo compiles a graph per layer.
    """
    from flash_attn import flash_attn_varlen_func

    out: Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        borders,
        borders,
        longest,
        longest,
        dropout_p=asked.dropout,
        softmax_scale=asked.scaling,
        causal=True,
        window_size=window(asked),
        softcap=asked.softcap or 0.0,
    )
    return out
