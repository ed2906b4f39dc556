"""That a job freezes parameters in the middle of its training is noticed in a few passes, and not twice."""

from typing import Any

import pytest
from torch import nn

from capture.record.model_facts_taker import ModelFactsTaker
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


def test_each_later_change_is_told_beside_the_earlier_ones_and_only_where_something_else_is_trained() -> None:
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
    taker = ModelFactsTaker(layers)
    assert taker.take_change(0) is None
    judged = taker.take(forward=0, trains=False)
    assert judged is not None
    assert (taker.take(forward=1, trains=False), taker.take_change(1)) == (None, None)
    trained = taker.take(forward=2, trains=True)
    assert trained is not None
    assert (trained.rest["forward"], trained.rest["trains"], trained.rest["frozen_later"]) == (2, True, {})
    assert (taker.take(forward=3, trains=True), taker.take_change(3)) == (None, None)
    layers[0].requires_grad_(False)
    first = taker.take_change(4)
    assert first is not None
    assert first.rest["frozen_later"] == {"4": ["0.weight"]}
    assert taker.take_change(5) is None
    layers[2].requires_grad_(False)
    layers[0].requires_grad_(True)
    second = taker.take_change(6)
    assert second is not None
    assert second.rest["frozen_later"] == {"4": ["0.weight"], "6": ["2.weight"]}
    layers[2].requires_grad_(True)
    third = taker.take_change(7)
    assert third is not None
    assert third.rest["frozen_later"] == {"4": ["0.weight"], "6": ["2.weight"], "7": []}
    # The facts are those of the pass that trained first.
    assert third.rest["forward"] == 2
