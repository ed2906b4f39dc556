"""Say in what form a model is run: how rows are laid out for it, and how log-probs are computed from its head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from actor_init.option_values import CompileLengths, Head

# Functions that take each logit by itself, and plain numbers.
FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "add": torch.add,
    "sub": torch.sub,
    "tanh": torch.tanh,
    "float": Tensor.float,
}
GIB = 1 << 30
KIND_WORDS = {
    Head.WHOLE: "whole logits",
    Head.CHUNKS: "log-probs in chunks",
    Head.LIGER: "log-probs by Liger's fused loss",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitStep:
    """One function of FUNCTIONS that a model applies to the logits of its head, such as a soft cap's tanh."""

    function: str
    numbers: tuple[float, ...] = ()

    def __call__(self, logits: Tensor) -> Tensor:
        return FUNCTIONS[self.function](logits, *self.numbers)

    def describe(self) -> str:
        return " ".join([self.function, *(f"{number:g}" for number in self.numbers)])


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadForm:
    """How log-probs are computed.

    kind         whole logits, chunks of tokens, or Liger's fused loss; the last two make no whole logits
    why          why this kind
    steps        what the model does to the head's logits, in order; not looked at for whole logits
    chunk_bytes  logits of a chunk; None: chosen by device
    compiled     the lengths that the loss of whole logits is compiled for; None: it is not compiled
    """

    kind: Head = Head.CHUNKS
    why: str = ""
    steps: tuple[LogitStep, ...] = ()
    chunk_bytes: int | None = None
    compiled: CompileLengths | None = None

    @property
    def is_whole(self) -> bool:
        return self.kind is Head.WHOLE

    def find_soft_cap(self) -> float | None:
        """Return the c of steps that are c * tanh(logits / c); None for steps that change no value.

        Raises ValueError, with the steps in words, for all others.
        """
        match [step for step in self.steps if step.function != "float"]:
            case []:
                return None
            case [
                LogitStep(function="div", numbers=(cap,)),
                LogitStep(function="tanh"),
                LogitStep(function="mul", numbers=(same,)),
            ] if cap == same:
                return cap
        raise ValueError(", ".join(step.describe() for step in self.steps))

    def choose_chunk_bytes(self, device: torch.device) -> int:
        """Return the bytes of a chunk's logits, on a GPU a 32nd of its memory at most.

        2 GiB are so many that an H200's matrix multiplications do not get slower.
        """
        if self.chunk_bytes is not None or device.type != "cuda":
            return self.chunk_bytes or GIB // 16
        share = int(torch.cuda.get_device_properties(device).total_memory) // 32
        # A power of two gives devices of about the same memory equally many chunks.
        return min(2 * GIB, 1 << (share.bit_length() - 1))

    @property
    def changes_values(self) -> bool:
        """Do the steps change a logit, beside its dtype?"""
        return any(step.function != "float" for step in self.steps)

    def apply_steps(self, logits: Tensor) -> Tensor:
        """Return the model's logits, given the head's."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def describe(self) -> str:
        """Return the form in words, with the reason."""
        words = ", ".join([KIND_WORDS[self.kind], *(step.describe() for step in self.steps)])
        words += ", the loss compiled" if self.compiled is not None else ""
        return f"{words} ({self.why})" if self.why else words


class DocumentBorders(StrEnum):
    """What tells a model where packed documents begin, beside position ids that start again.

    OWN      `cu_seq_lens_q` and its kin, which each kernel and layer may read
    MASK     those, and a mask that is put on every mask that the model requests from transformers
    NUMBERS  all these, and document numbers, which kernels of state-space layers read
    """

    OWN = "transformers' own"
    MASK = "a mask"
    NUMBERS = "a mask and seq_idx"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How rows are fed. Packed: joined into one row, with `borders`. Padded: as captured, or a document a row.

    as_captured  padded rows stay as they are; else each document is a row of its own, padded on the right
    why_unusual  the reason for a layout that is not the usual one; else empty
    """

    packs: bool
    borders: DocumentBorders = DocumentBorders.OWN
    as_captured: bool = True
    why_unusual: str = ""

    @property
    def joins_rows(self) -> bool:
        """Are a micro-batch's rows joined, if only to be parted at the borders of documents?"""
        return self.packs or not self.as_captured

    def describe(self) -> str:
        """Return the layout in words, with the reason if it is not the usual one."""
        words = "padded" if self.as_captured else "padded on the right, a document a row"
        if self.packs:
            words = (
                "packed" if self.borders is DocumentBorders.OWN else f"packed, documents kept apart by {self.borders}"
            )
        return f"{words} ({self.why_unusual})" if self.why_unusual else words
