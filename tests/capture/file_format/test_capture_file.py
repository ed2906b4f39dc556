"""Format 1: what is written comes back bit for bit, and what was damaged never comes back as something else."""

import json
import os
import pickle
import random
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import (
    CaptureError,
    MicroBatch,
    Origin,
    capture_files,
    read_actor_config,
    read_micro_batch,
    write_actor_config,
    write_call,
)
from capture.file_format.tensor_codec import DTYPES, MAX_TENSOR_BYTES, encode_tensor
from tests.helpers.full_disk import full_disk

IDS_BS = torch.tensor([[0, 5, 128_255, 7], [3, 3, 0, 0]])
ORIGIN = Origin(
    source="",
    rank=1,
    world_size=2,
    step=7,
    time="2025-06-19T05:26:08.430740+00:00",
    model_name="tiny",
    versions={"torch": "2"},
)


def write(folder: Path, call_facts: dict[str, Any] | None = None, origin: Origin = ORIGIN, **tensors: Tensor) -> Path:
    return write_call(folder, {"input_ids": IDS_BS, **tensors}, call_facts or {}, trains=True, origin=origin)


def view_bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(batch: MicroBatch, other: MicroBatch) -> None:
    for name in ("sequences_BS", "attention_mask_BS", "action_mask_BA", "labels_BS"):
        tensor, other_tensor = getattr(batch, name), getattr(other, name)
        assert (tensor is None and other_tensor is None) or torch.equal(tensor, other_tensor), name
    assert batch.extra_tensors.keys() == other.extra_tensors.keys()
    for name, tensor in batch.extra_tensors.items():
        assert tensor.dtype == other.extra_tensors[name].dtype
        assert torch.equal(view_bits(tensor), view_bits(other.extra_tensors[name])), name
    for name in ("call_facts", "left_out", "trains", "origin"):
        assert getattr(batch, name) == getattr(other, name), name


def test_a_forward_comes_back_under_the_names_it_had(tmp_path: Path) -> None:
    facts = {"use_cache": False, "scale": 0.5, "nothing": None, "lengths": [3, (4, 2**62)], "nested": {"a": "ü"}}
    tensors = {
        "sequences": IDS_BS,
        "attention_mask": torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]),
        "action_mask": torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
        "labels": torch.tensor([[-100, 1, 2, -100], [1, 2, 3, 4]]),
        "position_ids": torch.arange(8).view(2, 4),
    }
    path = write_call(tmp_path, tensors, facts, trains=False, origin=ORIGIN, left_out={"processor": "mine.Processor"})
    batch = read_micro_batch(path)
    assert path.name == "actor_inputs_rank1_20250619_052608_430740_00000007.pkl"
    assert torch.equal(batch.sequences_BS, IDS_BS)
    assert torch.equal(batch.attention_mask_BS, tensors["attention_mask"].bool())
    assert batch.action_mask_BA is not None
    assert batch.action_mask_BA.tolist() == [[True, False], [True, True]]
    assert batch.labels_BS is not None
    assert torch.equal(batch.labels_BS, tensors["labels"])
    assert torch.equal(batch.extra_tensors["position_ids"], tensors["position_ids"])
    assert batch.call_facts == facts
    assert batch.left_out == {"processor": "mine.Processor"}
    assert batch.trains is False
    assert batch.origin == Origin(
        source=path.name,
        rank=1,
        world_size=2,
        step=7,
        time=ORIGIN.time,
        model_name="tiny",
        versions={"torch": "2"},
    )


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 7), (1, 3000)], ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    dtype = DTYPES[name]
    noise = torch.Generator().manual_seed(0)
    num_elements = int(torch.Size(shape).numel())
    if dtype == torch.bool:
        tensor = torch.randint(0, 2, shape, generator=noise).bool()
    else:
        # Random bytes, so every NaN payload, negative zero and subnormal may be among the values.
        raw = torch.randint(0, 256, (num_elements * dtype.itemsize,), generator=noise, dtype=torch.uint8)
        tensor = raw.view(dtype).view(shape)
    restored = read_micro_batch(write(tmp_path, given=tensor)).extra_tensors["given"]
    assert (restored.dtype, restored.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(view_bits(restored), view_bits(tensor))


@pytest.mark.parametrize(
    ("values", "stored_as"),
    [
        ([0, 1, 1], "bits"),
        ([0, 255], "uint8"),
        ([-128, 127], "int8"),
        ([-1, 128], "int16"),
        ([0, 32_768], "int32"),
        ([-(2**31), 2**31 - 1], "int32"),
        ([0, 2**31], "int64"),
        ([-(2**63), 2**63 - 1], "int64"),
    ],
)
def test_integers_are_stored_in_the_smallest_dtype_that_holds_them(values: list[int], stored_as: str) -> None:
    assert encode_tensor(torch.tensor(values))["encoding"].split("/")[0] == stored_as


def test_masks_and_token_ids_are_stored_small(tmp_path: Path) -> None:
    ids_BS = torch.randint(0, 128_256, (4, 2048), generator=torch.Generator().manual_seed(0))
    mask_BS = (torch.arange(2048) < 900).expand(4, -1).long()
    num_bytes = write_call(
        tmp_path, {"input_ids": ids_BS * mask_BS, "attention_mask": mask_BS}, {}, trains=True, origin=ORIGIN
    ).stat()
    assert num_bytes.st_size < (ids_BS.nbytes + mask_BS.nbytes) / 10


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4).T,
        torch.arange(12)[::3],
        torch.ones(1, 3).expand(4, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.randn(3, requires_grad=True),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "with grad"],
)
def test_views_come_back_as_their_values(tensor: Tensor, tmp_path: Path) -> None:
    restored = read_micro_batch(write(tmp_path, given=tensor)).extra_tensors["given"]
    assert torch.equal(restored, tensor.detach())
    assert restored.is_contiguous()
    assert not restored.requires_grad


def write_rich_file(folder: Path) -> Path:
    noise = torch.Generator().manual_seed(3)
    return write(
        folder,
        {"use_cache": False, "lengths": [4, 2]},
        attention_mask=torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]),
        noise=torch.randn(2, 300, generator=noise),
        half=torch.randn(2, 300, generator=noise).bfloat16(),
    )


def read_damaged(path: Path, data: bytes) -> MicroBatch | None:
    # Some file systems go to the disk when a file is overwritten, which would make the test slow.
    path.unlink()
    path.write_bytes(data)
    try:
        return read_micro_batch(path)
    except CaptureError:
        return None


def test_no_single_bit_flip_loads_as_something_else(tmp_path: Path) -> None:
    path = write_rich_file(tmp_path)
    data, whole = path.read_bytes(), read_micro_batch(path)
    # No checksum covers the head, so each of its bits is tried.
    num_head_bits = 8 * 128
    some_bits = random.Random(5).sample(range(num_head_bits, 8 * len(data)), 4_000 - num_head_bits)
    num_errors = 0
    for position in (*range(num_head_bits), *some_bits):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        if (batch := read_damaged(path, bytes(flipped))) is None:
            num_errors += 1
        else:
            assert_same(batch, whole)
    assert num_errors > 3_900


def test_no_truncated_file_loads(tmp_path: Path) -> None:
    path = write(tmp_path, {"use_cache": False}, attention_mask=torch.ones(2, 4, dtype=torch.long))
    data = path.read_bytes()
    assert [length for length in range(len(data)) if read_damaged(path, data[:length])] == []
    for damaged, message in ((data[:-1], "truncated"), (data + b"\0", "damaged: [0-9]+ bytes were written")):
        path.write_bytes(damaged)
        with pytest.raises(CaptureError, match=message):
            read_micro_batch(path)


def test_a_tensor_has_a_checksum_of_its_own(tmp_path: Path) -> None:
    """The checksum is of the restored values, so it also catches a lossy encoding."""
    path = write_rich_file(tmp_path)

    def lose_a_bit(body: dict[str, Any]) -> None:
        body["tensors"]["input_ids"]["crc32"] ^= 1

    forge(path, lose_a_bit)
    with pytest.raises(CaptureError, match="'input_ids': the checksum is wrong"):
        read_micro_batch(path)


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a file's body and make its checksum right again, as a stranger could.

    pickle may read the file: the test itself has written it.
    """
    with path.open("rb") as file:
        pickle.load(file)
        body = pickle.load(file)
    change(body)
    payload = pickle.dumps(body, protocol=5)
    head = {"format": 1, "num_bytes": len(payload), "crc32": zlib.crc32(payload)}
    path.write_bytes(pickle.dumps(head, protocol=5) + payload)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.pop("trains"), "no body of format 1"),
        (lambda body: body.update(more=1), "no body of format 1"),
        (lambda body: body.update(trains="yes"), "no body of format 1"),
        (lambda body: body["origin"].pop("rank"), "no body of format 1"),
        (lambda body: body["origin"].update(step="7"), "no body of format 1"),
        (lambda body: body["origin"].update(versions={"torch": 2}), "must be texts"),
        (lambda body: body.update(left_out={"a": 1}), "must be texts"),
        (lambda body: body.update(environment={"OMP_NUM_THREADS": 1}), "must be texts"),
        (lambda body: body.update(environment="all"), "no body of format 1"),
        (lambda body: body.update(random={"torch": b"state"}), "random must hold a dict for each generator"),
        (lambda body: body.update(outputs={"loss": {"a": 1}}), "outputs must be numbers, texts or lists of numbers"),
        (lambda body: body.update(outputs={"rows": [1.0, "a"]}), "outputs must be numbers"),
        (lambda body: body.update(weights='{"samples": 3}'), "no samples"),
        (
            lambda body: body.update(weights='{"samples": {"a": ["float32", [2], 1, [0.5, 0.5]]}}'),
            "no samples",
        ),
        (lambda body: body["tensors"].update(a=3), "must be a dict of dtype"),
        (lambda body: body["tensors"]["noise"].update(dtype="float31"), "unknown dtype 'float31'"),
        (lambda body: body["tensors"]["noise"].update(shape=[2, -300]), "shape must be"),
        (lambda body: body["tensors"]["noise"].update(shape=[2, 299]), "as shape and dtype say|shape and dtype need"),
        (lambda body: body["tensors"]["noise"].update(encoding="int8"), "unknown encoding 'int8' for float32"),
        (lambda body: body["tensors"]["noise"].update(encoding="float32/rot13"), "unknown encoding"),
        (lambda body: body["tensors"].pop("input_ids"), "no token ids"),
        (lambda body: body["tensors"].update(input_ids=encode_tensor(torch.ones(2, 4))), "input_ids must be of shape"),
        (lambda body: body["tensors"].update(attention_mask=encode_tensor(IDS_BS)), "must hold only 0 and 1"),
    ],
)
def test_a_forged_body_is_refused_with_a_reason(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    path = write_rich_file(tmp_path)
    forge(path, change)
    with pytest.raises(CaptureError, match=message) as refusal:
        read_micro_batch(path)
    assert path.name in str(refusal.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"hello, world", "damaged or no capture"),
        (b"PK\x03\x04 a zip", "damaged or no capture"),
        (pickle.dumps([1, 2], protocol=5), "no capture: expected a dict with `format`, got a list"),
        (pickle.dumps({"a": 1}, protocol=5), r"got a dict of \['a'\]"),
        (pickle.dumps({"format": 2}, protocol=5), "format 2; this version reads format 1. Upgrade"),
        (pickle.dumps({"format": "x"}, protocol=5), "format 'x'; this version reads format 1"),
        (pickle.dumps({"format": 1}, protocol=5), "head is damaged"),
    ],
)
def test_a_file_that_is_no_capture_is_named_and_explained(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "actor_inputs_rank0.pkl"
    path.write_bytes(data)
    with pytest.raises(CaptureError, match=message) as refusal:
        read_micro_batch(path)
    assert path.name in str(refusal.value)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pkl")
    for name in ("missing.pkl", "pipe.pkl", "."):
        with pytest.raises(CaptureError, match="no such file"):
            read_micro_batch(tmp_path / name)


@pytest.mark.parametrize(
    ("tensors", "facts", "error"),
    [
        ({"hidden": IDS_BS}, {}, CaptureError),
        ({"input_ids": IDS_BS, "huge": torch.empty(1).expand(MAX_TENSOR_BYTES // 4 + 1)}, {}, CaptureError),
        ({"input_ids": IDS_BS}, {"many": list(range(300_000))}, CaptureError),
        ({"input_ids": IDS_BS}, {"device": torch.device("cpu")}, TypeError),
        ({"input_ids": IDS_BS}, {"long": 2**64}, TypeError),
        ({"input_ids": IDS_BS}, {"by_number": {1: 2}}, TypeError),
    ],
    ids=["no token ids", "too large", "too many facts", "an object", "a long integer", "keys that are no text"],
)
def test_nothing_is_written_that_could_not_be_read(
    tensors: dict[str, Tensor], facts: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        write_call(tmp_path, tensors, facts, trains=True, origin=ORIGIN)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    paths = [write(tmp_path), write_actor_config(tmp_path, {}, None)]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]


def test_files_sort_by_rank_then_in_recorded_order(tmp_path: Path) -> None:
    recorded = [
        write(tmp_path, origin=Origin(source="", rank=rank, step=step, time=f"2025-06-19T05:26:08.{time:06}+00:00"))
        for rank in (2, 10)
        for step, time in ((9, 1), (10, 1), (11, 1), (100_000, 2))
    ]
    (tmp_path / ".torn.pkl").touch()
    assert capture_files(tmp_path) == recorded
    with pytest.raises(CaptureError, match="no such folder"):
        capture_files(tmp_path / "missing")


def test_a_name_that_is_taken_is_not_written_over(tmp_path: Path) -> None:
    assert write(tmp_path) != write(tmp_path)
    assert len(capture_files(tmp_path)) == 2


def test_the_actor_config_comes_back(tmp_path: Path) -> None:
    assert read_actor_config(tmp_path) is None
    write_actor_config(tmp_path, {"model_type": "llama", "dtype": torch.bfloat16}, "tiny")
    assert read_actor_config(tmp_path) == {"model_type": "llama", "dtype": "torch.bfloat16"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no object with a `config`"),
        ('{"config": 3}', "no object with a `config`"),
        (json.dumps({"format": 2, "config": {}}), "format 2; this version reads format 1"),
        (" " * 5_000_000, "larger than"),
    ],
)
def test_a_broken_actor_config_is_refused_with_a_reason(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "actor.json").write_text(content)
    with pytest.raises(CaptureError, match=message):
        read_actor_config(tmp_path)
