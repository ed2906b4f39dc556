"""Describe the gradient of each parameter at an optimizer step in few numbers: its norm, and elements from all over it.

A single element of a bf16 gradient is off by much of its own size. Over many elements such errors average out, so the
direction and the length of a signature are sharp where its elements are not. The parameter's name and full shape alone
decide which elements are taken, so they are the same ones in any sharding, in the job and in a replay.
"""

import base64
import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# So many elements of each parameter's gradient are its signature.
MAX_SIGNATURE_ELEMENTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientSignature:
    """What one rank had of the gradient of one parameter: the norm, and elements that lie `stride` apart.

    name     name of the parameter, as `strip_wrappers` gives it
    shape    shape of the whole parameter, also where it is sharded
    is_part  the rank had a part: the squares of all ranks' norms add up, and other ranks have other elements
    start    number of the first element in the whole parameter, flattened
    values   may be empty: of a part that holds none of the elements, or whose place in the parameter is not known
    """

    name: str
    shape: tuple[int, ...]
    is_part: bool
    norm: float
    start: int
    stride: int
    values: tuple[float, ...]

    def to_plain(self) -> list[Any]:
        """Return it as a list for JSON: the numbers as fp32, little-endian, in base64."""
        numbers = array("f", [_clamp_to_fp32(number) for number in (self.norm, *self.values)])
        text = base64.b64encode(numbers.tobytes()).decode()
        return [self.name, list(self.shape), self.is_part, self.start, self.stride, text]

    @classmethod
    def from_plain(cls, plain: Any) -> "GradientSignature":
        """Read what `to_plain` returned. Raises TypeError or ValueError for anything else."""
        name, shape, is_part, start, stride, text = plain
        numbers = array("f")
        numbers.frombytes(base64.b64decode(text, validate=True))
        norm, *values = numbers
        if not isinstance(name, str) or type(is_part) is not bool:
            raise TypeError
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stride)):
            raise TypeError
        if values and start + (len(values) - 1) * stride >= math.prod(shape):
            raise ValueError
        return cls(
            name=name,
            shape=tuple(shape),
            is_part=is_part,
            norm=norm,
            start=start,
            stride=stride,
            values=tuple(values),
        )


def _clamp_to_fp32(number: float) -> float:
    """Return infinity for what fp32 cannot hold: `array` raises for it."""
    return math.copysign(math.inf, number) if abs(number) > 3.4028234e38 else number


def choose_signature_elements(name: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Choose the elements of a parameter's signature in the flattened parameter: the first, their distance, how many.

    The distance has no divisor in common with the row's length, so that the elements lie in many rows and columns.
    """
    size = math.prod(shape)
    count = min(MAX_SIGNATURE_ELEMENTS, size)
    if not count:
        return 0, 1, 0
    width = shape[-1] if shape else 1
    stride = max(size // count, 1)
    while stride > 1 and math.gcd(stride, width) > 1:
        stride -= 1
    digest = hashlib.blake2b(f"signature {name} {list(shape)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (size - (count - 1) * stride), stride, count


def find_held_elements(start: int, stride: int, count: int, first: int, end: int) -> tuple[int, int]:
    """Find which of a signature's elements lie in the part `first` to `end` of a parameter: the first, and how many."""
    skipped = max(-((start - first) // stride), 0)
    last = min((end - 1 - start) // stride, count - 1)
    return skipped, max(last - skipped + 1, 0)
