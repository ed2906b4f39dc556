"""What a pass samples of many tensors reaches the host in one copy, and keeps none of them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from capture.file_format.optimizer_state import StateSample
from capture.file_format.optimizer_step import Sample
from replay.verdict.gradient_samples import copy_elements, fetch_together, sample_gradients
from replay.verdict.state_samples import sample_states

W1 = Sample(name="w1", dtype="float32", shape=(2, 3), start=2, values=(0.0, 0.0))
STATE = StateSample(name="w1", shape=(2, 3), start=2, values={"exp_avg": (0.0, 0.0), "exp_avg_sq": (0.0, 0.0)})


class OperationCounter(TorchDispatchMode):
    """Counts torch's operations, each of which is a kernel at least on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.number += func not in (torch.ops.aten.view.default, torch.ops.aten.slice.Tensor)
        return func(*args, **(kwargs or {}))


def make_tensors(number: int) -> dict[str, Tensor]:
    return {f"w{index}": torch.arange(6.0).reshape(2, 3) + index for index in range(number)}


def test_elements_come_back_tensor_by_tensor() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    runs = [copy_elements(whole, 2, 3), copy_elements(whole, 1, 2, stride=5), torch.linalg.vector_norm(whole[0])]
    assert fetch_together(runs) == [(2.0, 3.0, 4.0), (1.0, 6.0), (pytest.approx(14**0.5),)]
    assert fetch_together([]) == []


def test_a_copy_of_elements_keeps_no_whole_tensor() -> None:
    for dtype in (torch.float32, torch.float64):
        assert copy_elements(torch.zeros(1000, dtype=dtype), 10, 4).untyped_storage().nbytes() == 4 * 8


@pytest.mark.parametrize("batch_bytes", [1, 50, 2**20])
def test_norms_and_elements_are_those_of_each_gradient_however_many_are_held(batch_bytes: int) -> None:
    sampled = sample_gradients(make_tensors(5).items(), {"w1": [W1]}, {}, batch_bytes=batch_bytes)
    assert sampled.norms == {
        f"w{index}": pytest.approx(math.sqrt(sum((element + index) ** 2 for element in range(6))), rel=1e-15)
        for index in range(5)
    }
    assert sampled.values == {("w1", 2): (3.0, 4.0)}
    assert set(sampled.sizes.values()) == {6}


def test_a_states_elements_come_with_the_root_mean_square_of_the_whole() -> None:
    states = {"exp_avg": torch.full((2, 3), 2.0), "exp_avg_sq": torch.arange(6.0).reshape(2, 3), "step": torch.ones(())}
    runs = sample_states([("w0", states), ("w1", states)], {"w1": STATE})
    assert {place: run.values for place, run in runs.items()} == {
        ("w1", 2, "exp_avg"): (2.0, 2.0),
        ("w1", 2, "exp_avg_sq"): (2.0, 3.0),
    }
    assert [run.scale for run in runs.values()] == pytest.approx([2.0, math.sqrt(55 / 6)], rel=1e-15)


def test_a_pass_takes_as_many_operations_and_copies_of_many_parameters_as_of_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy_to_host = Tensor.tolist

    def count(number: int) -> tuple[int, int]:
        tensors = make_tensors(number)
        copied: list[Tensor] = []

        def tolist(tensor: Tensor) -> Any:
            copied.append(tensor)
            return copy_to_host(tensor)

        monkeypatch.setattr(Tensor, "tolist", tolist)
        with OperationCounter() as operations:
            sample_gradients(tensors.items(), {"w1": [W1]}, {})
            sample_states([(name, {"exp_avg": tensor}) for name, tensor in tensors.items()], {"w1": STATE})
        return operations.number, len(copied)

    assert count(3) == count(300)
    assert count(3)[1] == 2
