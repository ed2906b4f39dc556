"""Read the shapes of captured inputs, and count what a pass of each computes under a layout of rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from actor_init.inputs.documents import documents_of
from actor_init.inputs.packing import num_action_tokens
from capture.file_format.capture_file import read_call
from capture.file_format.micro_batch import CaptureError
from replay.options.loss import tokens_for
from replay.options.wording import in_flags


class Rows(StrEnum):
    """How rows are fed: what decides how many tokens a pass computes."""

    PACKED = "packed"
    PADDED = "padded"
    DOCUMENTS = "padded, a document a row"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Rows and tokens of one input; `number` is its place in the order in which a replay feeds the inputs."""

    number: int
    source: str
    trains: bool
    rows: int
    row_length: int  # padding included
    documents: Sequence[int]  # real tokens of each
    action_tokens: int  # that have a loss

    @property
    def real_tokens(self) -> int:
        return sum(self.documents)

    def fed_tokens(self, rows: Rows) -> int:
        """Return how many tokens the model computes."""
        match rows:
            case Rows.PACKED:
                return self.real_tokens
            case Rows.PADDED:
                return self.rows * self.row_length
            case Rows.DOCUMENTS:
                return len(self.documents) * max(self.documents)

    def longest_row(self, rows: Rows) -> int:
        """Return how many tokens a row has as it is fed."""
        match rows:
            case Rows.PACKED:
                return self.real_tokens
            case Rows.PADDED:
                return self.row_length
            case Rows.DOCUMENTS:
                return max(self.documents)

    def squared_rows(self, rows: Rows) -> int:
        """Return the sum of the rows' squared lengths: what attention computes under a mask, whatever it masks."""
        return self.fed_tokens(rows) * self.longest_row(rows)

    def squares(self, rows: Rows) -> int:
        """Return the sum of the squared lengths of what attention sees as a whole."""
        match rows:
            case Rows.PACKED:
                return sum(length**2 for length in self.documents)
            case Rows.PADDED:
                return self.rows * self.row_length**2
            case Rows.DOCUMENTS:
                return len(self.documents) * max(self.documents) ** 2


def read_shapes(paths: Sequence[Path], loss: str) -> tuple[list[Shape], list[tuple[Path, str]]]:
    """Return the shapes of the inputs that can be fed, and what is wrong with the others."""
    shapes: list[Shape] = []
    wrong: list[tuple[Path, str]] = []
    for number, path in enumerate(paths):
        try:
            batch = read_call(path).micro_batch()
            shapes.append(
                Shape(
                    number=number,
                    source=path.name,
                    trains=batch.trains,
                    rows=batch.num_rows,
                    row_length=batch.sequences_BS.shape[1],
                    documents=documents_of(batch).lengths(batch.attention_mask_BS).tolist() or [0],
                    action_tokens=num_action_tokens(tokens_for(loss, batch)),
                )
            )
        except CaptureError as error:
            wrong.append((path, in_flags(error)))
    return shapes, wrong


def rows_fed(fed: Iterable[tuple[Shape, int]]) -> Rows:
    """Find out how rows were fed from the tokens that were computed, a number for each shape. A ring pads a little."""
    pairs = list(fed)

    def distance(rows: Rows) -> int:
        return sum(abs(shape.fed_tokens(rows) - tokens) for shape, tokens in pairs)

    return min(Rows, key=distance)


def spread(shapes: Sequence[Shape], most: int) -> list[Shape]:
    """Choose at most so many shapes, evenly spread from the fewest real tokens to the most; return them by size."""
    by_size = sorted(shapes, key=lambda shape: (shape.real_tokens, shape.number))
    if len(by_size) <= most:
        return by_size
    if most == 1:
        return by_size[-1:]
    least, largest = by_size[0].real_tokens, by_size[-1].real_tokens
    left = list(by_size)
    chosen = [left.pop(0), left.pop(-1)]
    for place in range(1, most - 1):
        target = least + (largest - least) * place / (most - 1)
        chosen.append(left.pop(min(range(len(left)), key=lambda at: abs(left[at].real_tokens - target))))
    return sorted(chosen, key=lambda shape: (shape.real_tokens, shape.number))
