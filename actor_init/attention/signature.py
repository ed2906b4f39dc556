"""Give kernels the signature that transformers calls them with, in one place.

Shape letters: T tokens of a packed row, H query heads, K key-value heads, D head_dim.
"""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, NamedTuple

from torch import Tensor, nn

from actor_init.declarations.attention.declaration import KernelLimits
from actor_init.option_values import UsageError

# It has transformers' signature.
AttentionFunction = Callable[..., tuple[Tensor, None]]


class AttentionSettings(NamedTuple):
    """What a model asks of a kernel besides queries, keys and values, by transformers' names.

    scaling  of the scores; None: 1 / sqrt(D)
    s_aux    attention sinks
    """

    scaling: float | None = None
    dropout: float = 0.0
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None


def read_settings(
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> AttentionSettings:
    """Read the settings among all arguments that transformers gives a kernel."""
    return AttentionSettings(scaling, dropout, sliding_window, softcap, s_aux)


def compute_window_size(settings: AttentionSettings) -> tuple[int, int]:
    """Compute how many tokens each sees before and after itself; -1: all of them."""
    return (settings.sliding_window or 0) - 1, 0


def make_refusal(limits: KernelLimits) -> Callable[[AttentionSettings, int, int], None]:
    """Make a check of the settings, of rows of `longest` tokens and of the heads' size.

    It raises UsageError where that is more than `limits` allow. A compiled block's graph holds no more of it than
    guards: what it reads is text and numbers.
    """
    lacks, max_head_dim, refusal = tuple(limits.missing_features.items()), limits.max_head_dim, limits.refusal

    def refuse(settings: AttentionSettings, longest: int, head_dim: int) -> None:
        lacking = [words for name, words in lacks if _is_requested(name, getattr(settings, name), longest)]
        if max_head_dim is not None and head_dim > max_head_dim:
            lacking.append(f"heads of more than {max_head_dim} (here {head_dim})")
        if lacking:
            words = " and no ".join(lacking).format(window=settings.sliding_window, longest=longest)
            raise UsageError(refusal.format(lacking=words))

    return refuse


def _is_requested(name: str, value: Any, longest: int) -> bool:
    if name == "sliding_window":
        return value is not None and value < longest
    return value is not None if name == "s_aux" else bool(value)


def copy_name(kernel: AttentionFunction, attend: Callable[..., Any]) -> AttentionFunction:
    """Give a kernel the name and the docstring of `attend`, which it calls; its signature stays."""
    kernel = update_wrapper(kernel, attend, assigned=("__name__", "__qualname__", "__doc__"))
    del kernel.__wrapped__
    return kernel


def kernel_for_packed_rows(
    limits: KernelLimits,
) -> Callable[[Callable[[Tensor, Tensor, Tensor, Tensor, int, AttentionSettings], Tensor]], AttentionFunction]:
    """Give a function transformers' attention signature, which makes it a kernel for one packed row.

    The function takes query [T, H, D], key and value [T, K, D], the documents' borders (int32 [documents + 1]), the
    longest document's tokens, and the settings; it returns [T, H, D]. The kernel takes query [1, H, T, D], key and
    value [1, K, T, D], and returns [1, T, H, D]. It raises UsageError for what `limits` say that it lacks.
    """
    refuse = make_refusal(limits)

    def make_kernel(
        attend: Callable[[Tensor, Tensor, Tensor, Tensor, int, AttentionSettings], Tensor],
    ) -> AttentionFunction:
        def kernel(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            *,
            cu_seq_lens_q: Tensor,
            max_length_q: int,
            **options: Any,
        ) -> tuple[Tensor, None]:
            settings = read_settings(**options)
            refuse(settings, max_length_q, query.shape[3])
            out = attend(
                query.squeeze(0).transpose(0, 1),
                key.squeeze(0).transpose(0, 1),
                value.squeeze(0).transpose(0, 1),
                cu_seq_lens_q,
                max_length_q,
                settings,
            )
            return out.unsqueeze(0), None

        return copy_name(kernel, attend)

    return make_kernel
