"""What a pass samples of many tensors reaches the host in one copy, and keeps none of them."""

import pytest
import torch

from replay.verdict.gradient_samples import copy_elements, fetch_together


def test_elements_come_back_tensor_by_tensor() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    runs = [copy_elements(whole, 2, 3), copy_elements(whole, 1, 2, stride=5), torch.linalg.vector_norm(whole[0])]
    assert fetch_together(runs) == [(2.0, 3.0, 4.0), (1.0, 6.0), (pytest.approx(14**0.5),)]
    assert fetch_together([]) == []


def test_a_copy_of_elements_keeps_no_whole_tensor() -> None:
    for dtype in (torch.float32, torch.float64):
        assert copy_elements(torch.zeros(1000, dtype=dtype), 10, 4).untyped_storage().nbytes() == 4 * 8
