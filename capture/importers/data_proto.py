"""Read verl's and ROLL's `DataProto`: a pickle with the tensors of a batch in a second one, saved by torch.

verl 0.9.1, `verl/protocol.py` (`DataProto.save_to_disk`; `RolloutSkip` writes `<step>/gen_batch.dp` with it). The
state is (batch, non_tensor_batch, meta_info). `batch` is the bytes of `torch.save` of a consolidated tensordict, or
with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy (sizes, device, {name: (dtype, shape, bytes as a NumPy array)}).
`response_mask` [B, A] covers a row's last A tokens; without one it is the attention mask there, as verl computes it.

ROLL 0.3.0, `roll/distributed/scheduler/protocol.py` (`rollout_mock` writes `train/step_<step>.pkl` with pickle). The
same with the bytes in a `BytesIO`, and since 0.3.0 `remote_batch` as the third of four. `response_mask` [B, S] covers
every token.

tensordict 0.15.3, `tensordict/_reductions.py`: a consolidated tensordict is one flat tensor of bytes, and for each
name (dtype, shape, first byte, end, padding).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import CaptureError
from capture.file_format.tensor_codec import DTYPES
from capture.importers.declaration import DumpFile, Importer, match_module
from capture.importers.dump_rows import DumpRows, cut_first_token, describe_kind, select_plain_facts
from capture.importers.record_pickle import TENSOR_BYTES_PER_FILE_BYTE, Array, Record, load_records
from capture.importers.torch_zip import load_torch_zip

VERL_CLASS = ("verl.protocol", "DataProto")
ROLL_CLASS = ("roll.distributed.scheduler.protocol", "DataProto")
_BYTES_IO = ("_io", "BytesIO")
_CONSOLIDATED = ("tensordict._reductions", "_rebuild_tensordict_files_consolidated")
_PARTS = "a part of input_ids"


def read_verl(dump: DumpFile, num_rows: int | None) -> Iterator[CapturedCall]:
    """Read verl's file. The step in its name is taken if the dump does not say one. Raises CaptureError."""
    tensors, left_out, meta = _read_columns(dump, VERL_CLASS)
    responses, mask = tensors.get("responses"), tensors.pop("response_mask", None)
    attention = tensors.get("attention_mask")
    if mask is None and attention is not None and responses is not None and responses.ndim == 2:
        mask = attention[:, -responses.shape[1] :]
    yield from _make_calls("verl", tensors, mask, left_out, meta, dump, num_rows)


def read_roll(dump: DumpFile, num_rows: int | None) -> Iterator[CapturedCall]:
    """Read ROLL's file in the same way."""
    tensors, left_out, meta = _read_columns(dump, ROLL_CLASS)
    mask = tensors.pop("response_mask", None)
    if mask is not None:
        mask = cut_first_token(mask, "response_mask", dump.source)
    yield from _make_calls("ROLL", tensors, mask, left_out, meta, dump, num_rows)


def _make_calls(
    project: str,
    tensors: dict[str, Tensor],
    mask_BA: Tensor | None,
    left_out: dict[str, str],
    meta: Mapping[Any, Any],
    dump: DumpFile,
    num_rows: int | None,
) -> Iterator[CapturedCall]:
    if "input_ids" not in tensors:
        raise CaptureError(f"{dump.source}: no input_ids in this DataProto; it has {str(sorted(tensors))[:200]}")
    for name in ("prompts", "responses"):
        if tensors.pop(name, None) is not None:
            left_out[name] = _PARTS
    arguments = {"sequences": tensors.pop("input_ids")}
    arguments |= {} if mask_BA is None else {"action_mask": mask_BA}
    facts, not_plain = select_plain_facts(meta)
    step = dump.step
    for name in ("global_steps", "global_step"):
        step = facts[name] if isinstance(facts.get(name), int) else step
    facts |= {"imported_from": project} | ({} if step is None else {"training_step": step})
    rows = DumpRows(source=dump.source, tensors=arguments | tensors, facts=facts, left_out=left_out | not_plain)
    yield from rows.make_calls(num_rows)


def _read_columns(dump: DumpFile, root: tuple[str, str]) -> tuple[dict[str, Tensor], dict[str, str], dict[Any, Any]]:
    """Return the tensors of all rows, what is no tensor, with its kind, and what holds for all rows."""
    data, source = dump.read(), dump.source
    match load_records(data, source=source, classes=(root, _BYTES_IO)):
        case Record(name, (), (batch, dict(others), dict(meta)) | (batch, dict(others), None, dict(meta))) if (
            name == ".".join(root)
        ):
            return *_read_tensors(batch, others, len(data), source), meta
    raise CaptureError(f"{source}: a pickle, but no {'.'.join(root)} as it is saved")


def _read_tensors(
    batch: Any, columns: Mapping[Any, Any], num_bytes: int, source: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors, left_out = _BatchReader(source, num_bytes).read(batch)
    for name, column in columns.items():
        if not isinstance(name, str) or name in tensors:
            raise CaptureError(f"{source}: non_tensor_batch has {str(name)[:40]!r}, which is no name or is there twice")
        tensor = column.to_tensor() if isinstance(column, Array) else None
        if tensor is None:
            left_out[name] = f"numpy array of {column.code[:8]}" if isinstance(column, Array) else describe_kind(column)
        else:
            tensors[name] = tensor
    return tensors, left_out


class _BatchReader:
    """Reads the tensors of one batch, and counts their bytes: they may share those of the file."""

    def __init__(self, source: str, num_bytes: int) -> None:
        self.source = source
        self.num_bytes_left = TENSOR_BYTES_PER_FILE_BYTE * num_bytes

    def read(self, batch: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return tensors by name, and what is no tensor, with its kind."""
        match batch:
            case Record("_io.BytesIO", (), (bytes(saved), int(), None)):
                return self._read_tensordict(saved)
            case bytes(saved):
                return self._read_tensordict(saved)
            case (_, _, dict(arrays)):
                return self._read_each(arrays, self._tensor_from_array)
            case None:
                raise CaptureError(f"{self.source}: a DataProto without tensors")
        raise CaptureError(f"{self.source}: a DataProto whose batch was not saved as verl or ROLL save it")

    def _read_tensordict(self, saved: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
        def record_consolidated(*arguments: Any) -> Record:
            return Record("consolidated", arguments)

        tensordict = load_torch_zip(saved, source=self.source, functions={_CONSOLIDATED: record_consolidated})
        match tensordict:
            case Record("consolidated", ({"leaves": dict(leaves), **others}, Tensor() as flat)) if (
                flat.ndim == 1 and flat.dtype == torch.uint8
            ):
                tensors, left_out = self._read_each(
                    leaves, lambda name, description: self._tensor_from_leaf(name, description, flat)
                )
                known_names = ("cls", "cls_metadata", "leaves", "non_tensors")
                nested = others.get("non_tensors")
                names_left_out = [
                    *(nested if isinstance(nested, dict) else ()),
                    *(name for name in others if name not in known_names),
                ]
                return tensors, left_out | {str(name)[:100]: "no tensor of the batch" for name in names_left_out}
        raise CaptureError(f"{self.source}: the batch is no consolidated tensordict; another form is not read")

    def _read_each(
        self, descriptions: Mapping[Any, Any], read_tensor: Callable[[str, Any], Tensor | None]
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Read each tensor by its description; where `read_tensor` returns None, the tensor is left out."""
        tensors: dict[str, Tensor] = {}
        left_out: dict[str, str] = {}
        for name, description in descriptions.items():
            if not isinstance(name, str):
                raise CaptureError(f"{self.source}: a tensor of the batch has a name that is no text")
            tensor = read_tensor(name, description)
            if tensor is None:
                left_out[name] = "a nested tensor"
            else:
                tensors[name] = tensor
        return tensors, left_out

    def _tensor_from_leaf(self, name: str, description: Any, flat: Tensor) -> Tensor | None:
        # Leaves of such names are the values, offsets and lengths of a nested tensor.
        if name.startswith("<NJT"):
            return None
        match description:
            case (str(dtype), list(shape), int(start), int(end), *_) if 0 <= start <= end <= len(flat):
                return self._tensor_from_bytes(flat[start:end], dtype.removeprefix("torch."), shape)
        raise CaptureError(f"{self.source}: a tensor that is not within the batch's bytes: the file is damaged")

    def _tensor_from_array(self, name: str, description: Any) -> Tensor | None:
        match description:
            case (str(dtype), Record("torch.Size", (tuple(shape),)), Array() as array):
                elements = array.to_tensor()
                if elements is not None and elements.dtype == torch.uint8:
                    return self._tensor_from_bytes(elements.view(-1), dtype, list(shape))
            case (str(), list()):
                return None
        raise CaptureError(f"{self.source}: a tensor that was not saved as verl saves it")

    def _tensor_from_bytes(self, data: Tensor, dtype_name: str, shape: list[Any]) -> Tensor:
        """Make a tensor from a copy of the bytes `data`, which may be followed by padding."""
        dtype = DTYPES.get(dtype_name)
        if dtype is None or len(shape) > 16 or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
            raise CaptureError(f"{self.source}: a tensor of {dtype_name[:20]!r} and shape {str(shape)[:80]}")
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(data):
            raise CaptureError(f"{self.source}: {len(data)} bytes are no {dtype} of shape {shape}")
        self.num_bytes_left -= num_bytes
        if self.num_bytes_left < 0:
            raise CaptureError(f"{self.source}: its tensors share more bytes than a dump's do")
        elements = data[:num_bytes].clone()
        if dtype == torch.bool and num_bytes and int(elements.max()) > 1:
            raise CaptureError(f"{self.source}: a bool tensor with bytes other than 0 and 1: the file is damaged")
        return elements.view(dtype).view(shape)


VERL = Importer(project="verl", suffixes=(".dp",), is_its=match_module(VERL_CLASS[0]), read=read_verl)
ROLL = Importer(project="roll", suffixes=(".pkl",), is_its=match_module(ROLL_CLASS[0]), read=read_roll)
