"""Read NeMo-RL's training data: JSON lines, one a row.

NeMo-RL 0.7.0, `nemo_rl/algorithms/grpo.py` (`train_data_step<step>.jsonl`) and `nemo_rl/utils/logger.py`
(`log_batched_dict_as_jsonl`); token ids are there since 0.6.0. Each value is a list with one member, the row's value:

    token_ids, token_loss_mask, advantages, generation_logprobs, prev_logprobs    [[...]], one for each of S tokens
    input_lengths, sample_loss_mask, rewards, filtered_rewards                    [number]
    content, agent_ref                                                            texts, which are left out

A row is padded on the right up to S; its first `input_lengths` tokens are real. The action mask is `token_loss_mask`
without the first token, which no model predicts, and empty for a row that `sample_loss_mask` takes out.
"""

import io
import json
from array import array
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import CaptureError, as_mask
from capture.importers.declaration import DumpFile, Importer
from capture.importers.dump_rows import DumpRows, cut_first_token

MAX_LINE_BYTES = 32 * 2**20
# The most names that a row may have.
MAX_VALUES = 100
_INTEGERS = ("token_ids", "token_loss_mask", "input_lengths")


def read_nemo_rl(dump: DumpFile, num_rows: int | None) -> Iterator[CapturedCall]:
    """Read a file. Raises CaptureError."""
    source, step = dump.source, dump.step
    columns, left_out = _read_columns(dump.read(), source)
    if "token_ids" not in columns:
        raise CaptureError(
            f"{source}: no token_ids, but {str(sorted(columns | left_out))[:200]}. NeMo-RL logs them since 0.6.0, and "
            "not for distillation"
        )
    tensors = {name: _stack(name, rows, source) for name, rows in columns.items() if name != "idx"}
    tensors = {name: tensor.squeeze(1) if tensor.shape[1] == 1 else tensor for name, tensor in tensors.items()}
    sequences_BS = tensors["sequences"] = tensors.pop("token_ids")
    if sequences_BS.ndim != 2:
        raise CaptureError(f"{source}: rows of one token, which have nothing to predict")
    if (lengths_B := tensors.pop("input_lengths", None)) is not None:
        tensors["attention_mask"] = torch.arange(sequences_BS.shape[1]) < lengths_B.view(-1, 1)
    if (mask_BS := tensors.pop("token_loss_mask", None)) is not None:
        mask_BA = as_mask("token_loss_mask", cut_first_token(mask_BS, "token_loss_mask", source), source)
        sample_mask_B = tensors.get("sample_loss_mask", torch.ones(len(mask_BA)))
        tensors["action_mask"] = mask_BA & (sample_mask_B != 0).view(-1, 1)
    facts = {"imported_from": "NeMo-RL"} | ({} if step is None else {"training_step": step})
    yield from DumpRows(source=source, tensors=tensors, facts=facts, left_out=left_out).make_calls(num_rows)


def _read_columns(data: bytes, source: str) -> tuple[dict[str, list["array[Any]"]], dict[str, str]]:
    """Return what every row has as numbers, by name, and what is no number, with its kind."""
    columns: dict[str, list[array[Any]]] = {}
    left_out: dict[str, str] = {}
    number = 0
    for number, line in enumerate(io.BytesIO(data), start=1):
        for name, value in _parse_row(line, f"{source}: line {number}").items():
            unwrapped = value[0] if isinstance(value, list) and len(value) == 1 else value
            numbers = _read_numbers(unwrapped, whole=name in _INTEGERS)
            if numbers is None:
                left_out[name] = "a text" if isinstance(unwrapped, str) else type(unwrapped).__name__
            else:
                columns.setdefault(name, []).append(numbers)
        if len(columns) + len(left_out) > 2 * MAX_VALUES:
            raise CaptureError(f"{source}: line {number}: more names than the {MAX_VALUES} that rows may have together")
    for name in [name for name, rows in columns.items() if len(rows) != number or name in left_out]:
        left_out[name] = "numbers in some rows only"
        del columns[name]
    return columns, left_out


def _parse_row(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise CaptureError(f"{where}: more than {MAX_LINE_BYTES} bytes")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"{where}: not JSON: {str(error)[:100]}") from None
    if not isinstance(row, dict) or len(row) > MAX_VALUES:
        raise CaptureError(f"{where}: no object of up to {MAX_VALUES} values")
    return row


def _read_numbers(value: Any, *, whole: bool) -> "array[Any] | None":
    """Read a number or a list of numbers; None if it is neither, or if they have to be whole and are not."""
    values = value if isinstance(value, list) else [value]
    if not all(type(number) in (bool, float) or (type(number) is int and abs(number) < 2**53) for number in values):
        return None
    if whole and not all(abs(number) < 2**53 and number == int(number) for number in values):
        return None
    return array("q", map(int, values)) if whole else array("d", values)


def _stack(name: str, rows: list["array[Any]"], source: str) -> Tensor:
    """Stack rows of equally many numbers."""
    if len({len(row) for row in rows}) > 1 or not len(rows[0]):
        raise CaptureError(f"{source}: {name[:40]} is not as long in every row, or empty; NeMo-RL pads them")
    dtype = torch.int64 if rows[0].typecode == "q" else torch.float64
    stacked = torch.stack([torch.frombuffer(row, dtype=dtype) for row in rows])
    return stacked if name in _INTEGERS else stacked.float()


NEMO_RL = Importer(
    project="nemo-rl",
    suffixes=(".jsonl",),
    is_its=lambda start: start.startswith(b"{"),
    read=read_nemo_rl,
)
