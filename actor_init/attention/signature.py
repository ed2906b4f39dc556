"""Give kernels the signature that transformers calls them with, in one place.

Shape letters: T tokens of a packed row, H query heads, K key-value heads, D head_dim.
"""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, NamedTuple

from torch import Tensor, nn

Kernel = Callable[..., tuple[Tensor, None]]  # with transformers' signature


class Asked(NamedTuple):
    """What a model asks of a kernel besides queries, keys and values, by transformers' names."""

    scaling: float | None = None  # of the scores; None: 1 / sqrt(D)
    dropout: float = 0.0
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None  # attention sinks


def asked_of(
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Asked:
    """Return what was asked among all that transformers gives a kernel."""
    return Asked(scaling, dropout, sliding_window, softcap, s_aux)


def named_like(kernel: Kernel, attend: Callable[..., Any]) -> Kernel:
    """Give a kernel the name and the docstring of `attend`, which it calls; its signature stays its own."""
    named = update_wrapper(kernel, attend, assigned=("__name__", "__qualname__", "__doc__"))
    del named.__wrapped__
    return named


def for_packed_rows(attend: Callable[[Tensor, Tensor, Tensor, Tensor, int, Asked], Tensor]) -> Kernel:
    """Give `attend` transformers' attention signature, which makes it a kernel for one packed row.

    attend   takes query [T, H, D], key and value [T, K, D], the documents' borders (int32 [documents + 1]), the longest
             document's tokens, and what is asked; returns [T, H, D]
    Returns  a kernel that takes query [1, H, T, D], key and value [1, K, T, D], and returns [1, T, H, D].
    """

    def kernel(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        **more: Any,
    ) -> tuple[Tensor, None]:
        out = attend(
            query.squeeze(0).transpose(0, 1),
            key.squeeze(0).transpose(0, 1),
            value.squeeze(0).transpose(0, 1),
            cu_seq_lens_q,
            max_length_q,
            asked_of(**more),
        )
        return out.unsqueeze(0), None

    return named_like(kernel, attend)
