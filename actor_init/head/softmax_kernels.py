"""Run Triton kernels: one reads a chunk's logits once, one writes their gradient over them, one scales gradients.

The size of a chunk is an argument of the kernels, not a constant, so each is compiled once for a dtype.

Shape letters: C tokens of a chunk, V vocabulary, or a rank's share of it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

# The logits that a program of a kernel handles at a time.
BLOCK = 4096
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
    WITH_ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    # The sum of x * exp(x - largest).
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logit = tl.load(start + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest, logit)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        rescale = tl.exp(largest - base)
        exponential = tl.exp(logit - base)
        total = total * rescale + exponential
        if WITH_ENTROPIES:
            weighted = weighted * rescale + tl.where(logit == float("-inf"), 0.0, logit) * exponential
        largest = new_largest
    row_max = tl.max(largest, axis=0)
    rescale = tl.exp(largest - row_max)
    row_sum = tl.sum(total * rescale, axis=0)
    tl.store(out_max + row, row_max)
    tl.store(out_sum + row, row_sum)
    tl.store(out_target + row, tl.load(start + tl.load(target + row)).to(tl.float32))
    if WITH_ENTROPIES:
        tl.store(out_weighted + row, tl.sum(weighted * rescale, axis=0) - row_max * row_sum)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    target,
    in_max,
    log_sum,
    gradient,
    target_gradient,
    entropy,
    entropy_gradient,
    row_stride,
    vocabulary,
    WITH_ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address = logits + row * row_stride + column
    logit = tl.load(address, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    log_prob = logit - tl.load(in_max + row) - tl.load(log_sum + row)
    factor = tl.zeros([BLOCK], tl.float32) + tl.load(gradient + row)
    if WITH_ENTROPIES:
        factor += (tl.where(logit == float("-inf"), 0.0, log_prob) + tl.load(entropy + row)) * tl.load(
            entropy_gradient + row
        )
    logit_gradient = -tl.exp(log_prob) * factor
    logit_gradient += tl.where(column == tl.load(target + row), tl.load(target_gradient + row), 0.0)
    tl.store(address, logit_gradient.to(logits.dtype.element_ty), mask=column < vocabulary)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_kernel(source, scale, out, number, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    address = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + address, mask=address < number).to(tl.float32) * tl.load(scale)
    tl.store(out + address, value.to(out.dtype.element_ty), mask=address < number)


def scale_gradient(source: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply `source`, which is contiguous, by the one number in `scale`, and round once to `dtype`; write it over
    `source` if that is its dtype.

    torch's own product of a bf16 tensor and an fp32 number takes four times as long.
    """
    out = source if source.dtype is dtype else torch.empty_like(source, dtype=dtype)
    if source.numel():
        with torch.cuda.device(source.device):
            kernel: Any = _scale_kernel[(triton.cdiv(source.numel(), BLOCK),)]
            kernel(source, scale, out, source.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)
        # As an operation of torch would do, so that autograd refuses a second backward over the changed values.
        increment_version(out)
    return out


def compute_row_sums(
    logits_CV: Tensor, target_C: Tensor, with_entropies: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute each row's maximum, sum of exp(x - maximum), x at the target, and, for entropies, the sum of
    exp(x - maximum) * (x - maximum); fp32.
    """
    rows, vocabulary = logits_CV.shape
    max_C, sum_C, target_logit_C, weighted_C = torch.empty(4, rows, dtype=torch.float32, device=logits_CV.device)
    if rows:
        with torch.cuda.device(logits_CV.device):
            kernel: Any = _row_sums_kernel[(rows,)]
            kernel(
                *(logits_CV, target_C, max_C, sum_C, target_logit_C, weighted_C, logits_CV.stride(0), vocabulary),
                WITH_ENTROPIES=with_entropies,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
    return max_C, sum_C, target_logit_C, weighted_C if with_entropies else None


def write_softmax_gradient(
    logits_CV: Tensor,
    target_C: Tensor,
    max_C: Tensor,
    log_sum_C: Tensor,
    gradient_C: Tensor,
    target_gradient_C: Tensor,
    entropy_C: Tensor | None,
    entropy_gradient_C: Tensor | None,
) -> Tensor:
    """Write the gradient of the logits over them, and return them; see chunks.py for the arguments."""
    rows, vocabulary = logits_CV.shape
    if rows:
        vectors = [
            max_C if vector is None else vector.contiguous()
            for vector in (max_C, log_sum_C, gradient_C, target_gradient_C, entropy_C, entropy_gradient_C)
        ]
        with torch.cuda.device(logits_CV.device):
            kernel: Any = _gradient_kernel[(rows, triton.cdiv(vocabulary, BLOCK))]
            kernel(
                *(logits_CV, target_C, *vectors, logits_CV.stride(0), vocabulary),
                WITH_ENTROPIES=entropy_gradient_C is not None,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
        # As an operation of torch would do, so that autograd refuses a second backward over the changed values.
        increment_version(logits_CV)
    return logits_CV
