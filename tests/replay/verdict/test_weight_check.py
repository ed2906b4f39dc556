"""A recording samples a parameter at one place, which is read once for all of its passes."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig

from capture.file_format.optimizer_step import ParameterSamples, Sample
from replay.verdict.weight_check import WeightChecker


def test_a_sampled_place_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.verdict.weight_check.find_parameter_shapes", lambda *_: {"weight": (8,)})
    read: list[int] = []

    def sample(name: str, shape: object, start: int, count: int) -> torch.Tensor:
        read.append(start)
        return torch.arange(8.0)[start : start + count]

    source = SimpleNamespace(config=LlamaConfig(), adapter=None, weights=SimpleNamespace(sample=sample))
    checker = WeightChecker(cast(Any, source))
    for value, differs in ((2.0, False), (7.0, True), (2.0, False)):
        job = Sample(name="weight", dtype="float32", shape=(8,), start=2, values=(value, 3.0))
        samples = ParameterSamples(samples=(job,), num_parameters=1, num_frozen=0, is_sharded=False)
        assert bool(checker.check(samples).differing) is differs
    assert checker.read_initial_values(checker.match_samples(samples.samples)) == {"weight": [2.0, 3.0]}
    assert read == [2]
