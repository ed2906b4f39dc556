"""Parts of a replay that a test puts its own in the place of, to make a pass slow, wrong or fail."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from actor_init.inputs.packing import ActorInputs


def replace_stand_in_loss(monkeypatch: pytest.MonkeyPatch, loss: Callable[[Tensor, ActorInputs], Tensor]) -> None:
    """Compute the loss of passes whose loss is not known with `loss`."""
    monkeypatch.setattr("replay.runner.replayer.compute_negated_mean", loss)


def replace_opening(monkeypatch: pytest.MonkeyPatch, open_actor: Callable[..., Any]) -> None:
    """Open actors with `open_actor`, which gets what `open_backend` gets."""
    monkeypatch.setattr("replay.runner.replayer.open_backend", open_actor)


def replace_layout(monkeypatch: pytest.MonkeyPatch, lay_out: Callable[..., ActorInputs]) -> None:
    """Lay micro-batches out with `lay_out`, which gets what `prepare_actor_inputs` gets."""
    monkeypatch.setattr("replay.runner.replayer.prepare_actor_inputs", lay_out)
