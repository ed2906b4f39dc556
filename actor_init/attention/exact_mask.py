"""Replace what tokens see in every mask that a model requests from transformers, within a context.

    with see_exactly(MaskTable(visible_BSS=table)):
        backend.forward(inputs, train_mode=True)

For kernels that read masks: sdpa, eager and flex. A model that makes its masks without transformers' functions sees
what it would see anyway: whoever uses this has to check by a table of what the model should see that the table is read.

Shape letters: B rows, S tokens a row, twice: queries and keys.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import AttentionMaskInterface

from actor_init.declarations.attention import list_forms


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskTable:
    """What each token sees.

    visible_BSS     True where a query (the first S) sees a key (the second)
    ignores_window  layers with a sliding window see as far as the others
    window_change   by how many tokens the sliding window of such layers is wider; negative: narrower
    """

    visible_BSS: Tensor
    ignores_window: bool = False
    window_change: int = 0

    def find_window(self, local_size: int | None) -> int | None:
        """Find how many tokens a layer sees at most; `local_size` is what its mask was requested with."""
        return None if local_size is None or self.ignores_window else local_size + self.window_change


_TABLE: ContextVar[MaskTable | None] = ContextVar("mask_table", default=None)


@contextmanager
def see_exactly(table: MaskTable | None) -> Iterator[None]:
    """Let tokens see what `table` says within this context; None changes nothing."""
    _register_mask_functions()
    token = _TABLE.set(table)
    try:
        yield
    finally:
        _TABLE.reset(token)


def _register_mask_functions() -> None:
    """Wrap transformers' makers of masks, once; outside of `see_exactly` they do as before."""
    makers = AttentionMaskInterface()
    for form in list_forms():
        if form.reads_mask and not getattr(makers[form.name], "_reads_tables", False):
            AttentionMaskInterface.register(form.name, _with_table(makers[form.name]))


def _with_table(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_mask(*args: Any, **kwargs: Any) -> Any:
        table = _TABLE.get()
        if table is None:
            return make(*args, **kwargs)
        window = table.find_window(kwargs.get("local_size"))

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            is_visible = table.visible_BSS[row, query, key]
            return is_visible if window is None else is_visible & (query - key < window)

        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "use_vmap": False}
        return make(*args, **{**kwargs, **skips, "mask_function": sees, "attention_mask": None})

    # The wrapper of `mask_between_documents` may stand inside of this one, and must not be put around it once more.
    make_mask._reads_tables = True  # type: ignore[attr-defined]
    make_mask._masks_documents = getattr(make, "_masks_documents", False)  # type: ignore[attr-defined]
    return make_mask
