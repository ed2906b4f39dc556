"""Declare what `--attention auto` takes where a capture names no kernel: in which order, and from which length on."""

from collections.abc import Sequence
from dataclasses import replace

from actor_init.declarations.attention.cudnn import CUDNN, RING_CUDNN
from actor_init.declarations.attention.declaration import AttentionForm
from actor_init.declarations.attention.flash import FLASH
from actor_init.declarations.attention.plain import EAGER, SDPA
from actor_init.declarations.attention.varlen import VARLEN

# The order holds for forward and backward of a row of several documents on an H200 (benchmarks/RESULTS.md). cuDNN needs
# a call for each document, which is faster for long ones alone.
KERNELS_FASTEST_FIRST = (FLASH, VARLEN, CUDNN)
RING_KERNELS_FASTEST_FIRST = (FLASH, SDPA)
# Every device has these; the first that goes with the model is taken.
PLAIN = (SDPA, EAGER)
# Below this, planning a call for each new length is not worth what cuDNN saves: for 8,192 tokens 2.8 of 6.7 ms a layer
# on an H200 (benchmarks/RESULTS.md).
LONG = 4096
# Tokens on each rank. Below that, merging the ring's blocks costs as much as cuDNN saves.
RING_LONG = 8192


def pair_with_cudnn(form: AttentionForm, cudnn: AttentionForm, long: int, unit: str) -> AttentionForm:
    """Return `form` with cuDNN's for a row of one document of `long` tokens or more; `unit` says which tokens."""

    def plan_calls(rows: int, num_tokens: int, lengths: Sequence[int]) -> set[tuple[int, int]]:
        return {(1, num_tokens)} if len(lengths) == 1 and num_tokens >= long else set()

    return replace(
        form,
        name=f"{form.name}_or_cudnn",
        limits=cudnn.limits,
        plan_calls=plan_calls,
        description=f"{form.name}, {cudnn.name} for rows of one document of {long:,} {unit} or more",
    )


# Pairs of a kernel for documents, or for slices, and cuDNN for a row of one long document; by the former's name.
WITH_CUDNN = {
    kernel.packed.name: pair_with_cudnn(kernel.packed, CUDNN.packed, LONG, "tokens")
    for kernel in KERNELS_FASTEST_FIRST
    if kernel is not CUDNN
}
RING_WITH_CUDNN = {
    kernel.slices.name: pair_with_cudnn(kernel.slices, RING_CUDNN, RING_LONG, "tokens a rank")
    for kernel in RING_KERNELS_FASTEST_FIRST
    if kernel.slices is not None
}
