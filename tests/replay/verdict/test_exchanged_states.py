"""A state that a job loaded in another order of its parameters is found by its elements."""

import pytest
import torch
from torch import Tensor

from capture.file_format.optimizer_state import StateSample
from replay.verdict.exchanged_states import find_exchanged_states

NAMES = ["layers.0.q.weight", "layers.1.q.weight", "layers.2.q.weight"]


def make_state(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    moment = torch.randn(6, 4, generator=generator)
    return {"step": torch.tensor(6.0), "exp_avg": moment, "exp_avg_sq": moment.square()}


GIVEN = {name: make_state(seed) for seed, name in enumerate(NAMES)}


def sample(name: str, values: dict[str, Tensor]) -> StateSample:
    runs = {key: tuple(values[key].flatten()[8:12].tolist()) for key in ("exp_avg", "exp_avg_sq")}
    return StateSample(name=name, shape=(6, 4), start=8, values=runs)


@pytest.mark.parametrize(
    ("held", "exchanged"),
    [
        ([0, 1, 2], []),
        ([1, 0, 2], [(NAMES[0], NAMES[1]), (NAMES[1], NAMES[0])]),
        # It is of none of the parameters that a state was given of.
        ([3, 1, 2], []),
    ],
)
def test_parameters_that_hold_the_state_of_another_one_are_named_with_it(
    held: list[int], exchanged: list[tuple[str, str]]
) -> None:
    samples = [sample(name, make_state(seed)) for name, seed in zip(NAMES, held, strict=True)]
    assert find_exchanged_states(samples, GIVEN) == exchanged


def test_zeros_and_states_of_two_parameters_tell_nothing() -> None:
    zeros = {key: torch.zeros(6, 4) for key in ("exp_avg", "exp_avg_sq")}
    assert find_exchanged_states([sample(NAMES[0], zeros)], {**GIVEN, NAMES[1]: zeros}) == []
    twice = {**GIVEN, NAMES[2]: GIVEN[NAMES[1]]}
    assert find_exchanged_states([sample(NAMES[0], make_state(1))], twice) == []
