"""Make calls of format 1 from the rows of another project's dump.

Shape letters are those of `capture/file_format/micro_batch.py`: B rows, S tokens a row, A trailing tokens that the
action mask covers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from capture.facts import Setting
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import CaptureError, Origin
from capture.file_format.tensor_codec import DTYPES, MAX_TENSOR_BYTES

_MAX_TEXT_LENGTH = 200
_ARGUMENTS = ("sequences", "attention_mask", "action_mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpRows:
    """The rows of a dump: those of one rank, or of a whole step.

    tensors   by name, [rows, ...]: `sequences` [B, S], `attention_mask` [B, S], `action_mask` [B, A], and others
    facts     plain values that hold for every row
    left_out  reason by name of what is not taken over
    rank      None where the dump does not say
    """

    source: str
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None

    def make_calls(self, num_rows: int | None) -> Iterator[CapturedCall]:
        """Make micro-batches of `num_rows` consecutive rows, of which the last may have fewer; None: one of all rows.

        Raises CaptureError where a dump's tensors do not fit together, or do not fit into one micro-batch.
        """
        batch = self.tensors["sequences"]
        if batch.ndim != 2 or 0 in batch.shape:
            raise CaptureError(f"{self.source}: token ids of shape {list(batch.shape)}; expected [rows, tokens]")
        columns = {name: tensor for name, tensor in self.tensors.items() if _has_rows(tensor, len(batch))}
        without_rows = {name: describe_kind(self.tensors[name]) for name in self.tensors.keys() - columns.keys()}
        if lost := without_rows.keys() & set(_ARGUMENTS):
            raise CaptureError(
                f"{self.source}: {', '.join(sorted(lost))} does not have {len(batch)} rows, as token ids"
            )
        for start in range(0, len(batch), num_rows or len(batch)):
            rows = slice(start, start + (num_rows or len(batch)))
            tensors = {name: column[rows] for name, column in columns.items()}
            if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) > MAX_TENSOR_BYTES:
                raise _size_error(self.source, len(tensors["sequences"]), "")
            yield CapturedCall(
                tensors=tensors,
                call_facts={**self.facts, "first_row": start},
                left_out={**self.left_out, **without_rows},
                trains=True,
                origin=Origin(source=self.source, rank=self.rank),
            )


def cut_first_token(mask_BS: Tensor, name: str, source: str) -> Tensor:
    """Cut a mask of S tokens to the last S - 1: no model predicts the first. Raises CaptureError if that is set."""
    if mask_BS.ndim != 2 or mask_BS[:, :1].any():
        raise CaptureError(f"{source}: {name} must be of shape [rows, tokens], with no row's first token in it")
    return mask_BS[:, 1:]


def select_plain_facts(values: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return those of `values` that are numbers or short texts, and the names of the others with their kinds."""
    facts: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            continue
        is_number = value is None or type(value) in (bool, float) or (type(value) is int and abs(value) < 2**62)
        if is_number or (type(value) is str and len(value) <= _MAX_TEXT_LENGTH):
            facts[name] = value
        else:
            left_out[name] = describe_kind(value)
    return facts, left_out


def describe_kind(value: object) -> str:
    """Name a value's type; of a tensor its dtype and shape."""
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def pad_left(rows: Sequence[Tensor], width: int) -> Tensor:
    """Stack rows of at most `width` elements, with zeros before them. The caller has checked `width` x rows."""
    return torch.stack([pad(row, (width - len(row), 0)) for row in rows])


def check_size(num_rows: int, widths: Sequence[int], source: str) -> None:
    """Check that tensors of these widths, at eight bytes an element, fit into a micro-batch. Raises CaptureError."""
    if 8 * num_rows * math.fsum(widths) > MAX_TENSOR_BYTES:
        raise _size_error(source, num_rows, f" of {len(widths)} tensors, padded,")


def _size_error(source: str, num_rows: int, details: str) -> CaptureError:
    why = f": {num_rows} rows{details} hold more than the {MAX_TENSOR_BYTES} bytes that a micro-batch may have"
    return CaptureError(source, why, f"Try: {Setting('rows', max(1, num_rows // 8))}")


def _has_rows(tensor: Tensor, num_rows: int) -> bool:
    return tensor.ndim > 0 and len(tensor) == num_rows and tensor.dtype in DTYPES.values()
