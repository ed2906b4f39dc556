"""The unversioned dumps of OpenRLHF's actor, made here as its training job makes them: one pickle.dump of a dict."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import CaptureError, MicroBatch, read_micro_batch
from tests.helpers.dumps import ACTION_MASK_BA, IDS_BS, MASK_BS, make_dump


def read(folder: Path, dump: Any, protocol: int = 4) -> MicroBatch:
    path = folder / "actor_inputs_rank1_20250619_052608_430740.pkl"
    # Some file systems go to the disk when a file is overwritten, which would make the test slow.
    path.unlink(missing_ok=True)
    path.write_bytes(dump if isinstance(dump, bytes) else pickle.dumps(dump, protocol=protocol))
    return read_micro_batch(path)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_dump_is_read_whole(protocol: int, tmp_path: Path) -> None:
    batch = read(tmp_path, make_dump(), protocol)
    assert torch.equal(batch.sequences_BS, IDS_BS)
    assert torch.equal(batch.attention_mask_BS, MASK_BS.bool())
    assert batch.action_mask_BA is not None
    assert torch.equal(batch.action_mask_BA, ACTION_MASK_BA)
    assert batch.labels_BS is None
    assert batch.extra_tensors == {}
    assert batch.call_facts == {
        "return_output": True,
        "allgather_logits": False,
        "return_logprobs": False,
        "packed_seq_lens": None,
        "return_entropy": False,
    }
    assert (batch.origin.rank, batch.origin.time) == (1, "20250619_052608_430740")
    assert batch.origin.source == "actor_inputs_rank1_20250619_052608_430740.pkl"


@pytest.mark.parametrize("return_output", [True, False])
def test_a_training_pass_is_one_that_returned_its_output(return_output: bool, tmp_path: Path) -> None:
    assert read(tmp_path, make_dump(return_output=return_output)).trains is return_output


def test_float_masks_of_0_and_1_are_masks(tmp_path: Path) -> None:
    batch = read(tmp_path, make_dump(action_mask=ACTION_MASK_BA.float(), attention_mask=MASK_BS.float()))
    assert batch.action_mask_BA is not None
    assert torch.equal(batch.action_mask_BA, ACTION_MASK_BA)
    assert torch.equal(batch.attention_mask_BS, MASK_BS.bool())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4).T,
        torch.arange(12)[2::3],
        torch.ones(1, 3).expand(4, 3),
        torch.empty(0, 3),
        torch.tensor(3.5),
        torch.randn(2, 2, requires_grad=True),
        torch.randn(2, 5).bfloat16(),
        torch.tensor([True, False]),
    ],
    ids=["transposed", "strided", "expanded", "empty", "scalar", "with grad", "bfloat16", "bool"],
)
def test_other_tensors_come_back_as_their_values(tensor: Tensor, tmp_path: Path) -> None:
    restored = read(tmp_path, make_dump(extra=tensor)).extra_tensors["extra"]
    assert restored.dtype == tensor.dtype
    assert torch.equal(restored, tensor.detach())
    assert not restored.requires_grad


def test_a_tensor_that_two_arguments_share_is_read_for_both(tmp_path: Path) -> None:
    batch = read(tmp_path, make_dump(first=MASK_BS, second=MASK_BS))
    assert torch.equal(batch.extra_tensors["first"], batch.extra_tensors["second"])


def test_tensors_that_were_on_a_gpu_come_as_cpu_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    data = pickle.dumps(make_dump(), protocol=4)
    assert data.count(b"cuda:0") == 3
    batch = read(tmp_path, data)
    assert batch.sequences_BS.device.type == "cpu"
    assert torch.equal(batch.sequences_BS, IDS_BS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequences": None}, "not a dump of OpenRLHF's actor"),
        ({"return_output": 1}, "not a dump of OpenRLHF's actor"),
        ({"seq_len": 5}, r"batch_size, seq_len say \[2, 5\]"),
        ({"rank": "one"}, "rank must be an integer"),
        ({"sequences": IDS_BS - 1}, "token id -1 is negative"),
        ({"sequences": IDS_BS.float()}, "sequences must be of shape"),
        ({"attention_mask": MASK_BS * 2}, "attention_mask must hold only 0 and 1"),
        ({"attention_mask": MASK_BS[:, :3]}, "attention_mask"),
        ({"action_mask": MASK_BS}, "action_mask"),
        ({"dtype": torch.bfloat16}, "names 'torch.bfloat16'"),
        ({"where": Path("/")}, r"names 'pathlib"),
        ({"by_number": {1: 2}}, "a key that is no text"),
    ],
    ids=str,
)
def test_a_dump_that_does_not_fit_together_is_refused_with_a_reason(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=message) as refusal:
        read(tmp_path, make_dump(**changes))
    assert "actor_inputs_rank1_20250619_052608_430740.pkl" in str(refusal.value)


def test_no_truncated_dump_loads(tmp_path: Path) -> None:
    data = pickle.dumps(make_dump(), protocol=4)
    for length in range(len(data)):
        with pytest.raises(CaptureError):
            read(tmp_path, data[:length])
