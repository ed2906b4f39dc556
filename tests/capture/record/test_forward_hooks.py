"""Which forwards of a model are passes."""

import pytest
import torch
from torch import nn

from capture.record.forward_hooks import ForwardHooks


class Twice(nn.Module):
    """Calls itself once more, and is interrupted as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.num_interrupts = 0

    def forward(self, values: torch.Tensor, *, is_inner: bool = False) -> torch.Tensor:
        if is_inner:
            if self.num_interrupts:
                self.num_interrupts -= 1
                raise KeyboardInterrupt
            return values
        inner: torch.Tensor = self(values, is_inner=True)
        return inner + 1


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def model(events: list[str]) -> Twice:
    model = Twice()
    hooks = ForwardHooks(
        lambda module, args, kwargs: events.append("begin"),
        lambda output, error: events.append("end" if error is None else type(error).__name__),
    )
    hooks.attach(model)
    return model


def test_a_forward_inside_a_forward_is_no_pass(model: Twice, events: list[str]) -> None:
    model(torch.zeros(1))
    assert events == ["begin", "end"]


def test_passes_after_an_interrupted_one_are_seen(model: Twice, events: list[str]) -> None:
    model.num_interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        model(torch.zeros(1))
    for _ in range(2):
        model(torch.zeros(1))
    assert events == ["begin", "begin", "end", "begin", "end"]
