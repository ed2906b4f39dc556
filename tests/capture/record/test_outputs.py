"""What of a forward's result is kept: its loss, or a number for each token, and nothing that may be something else."""

import zlib
from typing import Any

import pytest
import torch

from capture.record.job_facts import ENVIRONMENT_NAMES, read_environment
from capture.record.outputs import (
    describe_outputs,
    find_logits,
    find_outputs,
    sort_noted_values,
    summarise_outputs,
)

LOSS, OTHER_LOSS = torch.tensor(0.5), torch.tensor(0.25)
COUNT = torch.tensor(3)
ROWS_BA, LOGITS_BSV = torch.rand(2, 3), torch.rand(2, 4, 8)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (LOSS, {"loss": LOSS}),
        (ROWS_BA, {"output": ROWS_BA}),
        (LOGITS_BSV, {}),
        (COUNT, {}),
        (torch.ones(2, 3, dtype=torch.int64), {}),
        (torch.rand(3), {}),
        ({"loss": LOSS, "logits": LOGITS_BSV}, {"loss": LOSS}),
        # DataParallel gives the loss of each device.
        ({"loss": torch.rand(2)}, {}),
        ({"loss": torch.rand(1)}, {"loss": None}),
        ({"loss": 0.5}, {}),
        ({"logits": LOGITS_BSV}, {}),
        ({"output": ROWS_BA}, {}),
        # The only number of a tuple is its loss, wherever it stands; a count is none.
        ((LOGITS_BSV, LOSS), {"loss": LOSS}),
        ((COUNT, LOSS), {"loss": LOSS}),
        ((ROWS_BA, LOSS), {"loss": LOSS}),
        # Which of several it is nobody says: the first member is looked at.
        ((LOGITS_BSV, LOSS, OTHER_LOSS), {}),
        ((LOSS, OTHER_LOSS), {"loss": LOSS}),
        ((OTHER_LOSS, LOSS, LOGITS_BSV), {"loss": OTHER_LOSS}),
        ((ROWS_BA, LOSS, OTHER_LOSS), {"output": ROWS_BA}),
        ((ROWS_BA, LOGITS_BSV), {"output": ROWS_BA}),
        (({"loss": LOSS}, ROWS_BA), {"loss": LOSS}),
        ((), {}),
        ([LOSS], {}),
        (None, {}),
        ("a text", {}),
    ],
)
def test_the_loss_of_a_forward_is_the_number_that_can_be_no_other(output: Any, expected: dict[str, Any]) -> None:
    found = find_outputs(output, with_rows=True)
    assert found.keys() == expected.keys()
    assert all(tensor is None or found[name] is tensor for name, tensor in expected.items())
    without_rows = {name for name in expected if name != "output"}
    assert find_outputs(output, with_rows=False).keys() == without_rows


@pytest.mark.parametrize(
    ("output", "vocabularies", "is_found"),
    [
        ({"logits": LOGITS_BSV}, (), True),
        ({"other": LOGITS_BSV}, (8,), False),
        (LOGITS_BSV, (8,), True),
        # Hidden states are as wide as no vocabulary.
        (LOGITS_BSV, (9,), False),
        ((LOSS, LOGITS_BSV), (8,), True),
        ((torch.rand(2, 4, 5), LOGITS_BSV), (8,), True),
        ({"logits": LOGITS_BSV[:, :3]}, (), False),
        ({"logits": LOGITS_BSV[:1]}, (), False),
        ({"logits": LOGITS_BSV[0]}, (), False),
        ({"logits": LOGITS_BSV.long()}, (), False),
        ({"logits": LOGITS_BSV[:, :, :0]}, (), False),
        ({"logits": None}, (), False),
    ],
)
def test_logits_are_told_by_their_name_or_by_a_vocabularys_width(
    output: Any, vocabularies: tuple[int, ...], is_found: bool
) -> None:
    found = find_logits(output, torch.ones(2, 4, dtype=torch.int64), vocabularies)
    assert (found is LOGITS_BSV) == is_found
    assert is_found or found is None
    assert find_logits(output, torch.ones(2, 4), vocabularies) is None


def test_numbers_are_kept_as_they_are_and_larger_outputs_as_sums_and_a_checksum() -> None:
    rows_BA = torch.tensor([[0.5, 0.25], [1.0, 2.0]]).bfloat16()
    summary = summarise_outputs(
        {
            "loss": torch.tensor([0.5]),
            "output": rows_BA,
            "log_probs": torch.tensor([1.0, 2.0]),
            "advantages": rows_BA,
            "token_log_probs": torch.tensor([-1.0]),
        }
    )
    crc32 = zlib.crc32(rows_BA.view(torch.uint8).numpy().tobytes())
    assert summary == {
        "loss": 0.5,
        "output_values": [0.5, 0.25, 1.0, 2.0],
        "output_shape": [2, 2],
        "output_row_sums": [0.75, 3.0],
        "output_crc32": crc32,
        "log_probs_values": [1.0, 2.0],
        "log_probs_shape": [2],
        "log_probs_row_sums": [3.0],
        "log_probs_crc32": zlib.crc32(torch.tensor([1.0, 2.0]).numpy().tobytes()),
        "advantages_row_sums": [0.75, 3.0],
        "advantages_crc32": crc32,
        "token_log_probs": [-1.0],
    }


@pytest.mark.parametrize(("num_values", "are_kept"), [(65_536, True), (65_537, False)])
def test_so_many_numbers_of_tokens_are_kept(num_values: int, are_kept: bool) -> None:
    summary = summarise_outputs({"log_probs": torch.zeros(1, num_values)})
    assert ("log_probs_values" in summary, "log_probs_shape" in summary) == (are_kept, are_kept)
    assert summary["log_probs_row_sums"] == [0.0]


def test_the_dtypes_are_those_of_logits_and_loss() -> None:
    weight = torch.ones((), requires_grad=True)
    loss = (weight.exp() * 2).bfloat16()
    assert describe_outputs({"logits": LOGITS_BSV.half()}, loss) == {
        "logits_dtype": "float16",
        "loss_dtype": "bfloat16",
        "loss_function": "ExpBackward0",
    }
    assert describe_outputs(LOGITS_BSV, None) == {}
    assert describe_outputs({"logits": None}, LOSS) == {"loss_dtype": "float32"}


def test_noted_tensors_are_copied_later_and_other_numbers_are_kept_at_once() -> None:
    tensors, plain = sort_noted_values({"noted_loss": LOSS, "grad_norm": 2, "log_probs": None})
    assert (tensors, plain) == ({"noted_loss": LOSS}, {"grad_norm": 2.0})
    assert sort_noted_values({"noted_loss": torch.ones(1).to_sparse()}) == ({}, {"noted_loss": "torch.Tensor"})
    with pytest.raises(ValueError, match="high"):
        sort_noted_values({"grad_norm": "high"})


def test_the_environment_is_what_changes_numbers_and_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT_NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_ALGO", "x" * 101)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    environment = read_environment()
    variables = {name: value for name, value in environment.items() if not name.startswith("torch.")}
    assert variables == {"NCCL_ALGO": "x" * 100}
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert read_environment()["torch.cudnn.benchmark"] == "True"
    assert read_environment()["torch.num_threads"] == str(torch.get_num_threads())
