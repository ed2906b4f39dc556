"""Keep packed documents apart in the masks of models that do not hand their position ids to transformers' masks.

Shape letters: D documents, T tokens of a packed row.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

from actor_init.declarations.attention import forms

_DOCUMENTS: ContextVar[Tensor | None] = ContextVar("documents", default=None)


def document_numbers(cu_seq_lens: Tensor, num_tokens: int) -> Tensor:
    """Return each token's document [1, T], int32, counted from 0. `cu_seq_lens` is [D + 1], int32."""
    places_T = torch.arange(num_tokens, device=cu_seq_lens.device, dtype=cu_seq_lens.dtype)
    return (torch.bucketize(places_T, cu_seq_lens, right=True, out_int32=True) - 1)[None]


@contextmanager
def documents_masked(document_1T: Tensor) -> Iterator[None]:
    """Keep documents apart in the masks that transformers makes within this context: no token sees another's."""
    _register()
    token = _DOCUMENTS.set(document_1T)
    try:
        yield
    finally:
        _DOCUMENTS.reset(token)


def _register() -> None:
    """Wrap transformers' makers of masks, which do as before outside of `documents_masked`."""
    makers = AttentionMaskInterface()
    for form in forms():
        if form.reads_mask and not getattr(makers[form.name], "_masks_documents", False):
            AttentionMaskInterface.register(form.name, _with_documents(makers[form.name]))


def _with_documents(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> Any:
        document_1T = _DOCUMENTS.get()
        if document_1T is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(document_1T))
            kwargs["allow_is_causal_skip"] = False
        return make(*args, mask_function=mask_function, **kwargs)

    made._masks_documents = True  # type: ignore[attr-defined]
    return made
