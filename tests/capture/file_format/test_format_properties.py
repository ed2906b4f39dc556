"""Properties of the file format, for values that Hypothesis makes up: the tensor codec and the safe unpickler."""

import math
import pickle
import struct
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from capture.file_format.micro_batch import CaptureError
from capture.file_format.safe_unpickler import MAX_DEPTH, MAX_FLOATS_AT_ONCE, load_plain
from capture.file_format.tensor_codec import DTYPES, decode_tensors, encode_tensor

ON_A_BUSY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SHAPES = st.lists(st.integers(0, 4), max_size=4)
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=20) | st.binary()
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=20,
)


@st.composite
def draw_tensor(draw: st.DrawFn) -> Tensor:
    """Draw a tensor of any dtype and shape from any bytes, transposed or strided perhaps."""
    dtype, shape = DTYPES[draw(st.sampled_from(sorted(DTYPES)))], draw(SHAPES)
    count = math.prod(shape) * dtype.itemsize
    # The codec stores small values as bits or narrower integers.
    is_small = draw(st.booleans())
    byte = st.sampled_from([0, 0, 0, 1]) if is_small or dtype == torch.bool else st.integers(0, 255)
    data = bytearray(draw(st.lists(byte, min_size=count, max_size=count)))
    flat = torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    if tensor.ndim > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor[::2] if tensor.ndim and draw(st.booleans()) else tensor


def read_bits(tensor: Tensor) -> list[int]:
    flat = tensor.resolve_conj().reshape(-1)
    return flat.new_empty(len(flat)).copy_(flat).view(torch.uint8).tolist() if len(flat) else []


@settings(ON_A_BUSY_MACHINE, max_examples=300)
@given(tensor=draw_tensor())
def test_a_tensor_comes_back_bit_for_bit(tensor: Tensor) -> None:
    record = encode_tensor(tensor)
    restored = decode_tensors({"x": record}, "made up")["x"]
    assert (restored.dtype, restored.shape) == (tensor.dtype, tensor.shape)
    assert read_bits(restored) == read_bits(tensor)


@settings(ON_A_BUSY_MACHINE, max_examples=300)
@given(tensor=draw_tensor(), data=st.data())
def test_a_record_with_another_value_somewhere_is_refused_or_the_same_tensor(
    tensor: Tensor, data: st.DataObject
) -> None:
    record = encode_tensor(tensor)
    key = data.draw(st.sampled_from(sorted(record)))
    value = data.draw(st.binary() if key == "data" else PLAIN)
    try:
        restored = decode_tensors({"x": {**record, key: value}}, "made up")["x"]
    except CaptureError:
        return
    # With another dtype or shape, bytes of the same number and checksum are another view of the same bits.
    if key in ("dtype", "shape"):
        assert read_bits(restored) == read_bits(tensor)
    else:
        assert (restored.dtype, restored.shape, read_bits(restored)) == (tensor.dtype, tensor.shape, read_bits(tensor))


def is_same(value: Any, other: Any) -> bool:
    """Compare values with their types; a nan is like another."""
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return list(value) == list(other) and all(is_same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(is_same, value, other))
    return bool(value == other) or (isinstance(value, float) and math.isnan(value) and math.isnan(other))


@settings(ON_A_BUSY_MACHINE, max_examples=300)
@given(value=PLAIN, before=st.binary(max_size=9))
def test_plain_data_is_read_as_pickle_wrote_it(value: Any, before: bytes) -> None:
    written = before + pickle.dumps(value, protocol=5)
    loaded, end = load_plain(written, source="made up", start=len(before))
    assert is_same(loaded, value)
    assert end == len(written)


@pytest.mark.parametrize("count", [1, 2, MAX_FLOATS_AT_ONCE, MAX_FLOATS_AT_ONCE + 1, 3 * MAX_FLOATS_AT_ONCE])
def test_floats_in_a_row_are_read_whole_or_not_at_all(count: int) -> None:
    # The last is one whose bytes read as instructions that follow.
    values = [*(1 / number for number in range(1, count)), struct.unpack(">d", b"GGGGGGGG")[0]]
    written = pickle.dumps((values, 3, values[0]), protocol=5)
    assert load_plain(written, source="made up") == ((values, 3, values[0]), len(written))
    for num_bytes in range(len(written) - 20, len(written)):
        with pytest.raises(CaptureError, match="truncated"):
            load_plain(written[:num_bytes], source="made up")


@pytest.mark.parametrize("longer", [0, 1])
def test_each_float_of_a_row_is_an_instruction(longer: int) -> None:
    # BINFLOAT for each, TUPLE with its MARK, STOP.
    max_instructions = 3000 + 3
    written = b"(" + b"G\0\0\0\0\0\0\0\0" * (3000 + longer) + b"t."
    if longer:
        with pytest.raises(CaptureError, match="more than 3003 instructions"):
            load_plain(written, source="made up", max_instructions=max_instructions)
    else:
        values = load_plain(written, source="made up", max_instructions=max_instructions)
        assert values == ((0.0,) * 3000, len(written))


@settings(ON_A_BUSY_MACHINE, max_examples=500)
@given(value=PLAIN, data=st.data())
def test_a_damaged_pickle_is_plain_data_or_a_capture_error(value: Any, data: st.DataObject) -> None:
    written = bytearray(pickle.dumps(value, protocol=5))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(written) - 1))
        written[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        if not written:
            return
    try:
        loaded, _ = load_plain(bytes(written), source="made up")
    except CaptureError:
        return
    assert_plain(loaded)


def assert_plain(value: Any, depth: int = 0) -> None:
    assert depth <= MAX_DEPTH
    assert type(value) in (type(None), bool, int, float, str, bytes, list, tuple, dict)
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
    for member in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        assert_plain(member, depth + 1)


@pytest.mark.parametrize("call", [print, torch.zeros(2), Tensor])
def test_what_names_a_class_or_function_is_refused(call: Any) -> None:
    with pytest.raises(CaptureError):
        load_plain(pickle.dumps([call]), source="made up")
