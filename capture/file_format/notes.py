"""Decide which tensors a job may note for a pass, by their shape.

A noted tensor belongs to the pass's rows of token ids [B, S]: one number, one for each row or each pair of rows, or one
for each of a row's last tokens (the token's own advantage or log-prob, in the token's own place).
"""

from collections.abc import Sequence

SHAPES = "a number, [rows], [rows / 2] for pairs, or [rows, up to as many as a row has tokens]"


def misfit(shape: Sequence[int], *, rows: int, row_length: int) -> str | None:
    """Say why a tensor of `shape` does not fit a pass with `rows` of `row_length` tokens; None if it does."""
    match tuple(shape):
        case () | (1,):
            return None
        case (length,) if length in (rows, rows / 2) or (rows == 1 and length <= row_length):
            return None
        case (length, width) if length == rows and 0 < width <= row_length:
            return None
    return f"noted with shape {list(shape)}; allowed for token ids of shape {[rows, row_length]}: {SHAPES}"
