"""Store each action token's log-prob, so that runs are compared by token and not only by the sum of a row.

log_probs/rank0-pass000003.safetensors    by each rank, per pass: the rows concatenated

Beside each log-prob stand the token's row and column in the captured rows, and what the job recorded of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from actor_init.spec import UsageError

FOLDER = "log_probs"
_NAME, _ROWS, _COLUMNS, _RECORDED = "log_probs", "rows", "columns", "recorded"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlaces:
    """Where the log-probs of a pass stand in its captured rows, and what the job recorded there.

    num_rows      rows that the log-probs are of, each of as many tokens
    first_column  of a row, which the first of these tokens has
    recorded      the job's log-prob by row and column, as far as it recorded them
    """

    num_rows: int
    first_column: int
    recorded: Mapping[tuple[int, int], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogProb:
    """The log-prob of one token in the replay, and in the job; None: the job recorded none."""

    row: int
    column: int
    log_prob: float
    recorded: float | None


def write_token_log_probs(
    folder: Path, index: int, rank: int, log_probs: Sequence[float | None], places: TokenPlaces | None = None
) -> None:
    """Write the log-probs of a pass, row by row; None stands for tokens that are no action tokens."""
    path = path_of(folder, index, rank)
    path.parent.mkdir(exist_ok=True)
    values_by_number = {number: value for number, value in enumerate(log_probs) if value is not None}
    tensors = {_NAME: torch.tensor(list(values_by_number.values()), dtype=torch.float32, device="cpu")}
    if places is not None:
        row_length = len(log_probs) // max(places.num_rows, 1)
        pairs = [divmod(number, row_length) for number in values_by_number]
        located = [(row, column + places.first_column) for row, column in pairs]
        recorded = [places.recorded.get(place, math.nan) for place in located]
        tensors[_ROWS] = torch.tensor([row for row, _ in located], dtype=torch.int32, device="cpu")
        tensors[_COLUMNS] = torch.tensor([column for _, column in located], dtype=torch.int32, device="cpu")
        tensors[_RECORDED] = torch.tensor(recorded, dtype=torch.float32, device="cpu")
    save_file(tensors, path)


def path_of(folder: Path, index: int, rank: int) -> Path:
    return folder / FOLDER / f"rank{rank}-pass{index:06}.safetensors"


def read(folder: Path, index: int, rank: int) -> Tensor:
    """Read what `write_token_log_probs` wrote, [N] fp32. Raises UsageError if they are missing or damaged."""
    [values_N] = _read(folder, index, rank, (_NAME,))
    return values_N


def read_tokens(folder: Path, index: int, rank: int) -> list[TokenLogProb]:
    """Read the tokens of a pass with their places. Raises UsageError if they are missing or damaged."""
    tensors = _read(folder, index, rank, (_ROWS, _COLUMNS, _NAME, _RECORDED))
    return [
        TokenLogProb(row=row, column=column, log_prob=log_prob, recorded=None if math.isnan(recorded) else recorded)
        for row, column, log_prob, recorded in zip(*(tensor.tolist() for tensor in tensors), strict=True)
    ]


def _read(folder: Path, index: int, rank: int, names: Sequence[str]) -> list[Tensor]:
    path = path_of(folder, index, rank)
    try:
        tensors = load_file(path)
        return [tensors[name] for name in names]
    except (OSError, KeyError, SafetensorError) as error:
        raise UsageError(f"{path} is missing or damaged: {error}. Try: the run again") from error


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
        yield size, other_size, float(difference_N.nan_to_num(nan=math.inf, posinf=math.inf).max()), len(reference_N)
