"""Declare what `--attention auto` takes where a capture names no kernel: in which order, and from which length on."""

from collections.abc import Sequence
from dataclasses import replace

from actor_init.declarations.attention.cudnn import CUDNN, RING_CUDNN
from actor_init.declarations.attention.declaration import Form
from actor_init.declarations.attention.flash import FLASH
from actor_init.declarations.attention.plain import EAGER, SDPA
from actor_init.declarations.attention.varlen import VARLEN

# For forward and backward of a row of several documents on an H200 (benchmarks/RESULTS.md). cuDNN, a call a document,
# is faster for long ones alone.
FASTEST_FIRST = (FLASH, VARLEN, CUDNN)
RING_FASTEST_FIRST = (FLASH, SDPA)
PLAIN = (SDPA, EAGER)  # which every device has: the first that goes with the model
# From here on cuDNN saves a millisecond a layer and more on an H200: 2.9 of 6.7 for 8,192 tokens.
LONG = 4096
RING_LONG = 8192  # on each rank: below, merging blocks costs what they save


def pair_with_cudnn(form: Form, cudnn: Form, long: int, unit: str) -> Form:
    """Return `form` with cuDNN's for a row of one document of `long` tokens or more; `unit` says which tokens."""

    def planned(rows: int, num_tokens: int, lengths: Sequence[int]) -> set[tuple[int, int]]:
        return {(1, num_tokens)} if len(lengths) == 1 and num_tokens >= long else set()

    return replace(
        form,
        name=f"{form.name}_or_cudnn",
        limits=cudnn.limits,
        planned=planned,
        description=f"{form.name}, {cudnn.name} for rows of one document of {long:,} {unit} or more",
    )


# A kernel for documents, or for slices, and cuDNN for a row of one long document; by the former's name.
WITH_CUDNN = {
    kernel.packed.name: pair_with_cudnn(kernel.packed, CUDNN.packed, LONG, "tokens")
    for kernel in FASTEST_FIRST
    if kernel is not CUDNN
}
RING_WITH_CUDNN = {
    kernel.slices.name: pair_with_cudnn(kernel.slices, RING_CUDNN, RING_LONG, "tokens a rank")
    for kernel in RING_FASTEST_FIRST
    if kernel.slices is not None
}
