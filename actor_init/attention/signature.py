"""Give kernels the signature that transformers calls them with, in one place.

Shape letters: T tokens of a packed row, H query heads, K key-value heads, D head_dim.
"""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, NamedTuple

from torch import Tensor, nn

from actor_init.declarations.attention.declaration import KernelLimits
from actor_init.toggles import UsageError

AttentionFunction = Callable[..., tuple[Tensor, None]]  # with transformers' signature


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


def window(asked: Asked) -> tuple[int, int]:
    """Return how many tokens each sees before and after itself; -1: all of them."""
    return (asked.sliding_window or 0) - 1, 0


def refuser(limits: KernelLimits) -> Callable[[Asked, int, int], None]:
    """Return a function of what is asked, of rows of `longest` tokens and of the heads' size.

    It raises UsageError where that is more than `limits` allow. A compiled block's graph holds no more of it than
    guards: what it reads is text and numbers.
    """
    lacks, max_head_dim, refusal = tuple(limits.missing_features.items()), limits.max_head_dim, limits.refusal

    def refuse(asked: Asked, longest: int, head_dim: int) -> None:
        lacking = [words for name, words in lacks if _is_given(name, getattr(asked, name), longest)]
        if max_head_dim is not None and head_dim > max_head_dim:
            lacking.append(f"heads of more than {max_head_dim} (here {head_dim})")
        if lacking:
            words = " and no ".join(lacking).format(window=asked.sliding_window, longest=longest)
            raise UsageError(refusal.format(lacking=words))

    return refuse


def _is_given(name: str, value: Any, longest: int) -> bool:
    if name == "sliding_window":
        return value is not None and value < longest
    return value is not None if name == "s_aux" else bool(value)


def named_like(kernel: AttentionFunction, attend: Callable[..., Any]) -> AttentionFunction:
    """Give a kernel the name and the docstring of `attend`, which it calls; its signature stays its own."""
    named = update_wrapper(kernel, attend, assigned=("__name__", "__qualname__", "__doc__"))
    del named.__wrapped__
    return named


def for_packed_rows(
    limits: KernelLimits,
) -> Callable[[Callable[[Tensor, Tensor, Tensor, Tensor, int, Asked], Tensor]], AttentionFunction]:
    """Give a function transformers' attention signature, which makes it a kernel for one packed row.

    The function takes query [T, H, D], key and value [T, K, D], the documents' borders (int32 [documents + 1]), the
    longest document's tokens, and what is asked; it returns [T, H, D]. The kernel takes query [1, H, T, D], key and
    value [1, K, T, D], and returns [1, T, H, D]. It raises UsageError for what `limits` say that it lacks.
    """
    refuse = refuser(limits)

    def with_signature(attend: Callable[[Tensor, Tensor, Tensor, Tensor, int, Asked], Tensor]) -> AttentionFunction:
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
            asked = asked_of(**more)
            refuse(asked, max_length_q, query.shape[3])
            out = attend(
                query.squeeze(0).transpose(0, 1),
                key.squeeze(0).transpose(0, 1),
                value.squeeze(0).transpose(0, 1),
                cu_seq_lens_q,
                max_length_q,
                asked,
            )
            return out.unsqueeze(0), None

        return named_like(kernel, attend)

    return with_signature
