"""Read pickled tensors by stand-ins for the functions that they name, none of which is ever called.

A tensor in a pickle names three. One of them, `torch.storage._load_from_bytes`, unpickles again whatever it is given.
Each has a stand-in here that reads what a saved tensor needs and refuses the rest. The inner bytes are what
`torch.save(storage, _use_new_zipfile_serialization=False)` writes: four pickles (magic number, protocol, system,
storage), a fifth with the storage's key, then the number of elements and the elements themselves.

The unversioned dumps of OpenRLHF's actor are read here too: a pickled dict of tensors and call facts, without a
checksum.
"""

import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capture.file_format.micro_batch import CaptureError, MicroBatch, Origin, micro_batch_from_call
from capture.file_format.safe_unpickler import copy_plain, load_plain
from capture.file_format.tensor_codec import MAX_TENSOR_BYTES, count_bytes, tensor_from_bytes

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
# The most bytes before a storage's elements; torch writes about 240.
_MAX_HEAD_BYTES = 1024
_MAX_STORAGES = 1000
_STORAGE_DTYPES = {
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
}
STORAGE_NAMES = {("torch", name): dtype for name, dtype in _STORAGE_DTYPES.items()}
_HEADER = (
    b"\x80\x02\x8a\x0a" + _MAGIC_NUMBER.to_bytes(10, "little") + b".\x80\x02M" + struct.pack("<H", _PROTOCOL) + b"."
)


@dataclass(frozen=True)
class _Storage:
    """The elements of a storage, as a flat tensor."""

    elements: Tensor


@dataclass(frozen=True)
class _NoHooks:
    """Stands for the empty OrderedDict of backward hooks."""


class SavedTensors:
    """Makes tensors for the three names in a pickled tensor, and counts their bytes.

    All raise CaptureError for what torch does not write, and for more than `max_storages` or `max_bytes`.
    """

    def __init__(self, source: str, *, max_bytes: int = MAX_TENSOR_BYTES, max_storages: int = _MAX_STORAGES) -> None:
        self.source = source
        self.max_bytes = max_bytes
        self.max_storages = max_storages
        self.num_storages = 0
        self.num_tensor_bytes = 0

    @property
    def names(self) -> dict[tuple[str, str], Any]:
        """Return the table of names for `load_plain`."""
        return {
            ("torch._utils", "_rebuild_tensor_v2"): self.rebuild_tensor,
            ("torch.storage", "_load_from_bytes"): self.load_storage,
            ("collections", "OrderedDict"): self.make_no_hooks,
        }

    def make_no_hooks(self, *members: Any) -> _NoHooks:
        if members:
            raise CaptureError(f"{self.source}: an OrderedDict with items; a dump holds only empty ones")
        return _NoHooks()

    def load_storage(self, *arguments: Any) -> _Storage:
        match arguments:
            case (bytes(data),) if data.startswith(_HEADER):
                return self._read_storage(memoryview(data))
        raise CaptureError(f"{self.source}: refused: bytes that are no storage saved by torch in its legacy form")

    def _read_storage(self, data: memoryview) -> _Storage:
        """Read a storage and what stands before its elements: torch's legacy form, as in this module's docstring."""
        self._count_storage()
        head = data[:_MAX_HEAD_BYTES]
        system, end = load_plain(head, source=self.source, start=len(_HEADER))
        description, end = load_plain(
            head, source=self.source, start=end, names=STORAGE_NAMES, persistent_load=PersistentId
        )
        keys, end = load_plain(head, source=self.source, start=end)
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise CaptureError(f"{self.source}: a storage that was not written by a little-endian machine")
        match description:
            case PersistentId(("storage", torch.dtype() as dtype, str(key), str(), int(num_elements), None)):
                pass
            case _:
                raise CaptureError(f"{self.source}: refused: saved bytes that describe no storage")
        if keys != [key] or len(data) - end < 8:
            raise CaptureError(f"{self.source}: a storage without its elements: the file is damaged")
        (num_written,) = struct.unpack_from("<q", data, end)
        if num_written != num_elements:
            raise CaptureError(f"{self.source}: a storage of {num_elements} elements says {num_written}: it is damaged")
        return self._make_storage(data[end + 8 :], dtype, num_elements)

    def make_storage(self, elements: bytes, dtype: torch.dtype, num_elements: int) -> _Storage:
        """Make a storage whose elements stand in a file of their own, as in `torch.save`'s zip."""
        self._count_storage()
        return self._make_storage(memoryview(elements), dtype, num_elements)

    def _count_storage(self) -> None:
        self.num_storages += 1
        if self.num_storages > self.max_storages:
            raise CaptureError(f"{self.source}: more than {self.max_storages} tensors; a dump holds fewer")

    def _make_storage(self, elements: memoryview, dtype: torch.dtype, num_elements: int) -> _Storage:
        if len(elements) != num_elements * dtype.itemsize:
            raise CaptureError(
                f"{self.source}: a storage of {num_elements} elements of {dtype} comes with {len(elements)} bytes"
            )
        self._charge(len(elements))
        if dtype == torch.bool and bytes(elements).strip(b"\0\1"):
            raise CaptureError(f"{self.source}: a bool storage with bytes other than 0 and 1: the file is damaged")
        return _Storage(tensor_from_bytes(elements, dtype))

    def rebuild_tensor(self, *arguments: Any) -> Tensor:
        match arguments:
            case (_Storage(elements), int(offset), tuple(size), tuple(stride), bool(), _NoHooks()) if (
                _are_sizes(offset, *size, *stride) and len(size) == len(stride) <= 16
            ):
                pass
            case _:
                raise CaptureError(f"{self.source}: refused: a tensor that was not saved as torch saves tensors")
        num_bytes = count_bytes(size, elements.dtype)
        self._check_size(num_bytes)
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if 0 not in size and last >= len(elements):
            raise CaptureError(
                f"{self.source}: a tensor of shape {list(size)}, strides {list(stride)} and offset {offset} "
                f"reaches beyond its storage of {len(elements)} elements"
            )
        if 0 in size:
            return torch.empty(size, dtype=elements.dtype)
        view = elements.as_strided(size, stride, offset)
        if not view.is_contiguous():
            self._charge(num_bytes)
        return view.contiguous()

    def _charge(self, num_bytes: int) -> None:
        """Count bytes of tensors that are made: a file may name the same saved bytes many times."""
        self.num_tensor_bytes += num_bytes
        self._check_size(self.num_tensor_bytes)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise CaptureError(f"{self.source}: {num_bytes:.4g} bytes of tensors; allowed are {self.max_bytes}")


@dataclass(frozen=True)
class PersistentId:
    value: Any


def _are_sizes(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def read_legacy_dump(data: bytes, source: str) -> MicroBatch:
    """Read a dump of OpenRLHF's actor, given as the bytes of the whole file.

    Raises CaptureError for everything that is no such dump.
    """
    dump, end = load_plain(data, source=source, names=SavedTensors(source).names)
    if end != len(data):
        raise CaptureError(f"{source}: {len(data) - end} bytes after the end of the dump: the file is damaged")
    if not isinstance(dump, dict):
        raise CaptureError(f"{source}: a pickled {type(dump).__name__} is no micro-batch; a dump is a dict")
    tensors = {name: value for name, value in dump.items() if isinstance(value, Tensor)}
    try:
        facts = {name: copy_plain(value) for name, value in dump.items() if name not in tensors}
    except TypeError as error:
        raise CaptureError(f"{source}: holds a {error}; a dump holds tensors and plain data") from None
    return _micro_batch_from_dump(tensors, facts, source)


def _micro_batch_from_dump(tensors: dict[str, Tensor], facts: dict[str, object], source: str) -> MicroBatch:
    trains = facts.get("return_output")
    rank, time = facts.pop("rank", None), facts.pop("timestamp", None)
    if type(trains) is not bool or "sequences" not in tensors:
        raise CaptureError(
            f"{source}: a pickle without `format`, and not a dump of OpenRLHF's actor either: such a dump has a tensor "
            f"`sequences` and `return_output` True or False; this has {str(sorted((*tensors, *facts)))[:200]}"
        )
    if not isinstance(rank, int | None) or not isinstance(time, str | None):
        raise CaptureError(f"{source}: rank must be an integer and timestamp a text, not {rank!r:.40} and {time!r:.40}")
    written_shape = [facts.pop(name, None) for name in ("batch_size", "seq_len")]
    for size, written_size in zip(tensors["sequences"].shape, written_shape, strict=False):
        if written_size not in (None, size):
            raise CaptureError(
                f"{source}: batch_size, seq_len say {written_shape}, "
                f"the token ids have shape {list(tensors['sequences'].shape)}: the file is damaged"
            )
    origin = Origin(source=source, rank=rank, time=time)
    return micro_batch_from_call(tensors, facts, trains=trains, origin=origin)
