"""Say how a model's log-probs are computed: from its head in chunks of tokens, or from whole logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {  # of one logit at a time, and of numbers
    "mul": torch.mul,
    "div": torch.div,
    "add": torch.add,
    "sub": torch.sub,
    "tanh": torch.tanh,
    "float": Tensor.float,
}
GIB = 1 << 30


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

    steps        what the model does to the head's logits, in order
    why_whole    why whole logits are computed; empty: log-probs are, in chunks of tokens, and no whole logits
    chunk_bytes  logits of a chunk; None: chosen by device
    """

    steps: tuple[LogitStep, ...] = ()
    why_whole: str = ""
    chunk_bytes: int | None = None

    @property
    def in_chunks(self) -> bool:
        return not self.why_whole

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes of a chunk's logits, on a GPU a 32nd of its memory at most.

        2 GiB are so many that an H200's matrix multiplications do not get slower.
        """
        if self.chunk_bytes is not None or device.type != "cuda":
            return self.chunk_bytes or GIB // 16
        share = int(torch.cuda.get_device_properties(device).total_memory) // 32
        # a power of two, so that devices of one size have equally many chunks
        return min(2 * GIB, 1 << (share.bit_length() - 1))

    @property
    def changes_values(self) -> bool:
        """Do the steps change a logit, beside its dtype?"""
        return any(step.function != "float" for step in self.steps)

    def applied(self, logits: Tensor) -> Tensor:
        """Return the model's logits, given the head's."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def describe(self) -> str:
        """Return the form in words, for run.json."""
        if self.why_whole:
            return f"whole logits ({self.why_whole})"
        return f"log-probs in chunks{''.join(f', {step.describe()}' for step in self.steps)}"
