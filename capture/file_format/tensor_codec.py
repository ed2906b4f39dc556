"""Turn a tensor into plain data, `{dtype, shape, encoding, data, crc32}`, and back, bit for bit.

`encoding` says how `data` was made, step by step: what an element was stored as, then what was done to the bytes.

    bits               eight elements a byte, the first in the lowest bit; for elements that are all 0 or 1
    uint8 ... int32    a narrower integer that holds every element
    <own dtype>        as it is, little-endian
    /shuffle           first every element's lowest byte, then every second byte, and so on
    /deflate           zlib

Token ids usually become `int32/shuffle/deflate`, a sixth of their int64 size. `crc32` is that of the
restored tensor's bytes, so it guards the encoding as well as the file.

Below stand the types of a capture's body, whose tensors are such plain data, and the check that what was read from a
file is a body.
"""

import ctypes
import math
import zlib
from collections.abc import Mapping
from types import UnionType
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from capture.file_format.micro_batch import CaptureError

# The most bytes that the tensors of one pass may have. It keeps reading any file below 1 GiB of memory.
MAX_TENSOR_BYTES = 256 * 2**20

_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", *_INTEGERS, "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    # float8_e8m0fnu came with torch 2.7.
    if hasattr(torch, name)
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDINARY_TYPES, _DENSE = (Tensor, torch.nn.Parameter), torch.strided
# The device is named wherever a tensor is made: a job may have set another default device.
_BITS = torch.arange(8, dtype=torch.uint8, device="cpu")
# Above this size the writer would fall behind the job at zlib's default level.
_QUICK_DEFLATE_BYTES = 4 * 2**20


def can_encode(tensor: Tensor) -> bool:
    """Tell whether it is an ordinary dense tensor with values, not distributed, sparse, quantized, meta or fake."""
    return (
        type(tensor) in _ORDINARY_TYPES
        and tensor.layout is _DENSE
        and tensor.dtype in _DTYPE_NAMES
        and not tensor.is_meta
    )


class EncodedTensor(TypedDict):
    """A tensor as it is pickled."""

    dtype: str
    shape: list[int]
    encoding: str
    data: bytes
    crc32: int


def encode_tensor(tensor: Tensor) -> EncodedTensor:
    """Encode a tensor of any shape and a dtype of DTYPES, on the CPU."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # torch calls a tensor of at most one element contiguous whatever its stride is, and refuses to view it as bytes
    # unless the stride is 1.
    flat = flat.as_strided(flat.shape, (1,))
    stored_as, stored = _narrow(flat)
    raw = view_bytes(stored)
    level = -1 if len(raw) <= _QUICK_DEFLATE_BYTES else 1
    choices: list[tuple[str, bytes | memoryview]] = [(stored_as, raw)]
    choices.append((f"{stored_as}/deflate", zlib.compress(raw, level)))
    if stored.element_size() > 1:
        shuffled = stored.view(torch.uint8).view(-1, stored.element_size()).T.contiguous().view(-1)
        choices.append((f"{stored_as}/shuffle/deflate", zlib.compress(view_bytes(shuffled), level)))
    encoding, data = min(choices, key=lambda choice: len(choice[1]))
    return {
        "dtype": _DTYPE_NAMES[tensor.dtype],
        "shape": list(tensor.shape),
        "encoding": encoding,
        "data": bytes(data),
        "crc32": zlib.crc32(view_bytes(flat)),
    }


def decode_tensors(records: Any, source: str) -> dict[str, Tensor]:
    """Decode the tensors of a file by name. Raises CaptureError before it begins if together they are too large."""
    if not isinstance(records, dict):
        raise CaptureError(f"{source}: tensors must be a dict by name, not {type(records).__name__}")
    num_bytes = sum(_check_record(record, f"{source}: tensor {name!r}") for name, record in records.items())
    check_total_bytes(num_bytes, source)
    return {name: _decode(records[name], f"{source}: tensor {name!r}") for name in records}


def check_total_bytes(num_bytes: int, source: str) -> None:
    if num_bytes > MAX_TENSOR_BYTES:
        raise CaptureError(f"{source}: {num_bytes:.4g} bytes of tensors in one pass; allowed are {MAX_TENSOR_BYTES}")


def count_bytes(shape: tuple[int, ...] | list[int], dtype: torch.dtype) -> int:
    """Compute a tensor's size. An empty dimension counts as one, which bounds sizes even without elements."""
    return math.prod(max(size, 1) for size in shape) * dtype.itemsize


def tensor_from_bytes(data: bytes | bytearray | memoryview, dtype: torch.dtype) -> Tensor:
    """Make a flat tensor with a copy of `data`."""
    # torch.frombuffer refuses an empty buffer.
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    return (torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else empty).view(dtype)


def _check_record(record: Any, label: str) -> int:
    """Check a tensor's record, and return the size of the tensor in bytes. Raises CaptureError."""
    kinds = {"dtype": str, "shape": list, "encoding": str, "data": bytes, "crc32": int}
    if not isinstance(record, dict) or {key: type(value) for key, value in record.items()} != kinds:
        raise CaptureError(f"{label}: must be a dict of {', '.join(kinds)}")
    if record["dtype"] not in DTYPES:
        raise CaptureError(f"{label}: unknown dtype {record['dtype'][:40]!r}; known are {', '.join(DTYPES)}")
    shape = record["shape"]
    if len(shape) > 16 or any(type(size) is not int or size < 0 for size in shape):
        raise CaptureError(f"{label}: shape must be up to 16 sizes of 0 or more, not {str(shape)[:80]}")
    return count_bytes(shape, DTYPES[record["dtype"]])


def _decode(record: EncodedTensor, label: str) -> Tensor:
    """Undo the steps of the encoding, last one first, and compare with the checksum. Raises CaptureError."""
    dtype, num_elements = DTYPES[record["dtype"]], math.prod(record["shape"])
    stored_as, *steps = record["encoding"].split("/")
    allowed = ["bits", *_INTEGERS] if record["dtype"] in _INTEGERS else ["bits"] if dtype == torch.bool else []
    if dtype != torch.bool:
        allowed.append(record["dtype"])
    if stored_as not in allowed or steps not in ([], ["deflate"], ["shuffle", "deflate"]):
        raise CaptureError(f"{label}: unknown encoding {record['encoding'][:40]!r} for {record['dtype']}")
    stored_dtype = torch.uint8 if stored_as == "bits" else DTYPES[stored_as]
    num_stored = -(-num_elements // 8) if stored_as == "bits" else num_elements
    num_bytes = num_stored * stored_dtype.itemsize
    data = _inflate(record["data"], num_bytes, label) if steps else record["data"]
    if len(data) != num_bytes:
        raise CaptureError(f"{label}: {len(data)} bytes of data; shape and dtype need {num_bytes}")
    is_shuffled = steps[:1] == ["shuffle"]
    stored = tensor_from_bytes(data, torch.uint8 if is_shuffled else stored_dtype)
    # Without this there would be three copies of a large tensor at once.
    del data
    if is_shuffled:
        stored = stored.view(stored_dtype.itemsize, -1).T.contiguous().view(-1).view(stored_dtype)
    if stored_as == "bits":
        stored = ((stored.unsqueeze(1) >> _BITS) & 1).view(-1)[:num_elements]
    restored = stored.to(dtype).contiguous()
    if zlib.crc32(view_bytes(restored)) != record["crc32"]:
        raise CaptureError(f"{label}: the checksum is wrong: the file is damaged. Delete it or copy it again")
    return restored.view(record["shape"])


def _inflate(data: bytes, num_bytes: int, label: str) -> bytes:
    """Inflate to at most one byte more than expected.

    Data that is not smaller than its result is refused: the writer stores it as it is, and much can inflate to nothing.
    """
    if len(data) >= num_bytes:
        raise CaptureError(f"{label}: {len(data)} compressed bytes for {num_bytes}: the file is damaged")
    inflate = zlib.decompressobj()
    try:
        inflated = inflate.decompress(data, num_bytes + 1)
    except zlib.error as error:
        raise CaptureError(f"{label}: compressed data is damaged ({error})") from None
    if not inflate.eof or inflate.unused_data:
        raise CaptureError(f"{label}: compressed data does not end after {num_bytes} bytes, as shape and dtype say")
    return inflated


def _narrow(flat: Tensor) -> tuple[str, Tensor]:
    """Choose the narrowest storage that holds every element; returns its name in `encoding` and the elements in it."""
    if flat.dtype == torch.bool:
        return "bits", _pack_bits(flat)
    name = _DTYPE_NAMES[flat.dtype]
    if name not in _INTEGERS or not len(flat):
        return name, flat
    low, high = (int(bound) for bound in flat.aminmax())
    if low >= 0 and high <= 1:
        return "bits", _pack_bits(flat)
    for narrower in _INTEGERS[: _INTEGERS.index(name)]:
        bounds = torch.iinfo(DTYPES[narrower])
        if bounds.min <= low and high <= bounds.max:
            return narrower, flat.to(DTYPES[narrower])
    return name, flat


def _pack_bits(flat: Tensor) -> Tensor:
    """Put eight elements of 0 or 1 into a byte, the first in the lowest bit."""
    padded = torch.nn.functional.pad(flat.to(torch.uint8), (0, -len(flat) % 8))
    return (padded.view(-1, 8) << _BITS).sum(dim=1, dtype=torch.uint8)


def view_bytes(flat: Tensor) -> memoryview:
    """View the bytes of a contiguous tensor, without a copy or NumPy: they live as long as it does."""
    num_bytes = flat.numel() * flat.element_size()
    if not num_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(flat.data_ptr())).cast("B")


# The body names no class: it is plain data of the types below. What is in tensors, call facts and states of generators
# is checked where it is used.

Output = int | float | str | list[int] | list[float]


class PythonState(TypedDict):
    """The state of Python's random generator."""

    version: int
    state: bytes
    gauss: float | None


class TorchState(TypedDict, total=False):
    """The states of torch's random generators; that of the device only where the job had one."""

    cpu: bytes
    cuda: bytes


class NumpyState(TypedDict):
    """The state of NumPy's random generator."""

    algorithm: str
    keys: bytes
    position: int
    has_gauss: int
    gauss: float


class RandomStates(TypedDict, total=False):
    """The states of the random generators before a pass; empty where they were not recorded."""

    python: PythonState
    torch: TorchState
    numpy: NumpyState


class TrainingMode(TypedDict):
    """Whether the model was in training mode in a pass.

    parts  names of the modules whose flag `training` is another one than that of the module around them
    """

    model: bool
    parts: list[str]


class WrittenOrigin(TypedDict):
    """Where a pass came from, without its file's name."""

    rank: int | None
    world_size: int | None
    step: int | None
    time: str | None
    model_name: str | None
    versions: dict[str, str]


class _RequiredParts(TypedDict):
    """The parts that every body has."""

    tensors: dict[str, EncodedTensor]
    call_facts: dict[str, object]
    left_out: dict[str, str]
    trains: bool
    origin: WrittenOrigin


class CaptureBody(_RequiredParts, total=False):
    """What a capture holds, besides its head; `CapturedCall` says what each part is."""

    outputs: dict[str, Output]
    random: RandomStates
    random_after: dict[str, bytes]
    training: TrainingMode
    environment: dict[str, str]
    weights: str
    optimizer_step: int
    step: str
    notes: dict[str, EncodedTensor]
    recording: str
    routes: dict[str, EncodedTensor]


_ORIGIN_TYPES: Mapping[str, type | UnionType] = {
    "rank": int | None,
    "world_size": int | None,
    "step": int | None,
    "time": str | None,
    "model_name": str | None,
    "versions": dict,
}
_TRAINING_TYPES: Mapping[str, type | UnionType] = {"model": bool, "parts": list}
_REQUIRED_TYPES: Mapping[str, type | UnionType] = {
    "tensors": dict,
    "call_facts": dict,
    "left_out": dict,
    "trains": bool,
    "origin": dict,
}
_OPTIONAL_TYPES: Mapping[str, type | UnionType] = {
    "outputs": dict,
    "random": dict,
    "random_after": dict,
    "training": dict,
    "environment": dict,
    "weights": str,
    "optimizer_step": int,
    "step": str,
    "notes": dict,
    "recording": str,
    "routes": dict,
}


def is_body(content: object) -> bool:
    """Tell whether what was read has the parts of a body, each of its type."""
    parts = content if isinstance(content, dict) else {}
    types = {**_REQUIRED_TYPES, **{name: type_ for name, type_ in _OPTIONAL_TYPES.items() if name in parts}}
    return _has_types(content, types) and _has_types(parts["origin"], _ORIGIN_TYPES)


def check_body(content: object, source: str) -> CaptureBody:
    """Check the values in what was read, for which `is_body` holds, and return it.

    Raises CaptureError if a part holds something else than it may.
    """
    body = cast(CaptureBody, content)
    text_parts: tuple[Mapping[str, object], ...] = (
        body["left_out"],
        body["origin"]["versions"],
        body.get("environment", {}),
    )
    for texts in text_parts:
        if not all(isinstance(value, str) for value in texts.values()):
            raise CaptureError(
                f"{source}: left_out, versions and environment must be texts, not {describe_type(texts)}"
            )
    if not all(isinstance(states, dict) for states in body.get("random", {}).values()):
        raise CaptureError(f"{source}: random must hold a dict for each generator, not {describe_type(body['random'])}")
    if not all(isinstance(mark, bytes) for mark in body.get("random_after", {}).values()):
        raise CaptureError(f"{source}: random_after must hold bytes, not {describe_type(body['random_after'])}")
    training = body.get("training")
    if training is not None and not (
        _has_types(training, _TRAINING_TYPES) and all(isinstance(part, str) for part in training["parts"])
    ):
        raise CaptureError(f"{source}: training must hold a flag and names of parts, not {describe_type(training)}")
    if not all(_is_output(value) for value in body.get("outputs", {}).values()):
        raise CaptureError(
            f"{source}: outputs must be numbers, texts or lists of numbers, not {describe_type(body['outputs'])}"
        )
    return body


def describe_type(value: object) -> str:
    return f"a dict of {str(sorted(value))[:200]}" if isinstance(value, dict) else f"a {type(value).__name__}"


def _is_output(value: object) -> bool:
    return isinstance(value, int | float | str) or (
        isinstance(value, list) and all(type(number) in (int, float) for number in value)
    )


def _has_types(content: object, types: Mapping[str, type | UnionType]) -> bool:
    return (
        isinstance(content, dict)
        and content.keys() == types.keys()
        and all(isinstance(content[name], type_) for name, type_ in types.items())
    )
