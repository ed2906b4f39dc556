"""Keep packed documents apart in every mask that a model requests from transformers, within a context."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

from actor_init.declarations.attention import list_forms

_DOCUMENTS: ContextVar[Tensor | None] = ContextVar("documents", default=None)


@contextmanager
def mask_between_documents(document_1T: Tensor) -> Iterator[None]:
    """Keep documents apart in the masks that transformers makes within this context: no token sees another's.

    For models that do not hand their position ids to transformers' masks.
    """
    _register_mask_functions()
    token = _DOCUMENTS.set(document_1T)
    try:
        yield
    finally:
        _DOCUMENTS.reset(token)


def _register_mask_functions() -> None:
    """Wrap transformers' makers of masks, once; outside of `mask_between_documents` they do as before."""
    makers = AttentionMaskInterface()
    for form in list_forms():
        if form.reads_mask and not getattr(makers[form.name], "_masks_documents", False):
            AttentionMaskInterface.register(form.name, _with_documents(makers[form.name]))


def _with_documents(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_mask(*args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> Any:
        document_1T = _DOCUMENTS.get()
        if document_1T is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(document_1T))
            kwargs["allow_is_causal_skip"] = False
        return make(*args, mask_function=mask_function, **kwargs)

    make_mask._masks_documents = True  # type: ignore[attr-defined]
    return make_mask
