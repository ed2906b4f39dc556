"""Hash element numbers into random values: the same on every device, for any part of a parameter.

    compute_values(torch.arange(4), (1, 2), 0.02)  # elements 0 to 3, with the keys of a name

`compute_values` is the definition, in int64, and is used for a few elements. `fill` computes the same in 32 bits, which
wrap around, in place, on pieces that fit a cache: on a CPU in numpy, whose loops free the interpreter's lock, in as
many threads as torch may use; elsewhere in torch.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

# Two keys of 32 bits.
Keys = tuple[int, int]

_MULTIPLIER = 0x45D9F3B
_MASK_32 = 0xFFFFFFFF
# Elements that are filled at once. They are powers of two, so that all indices of a piece have the same high word.
# A piece on the CPU is so small that torch does not split it over threads, which would wait for other processes.
_PIECE_ON_CPU = 1 << 15
_PIECE = 1 << 22
# A thread fills a span before it reports.
_SPAN = 1 << 20


def compute_values(index: Tensor, keys: Keys, std: float) -> Tensor:
    """Return fp32 values of mean 0 and standard deviation `std`, one for each int64 index."""
    bits = mix_bits(mix_bits((index & _MASK_32) ^ keys[0]) ^ (index >> 32) ^ keys[1])
    bound = std * math.sqrt(3)
    return bits.to(torch.float32) * (2 * bound / 2**32) - bound


def mix_bits(bits: Tensor) -> Tensor:
    """Hash 32-bit integers held in int64. The multiplier is below 2**31, so nothing overflows on any device.

    The hash is Thomas Mueller's, from https://stackoverflow.com/a/12996028.
    """
    for _ in range(2):
        bits = ((bits >> 16) ^ bits) * _MULTIPLIER & _MASK_32
    return (bits >> 16) ^ bits


def fill(flat: Tensor, keys: Keys, std: float, on_progress: Callable[[int], None]) -> None:
    """Write the values (see `compute_values`) of 0, 1, ..., rounded to bf16, into the one-dimensional `flat`.

    Calls `on_progress` with the number of elements filled since the last call.
    """
    if flat.device.type != "cpu":
        for start in range(0, flat.numel(), _PIECE):
            piece = flat[start : start + _PIECE]
            piece.copy_(compute_on_device(start, piece.numel(), flat.device, keys, std).to(torch.bfloat16))
            on_progress(piece.numel())
        return
    spans = range(0, flat.numel(), _SPAN)

    def fill_span(start: int) -> int:
        span = flat[start : start + _SPAN]
        fill_on_cpu(span, start, keys, std)
        return span.numel()

    for num_filled in _run_in_threads(fill_span, spans):
        on_progress(num_filled)


def _run_in_threads(work: Callable[[int], int], starts: range) -> Iterator[int]:
    num_threads = min(torch.get_num_threads(), len(starts))
    if num_threads <= 1:
        yield from map(work, starts)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        yield from pool.map(work, starts)


def fill_on_cpu(span: Tensor, begin: int, keys: Keys, std: float) -> None:
    """Fill `span`, whose first element has the number `begin`, with what `compute_values` returns, in bf16's values."""
    scale, bound = _compute_scale_and_bound(std)
    numbers = np.arange(min(_PIECE_ON_CPU, span.numel()), dtype=np.uint32)
    all_bits, all_shifted = np.empty_like(numbers), np.empty_like(numbers)
    all_floats = np.empty(numbers.size, np.float32)
    sixteen, multiplier = np.uint32(16), np.uint32(_MULTIPLIER)
    for start in range(0, span.numel(), _PIECE_ON_CPU):
        piece = span[start : start + _PIECE_ON_CPU]
        size, first = piece.numel(), begin + start
        bits, shifted, floats = all_bits[:size], all_shifted[:size], all_floats[:size]
        np.add(numbers[:size], np.uint32(first & _MASK_32), out=bits)
        for key in (keys[0], (first >> 32) ^ keys[1]):
            np.bitwise_xor(bits, np.uint32(key), out=bits)
            for _ in range(2):
                np.right_shift(bits, sixteen, out=shifted)
                np.bitwise_xor(bits, shifted, out=bits)
                np.multiply(bits, multiplier, out=bits)
            np.right_shift(bits, sixteen, out=shifted)
            np.bitwise_xor(bits, shifted, out=bits)
        np.copyto(floats, bits, casting="unsafe")
        np.multiply(floats, scale, out=floats)
        np.subtract(floats, bound, out=floats)
        piece.copy_(torch.from_numpy(floats).to(torch.bfloat16))


def compute_on_device(first: int, count: int, device: torch.device, keys: Keys, std: float) -> Tensor:
    """Return what `compute_values` does, in torch's int32, whose right shift copies the sign, which is masked away."""
    scale, bound = _compute_scale_and_bound(std)
    bits = torch.arange(count, dtype=torch.int32, device=device).add_(_to_signed(first & _MASK_32))
    shifted = torch.empty_like(bits)
    for key in (keys[0], (first >> 32) ^ keys[1]):
        bits.bitwise_xor_(_to_signed(key))
        for number in range(3):
            torch.bitwise_right_shift(bits, 16, out=shifted)
            bits.bitwise_xor_(shifted.bitwise_and_(0xFFFF))
            if number < 2:
                bits.mul_(_MULTIPLIER)
    return bits.to(torch.int64).bitwise_and_(_MASK_32).to(torch.float32).mul_(float(scale)).sub_(float(bound))


def _compute_scale_and_bound(std: float) -> tuple[np.float32, np.float32]:
    """Return the two numbers of `compute_values` as torch rounds them."""
    bound = std * math.sqrt(3)
    return np.float32(2 * bound / 2**32), np.float32(bound)


def _to_signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits
