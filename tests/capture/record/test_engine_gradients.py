"""DeepSpeed's norm is read without a wait for a device."""

from types import SimpleNamespace

import pytest
import torch

from capture.record.engine_gradients import EngineGradients


def test_a_norm_on_the_host_moves_to_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = SimpleNamespace(_global_grad_norm=torch.tensor(4.0), clip_grad=0.5)
    engine = EngineGradients(wrapper=wrapper, partitions=[torch.ones(2, device="meta")])
    monkeypatch.setattr(torch.Tensor, "to", None, raising=False)
    assert engine.grad_norm == 4.0
    assert engine.undo_clipping(torch.ones(2, device="meta")).is_meta
    assert engine.undo_clipping(torch.ones(2)).tolist() == pytest.approx([8.0, 8.0], rel=1e-5)
    assert engine.can_undo_clipping
