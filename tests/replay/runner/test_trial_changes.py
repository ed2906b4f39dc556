"""Which scales of an adapter are tried: the one that the recording states, else those that mistakes give it."""

from typing import Any

import pytest
import torch
from torch import nn

from replay.runner.trial_changes import list_model_trials
from replay.verdict.causes.cause import CauseName
from replay.verdict.model_facts import ALL_ZEROS, ModelDifference, ModelDifferenceKind


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


def test_buffers_that_are_zeros_in_the_job_are_tried_as_zeros() -> None:
    model: Any = nn.Module()
    model.rotary = nn.Module()
    for name in ("inv_freq", "other"):
        model.rotary.register_buffer(name, torch.ones(2), persistent=False)
    differences = [
        ModelDifference(kind=ModelDifferenceKind.BUFFER, where=f"rotary.{name}", job=job, replay="1, 1")
        for name, job in (("inv_freq", ALL_ZEROS), ("other", "2, 2"))
    ]
    [trial] = list_model_trials(model, torch.ones(1, 2, 2), may_round=False, differences=differences)
    assert (trial.cause, trial.is_stated) == (CauseName.POSITIONS, True)
    assert trial.says == "the buffer rotary.inv_freq is all zeros in the job, 1, 1 here: the job never computed it"
    with trial.change(model):
        assert [model.rotary.inv_freq.tolist(), model.rotary.other.tolist()] == [[0, 0], [1, 1]]
    assert model.rotary.inv_freq.tolist() == [1, 1]
    assert not list(list_model_trials(model, torch.ones(1, 2, 2), may_round=False, differences=differences[1:]))
