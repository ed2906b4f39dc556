"""Triton kernels: one reads a chunk's logits once, one writes their gradient over them, one scales gradients.

The size of a chunk is no constant of any, so each is compiled once for a dtype.

Shape letters: C tokens of a chunk, V vocabulary, or a rank's share of it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

BLOCK = 4096  # logits that a program handles at a time
NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _row_sums_kernel(  # type: ignore[no-untyped-def]
    logits,
    target,
    out_max,
    out_sum,
    out_target,
    out_weighted,
    row_stride,
    vocabulary,
    ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)  # of x times exp(x - largest)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(start + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, x)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrunk = tl.exp(largest - base)
        raised = tl.exp(x - base)
        total = total * shrunk + raised
        if ENTROPIES:
            weighted = weighted * shrunk + tl.where(x == float("-inf"), 0.0, x) * raised
        largest = higher
    top = tl.max(largest, axis=0)
    shrunk = tl.exp(largest - top)
    whole = tl.sum(total * shrunk, axis=0)
    tl.store(out_max + row, top)
    tl.store(out_sum + row, whole)
    tl.store(out_target + row, tl.load(start + tl.load(target + row)).to(tl.float32))
    if ENTROPIES:
        tl.store(out_weighted + row, tl.sum(weighted * shrunk, axis=0) - top * whole)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    target,
    in_max,
    log_sum,
    gradient,
    onehot,
    entropy,
    of_entropy,
    row_stride,
    vocabulary,
    ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * row_stride + column
    x = tl.load(place, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    log = x - tl.load(in_max + row) - tl.load(log_sum + row)
    factor = tl.zeros([BLOCK], tl.float32) + tl.load(gradient + row)
    if ENTROPIES:
        factor += (tl.where(x == float("-inf"), 0.0, log) + tl.load(entropy + row)) * tl.load(of_entropy + row)
    found = -tl.exp(log) * factor
    found += tl.where(column == tl.load(target + row), tl.load(onehot + row), 0.0)
    tl.store(place, found.to(logits.dtype.element_ty), mask=column < vocabulary)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_kernel(source, scale, out, number, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + place, mask=place < number).to(tl.float32) * tl.load(scale)
    tl.store(out + place, x.to(out.dtype.element_ty), mask=place < number)


def scaled(source: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `source`, which is contiguous, times the one number in `scale`, rounded once to `dtype`; written over
    `source` if that is its dtype.

    torch's own product of a bf16 tensor and an fp32 number takes four times as long.
    """
    out = source if source.dtype is dtype else torch.empty_like(source, dtype=dtype)
    if source.numel():
        with torch.cuda.device(source.device):
            kernel: Any = _scale_kernel[(triton.cdiv(source.numel(), BLOCK),)]
            kernel(source, scale, out, source.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)
        increment_version(out)  # as torch's own would, so that a second backward is refused
    return out


def row_sums(shown_CV: Tensor, target_C: Tensor, entropies: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return each row's maximum, sum of exp(x - maximum), x at the target, and, for entropies, the sum of
    exp(x - maximum) * (x - maximum); fp32.
    """
    rows, vocabulary = shown_CV.shape
    max_C, sum_C, out_C, weighted_C = torch.empty(4, rows, dtype=torch.float32, device=shown_CV.device)
    if rows:
        with torch.cuda.device(shown_CV.device):
            kernel: Any = _row_sums_kernel[(rows,)]
            kernel(
                *(shown_CV, target_C, max_C, sum_C, out_C, weighted_C, shown_CV.stride(0), vocabulary),
                ENTROPIES=entropies,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
    return max_C, sum_C, out_C, weighted_C if entropies else None


def softmax_gradient(
    shown_CV: Tensor,
    target_C: Tensor,
    max_C: Tensor,
    log_sum_C: Tensor,
    gradient_C: Tensor,
    onehot_C: Tensor,
    entropy_C: Tensor | None,
    of_entropy_C: Tensor | None,
) -> Tensor:
    """Write the gradient of the logits over them, and return them; see chunks.py for the arguments."""
    rows, vocabulary = shown_CV.shape
    if rows:
        vectors = [
            max_C if one is None else one.contiguous()
            for one in (max_C, log_sum_C, gradient_C, onehot_C, entropy_C, of_entropy_C)
        ]
        with torch.cuda.device(shown_CV.device):
            kernel: Any = _gradient_kernel[(rows, triton.cdiv(vocabulary, BLOCK))]
            kernel(
                *(shown_CV, target_C, *vectors, shown_CV.stride(0), vocabulary),
                ENTROPIES=of_entropy_C is not None,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
        increment_version(shown_CV)  # as torch's own would, so that a second backward is refused
    return shown_CV
