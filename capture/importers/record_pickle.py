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

MAX_INSTRUCTIONS = 2_000_000  # some ten seconds; a batch of a thousand rows with their texts has a tenth of them
MAX_TEXT_BYTES = 64 * 2**20
MAX_STORAGES = 100_000
TENSOR_BYTES_PER_FILE_BYTE = 8  # tensors may share bytes; no dump makes more of them than this

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

    def tensor(self) -> Tensor | None:
        """Copy it into a tensor; None if torch has no such elements, or if the bytes are not what the shape says."""
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
    others: Mapping[tuple[str, str], Any] | None = None,
) -> Any:
    """Read the pickle `data`, of which nothing may be left after its end.

    classes          (module, name) of classes that become a Record
    functions        stand-ins by (module, name), called with the pickle's arguments
    saved            reader of tensors, with its own limits
    persistent_load  what a persistent id stands for
    others           what (module, name) stands for where nothing is called

    Raises CaptureError for everything else.
    """
    saved = saved or saved_tensors(len(data), source)
    names = saved.names | _numpy_names(source) | dict(functions or {}) | dict(others or {})
    names |= {("torch", name): _recorder(f"torch.{name}") for name in ("Size", "device")}
    names |= {(module, name): _recorder(f"{module}.{name}") for module, name in classes}
    reader = _RecordReader(memoryview(data), 0, source, names, persistent_load)
    value = reader.run()
    if reader.position != len(data):
        raise CaptureError(f"{source}: {len(data) - reader.position} bytes after the end: the file is damaged")
    return value


def saved_tensors(num_bytes: int, source: str) -> SavedTensors:
    """Make a reader for the tensors of a file of `num_bytes`."""
    limit = TENSOR_BYTES_PER_FILE_BYTE * num_bytes
    return SavedTensors(source, max_bytes=limit, max_storages=MAX_STORAGES)


class _RecordReader(PickleReader):
    max_instructions = MAX_INSTRUCTIONS
    max_text_bytes = MAX_TEXT_BYTES

    def recall(self, index: int) -> Any:
        if index not in self.memo:
            raise self.error("a reference to something not seen before")
        return self.memo[index]

    def fill(self, items: list[Any], kind: type[list[Any]] | type[dict[str, Any]]) -> None:
        if kind is list or not self.stack or type(self.stack[-1]) is not dict:
            super().fill(items, kind)
            return
        if len(items) % 2 or not all(isinstance(key, _KEYS) for key in items[::2]):
            raise self.error("a dict with a key that is no text or number")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def step(self, instruction: bytes) -> None:
        if instruction == pickle.BUILD:
            state, built = self.pop(), self.pop((Record, Array, _Dtype))
            self.stack.append(self._built(built, state))
        else:
            super().step(instruction)

    def pushed(self, instruction: bytes) -> Any:
        match instruction:
            case pickle.NEWOBJ:
                return self.call()
            case pickle.BYTEARRAY8:
                return bytes(self.take(self.number("<Q")))
        return super().pushed(instruction)

    def _built(self, built: Record | Array | _Dtype, state: Any) -> Record | Array | _Dtype:
        match built, state:
            case Record(), _:
                built.state = state
            case _Dtype(code), (int(), str(order), *_):
                built.code = f">{code}" if order == ">" else code
            case Array(), (int(), tuple(shape), _Dtype(code), bool(is_fortran), data):
                plain = isinstance(data, bytes) and not (is_fortran and len(shape) > 1)
                built.code, built.shape, built.data = code, shape, data if plain else None
            case _:
                raise self.error("a state that is not one of NumPy's")
        return built


def _recorder(name: str) -> Callable[..., Record]:
    return lambda *arguments: Record(name, arguments)


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return all(type(value) is int and 0 <= value < 2**48 for value in values)


def _numpy_names(source: str) -> dict[tuple[str, str], Any]:
    """Make stand-ins for what NumPy 1 and 2 name in a pickled array, dtype or number, in protocols 4 and 5."""

    def refuse(what: str) -> CaptureError:
        return CaptureError(f"{source}: refused: {what} that was not saved as NumPy saves it")

    def dtype(*arguments: Any) -> _Dtype:
        match arguments:
            case (str(code), bool(), bool()):
                return _Dtype(code[:8])
        raise refuse("a dtype")

    def from_buffer(*arguments: Any) -> Array:
        match arguments:
            case (bytes(data), _Dtype(code), tuple(shape), "C"):
                return Array(code, shape, data)
            case (bytes(), _Dtype(code), tuple(shape), "F"):
                return Array(code, shape)
        raise refuse("an array")

    def scalar(*arguments: Any) -> int | float | bool | None:
        match arguments:
            case (_Dtype(code), bytes(data)) if (value := Array(code, (), data).tensor()) is not None:
                number: int | float | bool = value.item()
                return number
        return None

    names: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): _recorder("numpy.ndarray"),
        ("numpy", "dtype"): dtype,
    }
    for core in ("numpy.core", "numpy._core"):
        names[f"{core}.multiarray", "_reconstruct"] = lambda *arguments: Array()
        names[f"{core}.multiarray", "scalar"] = scalar
        names[f"{core}.numeric", "_frombuffer"] = from_buffer
    return names
