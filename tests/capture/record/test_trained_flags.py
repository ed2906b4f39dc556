"""That a job freezes parameters in the middle of its training is noticed in a few passes, and not twice."""

from typing import Any

import pytest
from torch import nn

from capture.record.trained_flags import TrainedFlags


@pytest.mark.parametrize("num_layers", [1, 10, 200])
def test_a_change_is_noticed_once(num_layers: int) -> None:
    layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(num_layers))
    flags = TrainedFlags(dict(layers.named_modules()))
    num_passes = -(-num_layers // 64)
    assert not any(flags.have_changed() for _ in range(num_passes))
    assert flags.list_frozen() == []
    last: Any = layers[-1]
    last.bias.requires_grad_(False)
    assert [flags.have_changed() for _ in range(2 * num_passes)].count(True) == 1
    assert flags.list_frozen() == [f"{num_layers - 1}.bias"]
    layers.requires_grad_(False)
    # Every layer has changed, so the first look sees it.
    assert flags.have_changed()
    assert len(flags.list_frozen()) == 2 * num_layers


def test_a_model_that_is_gone_has_not_changed() -> None:
    layers = nn.ModuleList([nn.Linear(1, 1)])
    flags = TrainedFlags(dict(layers.named_modules()))
    del layers
    assert not flags.have_changed()
