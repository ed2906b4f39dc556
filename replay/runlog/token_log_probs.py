"""Store each action token's log-prob, so that runs are compared by token and not only by the sum of a row.

log_probs/rank0-pass000003.safetensors    by each rank, per pass: the rows concatenated
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from actor_init.spec import UsageError

FOLDER = "log_probs"
_NAME = "log_probs"


def write(folder: Path, index: int, rank: int, log_probs: Sequence[float | None]) -> None:
    """Write the log-probs of a pass; None stands for tokens that are no action tokens."""
    path = path_of(folder, index, rank)
    path.parent.mkdir(exist_ok=True)
    values = [value for value in log_probs if value is not None]
    values_N = torch.tensor(values, dtype=torch.float32, device="cpu")
    save_file({_NAME: values_N}, path)


def path_of(folder: Path, index: int, rank: int) -> Path:
    return folder / FOLDER / f"rank{rank}-pass{index:06}.safetensors"


def read(folder: Path, index: int, rank: int) -> Tensor:
    """Read what `write` wrote, [N] fp32. Raises UsageError if it is missing or damaged."""
    path = path_of(folder, index, rank)
    try:
        values_N: Tensor = load_file(path)[_NAME]
    except (OSError, KeyError, SafetensorError) as error:
        raise UsageError(f"{path} is missing or damaged: {error}. Try: the run again") from error
    return values_N


def compare(references: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[float, float, float, int]:
    """Compare the ranks that shared a pass in two runs, and return the pair that is farthest apart.

    Returns the mean absolute log-prob of both, the largest difference of a token, and the number of tokens.
    """
    return max(_compare_ranks(references, others), key=lambda distances: distances[2])


def _compare_ranks(references: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[tuple[float, float, float, int]]:
    for reference_N, other_N in product(references, others):
        if len(reference_N) != len(other_N):
            yield math.inf, math.inf, math.inf, len(reference_N)
            continue
        if not len(reference_N):
            yield 0.0, 0.0, 0.0, 0
            continue
        difference_N = torch.where(reference_N == other_N, 0.0, (reference_N.double() - other_N.double()).abs())
        difference_N[reference_N.isnan() & other_N.isnan()] = 0.0
        size, other_size = (float(values_N.double().abs().mean()) for values_N in (reference_N, other_N))
        yield size, other_size, float(difference_N.nan_to_num(nan=math.inf).max()), len(reference_N)
