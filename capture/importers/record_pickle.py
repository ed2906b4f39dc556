"""Read the pickles of other projects: plain data, tensors, NumPy arrays, records of the classes that a table names.

Nothing is imported and nothing of the file is run: a class in the table stands for `Record`, which holds what the
pickle gave it; NumPy's arrays become `Array`, the bytes that they are. A name that is not in the table ends the
reading. Objects may be shared, so what is read is a graph: walk no deeper into it than its format goes.
"""

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capture.file_format.micro_batch import CaptureError
from capture.file_format.safe_unpickler import PickleReader
from capture.file_format.saved_tensors import SavedTensors
from capture.file_format.tensor_codec import tensor_from_bytes

# Reading so many takes some ten seconds; a batch of a thousand rows with their texts has a tenth of them.
MAX_INSTRUCTIONS = 2_000_000
MAX_TEXT_BYTES = 64 * 2**20
MAX_STORAGES = 100_000
# Tensors may share bytes of the file. No dump makes more bytes of tensors of a byte of the file than this.
TENSOR_BYTES_PER_FILE_BYTE = 8

_KEYS = (str, bytes, int, float, type(None))
_ARRAY_DTYPES = {"b1": torch.bool, "u1": torch.uint8, "f2": torch.float16, "f4": torch.float32, "f8": torch.float64} | {
    f"i{size}": getattr(torch, f"int{8 * size}") for size in (1, 2, 4, 8)
}


@dataclass(eq=False)
class Record:
    """An object of a class that was not imported: the arguments and the state that its pickle gave it."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(eq=False)
class Array:
    """A NumPy array. `code` is its dtype's, as `i8`; without one, or with `O8`, there are no plain elements."""

    code: str = ""
    shape: tuple[int, ...] = ()
    data: bytes | None = None

    def to_tensor(self) -> Tensor | None:
        """Copy it into a tensor; None if torch has no such elements, or if the bytes do not fit the shape."""
        dtype = _ARRAY_DTYPES.get(self.code)
        if dtype is None or self.data is None or len(self.shape) > 16 or not _are_sizes(self.shape):
            return None
        if math.prod(self.shape) * dtype.itemsize != len(self.data) or (self.code == "b1" and self.data.strip(b"\0\1")):
            return None
        return tensor_from_bytes(self.data, dtype).view(self.shape)


@dataclass(eq=False)
class _Dtype:
    code: str


def load_records(
    data: bytes,
    *,
    source: str,
    classes: tuple[tuple[str, str], ...] = (),
    functions: Mapping[tuple[str, str], Callable[..., Any]] | None = None,
    saved: SavedTensors | None = None,
    persistent_load: Callable[[Any], Any] | None = None,
    constants: Mapping[tuple[str, str], Any] | None = None,
) -> Any:
    """Read the pickle `data`, of which nothing may be left after its end.

    classes          (module, name) of classes that become a Record
    functions        stand-ins by (module, name), called with the pickle's arguments
    saved            reader of tensors, with its own limits
    persistent_load  returns what a persistent id stands for
    constants        what (module, name) stands for where nothing is called

    Raises CaptureError for everything else.
    """
    saved = saved or open_saved_tensors(len(data), source)
    names = saved.names | _numpy_names(source) | dict(functions or {}) | dict(constants or {})
    names |= {("torch", name): _make_recorder(f"torch.{name}") for name in ("Size", "device")}
    names |= {(module, name): _make_recorder(f"{module}.{name}") for module, name in classes}
    reader = _RecordReader(memoryview(data), 0, source, names, persistent_load)
    value = reader.run()
    if reader.position != len(data):
        raise CaptureError(f"{source}: {len(data) - reader.position} bytes after the end: the file is damaged")
    return value


def open_saved_tensors(num_bytes: int, source: str) -> SavedTensors:
    """Make a reader for the tensors of a file of `num_bytes`."""
    limit = TENSOR_BYTES_PER_FILE_BYTE * num_bytes
    return SavedTensors(source, max_bytes=limit, max_storages=MAX_STORAGES)


class _RecordReader(PickleReader):
    """Reads more than plain data: shared objects, dicts with keys of other kinds, and states of objects."""

    max_instructions = MAX_INSTRUCTIONS
    max_text_bytes = MAX_TEXT_BYTES

    def recall(self, index: int) -> Any:
        if index not in self.memo:
            raise self.error("a reference to something not seen before")
        return self.memo[index]

    def fill(self, values: list[Any], kind: type[list[Any]] | type[dict[str, Any]]) -> None:
        if kind is list or not self.stack or type(self.stack[-1]) is not dict:
            super().fill(values, kind)
            return
        if len(values) % 2 or not all(isinstance(key, _KEYS) for key in values[::2]):
            raise self.error("a dict with a key that is no text or number")
        self.stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def step(self, instruction: bytes) -> None:
        if instruction == pickle.BUILD:
            state, target = self.pop(), self.pop((Record, Array, _Dtype))
            self._set_state(target, state)
            self.stack.append(target)
        else:
            super().step(instruction)

    def read_value(self, instruction: bytes) -> Any:
        match instruction:
            case pickle.NEWOBJ:
                return self.call()
            case pickle.BYTEARRAY8:
                return bytes(self.take(self.read_number("<Q")))
        return super().read_value(instruction)

    def _set_state(self, target: Record | Array | _Dtype, state: Any) -> None:
        match target, state:
            case Record(), _:
                target.state = state
            case _Dtype(code), (int(), str(order), *_):
                target.code = f">{code}" if order == ">" else code
            case Array(), (int(), tuple(shape), _Dtype(code), bool(is_fortran), data):
                is_plain = isinstance(data, bytes) and not (is_fortran and len(shape) > 1)
                target.code, target.shape, target.data = code, shape, data if is_plain else None
            case _:
                raise self.error("a state that is not one of NumPy's")


def _make_recorder(name: str) -> Callable[..., Record]:
    """Return a stand-in for a class or function that keeps what it is called with."""
    return lambda *arguments: Record(name, arguments)


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return all(type(value) is int and 0 <= value < 2**48 for value in values)


def _numpy_names(source: str) -> dict[tuple[str, str], Any]:
    """Make stand-ins for what NumPy 1 and 2 name in a pickled array, dtype or number, in protocols 4 and 5."""

    def make_refusal(subject: str) -> CaptureError:
        return CaptureError(f"{source}: refused: {subject} that was not saved as NumPy saves it")

    def make_dtype(*arguments: Any) -> _Dtype:
        match arguments:
            case (str(code), bool(), bool()):
                return _Dtype(code[:8])
        raise make_refusal("a dtype")

    def make_array(*arguments: Any) -> Array:
        match arguments:
            case (bytes(data), _Dtype(code), tuple(shape), "C"):
                return Array(code, shape, data)
            case (bytes(), _Dtype(code), tuple(shape), "F"):
                return Array(code, shape)
        raise make_refusal("an array")

    def make_number(*arguments: Any) -> int | float | bool | None:
        match arguments:
            case (_Dtype(code), bytes(data)) if (value := Array(code, (), data).to_tensor()) is not None:
                number: int | float | bool = value.item()
                return number
        return None

    names: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): _make_recorder("numpy.ndarray"),
        ("numpy", "dtype"): make_dtype,
    }
    for core in ("numpy.core", "numpy._core"):
        names[f"{core}.multiarray", "_reconstruct"] = lambda *arguments: Array()
        names[f"{core}.multiarray", "scalar"] = make_number
        names[f"{core}.numeric", "_frombuffer"] = make_array
    return names
