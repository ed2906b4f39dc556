"""Say how a micro-batch's rows are laid out for a model, and what tells it where a document begins."""

from dataclasses import dataclass
from enum import StrEnum


class Borders(StrEnum):
    """What tells a model where packed documents begin, beside position ids that start again."""

    OWN = "transformers' own"  # `cu_seq_lens_q` and its kin, which each kernel and layer may read
    MASK = "a mask"  # put on every mask that the model asks transformers for
    NUMBERS = "a mask and seq_idx"  # document numbers, which kernels of state-space layers read


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How rows are fed. Packed: joined into one row, with `borders`. Padded: as captured, or a document a row."""

    packs: bool
    borders: Borders = Borders.OWN
    as_captured: bool = True  # padded rows; else each document is a row of its own, padded on the right
    why: str = ""  # not as usual

    @property
    def joins(self) -> bool:
        """Are a micro-batch's rows joined, if only to be parted at the borders of documents?"""
        return self.packs or not self.as_captured

    def describe(self) -> str:
        """Return the layout in words, with the reason if it is not the usual one."""
        words = "padded" if self.as_captured else "padded on the right, a document a row"
        if self.packs:
            words = "packed" if self.borders is Borders.OWN else f"packed, documents kept apart by {self.borders}"
        return f"{words} ({self.why})" if self.why else words
