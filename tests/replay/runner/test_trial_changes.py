"""Which scales of an adapter are tried: the one that the recording states, else those that mistakes give it."""

from typing import Any

import pytest
import torch
from torch import nn

from replay.runner.trial_changes import list_model_trials
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lora_A, self.scaling = nn.ModuleDict(), {"default": 4.0}


@pytest.mark.parametrize(
    ("stated", "scales"),
    [("{'default': 16.0}", [16.0]), ("{}", [8.0, 2.0, 0.0]), ("none", [8.0, 2.0, 0.0]), (None, [8.0, 2.0, 0.0])],
)
def test_the_stated_scale_of_an_adapter_is_tried_in_place_of_guesses(stated: str | None, scales: list[float]) -> None:
    model: Any = Adapted()
    difference = ModelDifference(
        kind=ModelDifferenceKind.ATTRIBUTE, where="q_proj", key="scaling", job=stated, replay="{'default': 4.0}"
    )
    tried: list[float] = []
    for trial in list_model_trials(model, torch.ones(1, 2, 2), may_round=False, differences=[difference]):
        with trial.change(model):
            tried.append(model.scaling["default"])
    assert tried == scales
    assert model.scaling == {"default": 4.0}
