"""A saved state is given to the parameters that it is of, in shards too, and is refused where that is not known."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actor_init.optimizers.build import make_optimizer
from actor_init.optimizers.saved_state import OptimizerState, StateGroup
from actor_init.optimizers.state_loading import TrainedParameter, assign_state
from actor_init.spec import ActorSpec, UsageError
from tests.helpers.ranks import run_ranks

SHAPES = {
    "embed.weight": (9, 4),
    "layers.0.q.weight": (4, 4),
    "layers.0.norm.weight": (4,),
    "layers.0.o.weight": (4, 4),
    "layers.0.o.bias": (4,),
    "head.weight": (9, 4),
}
PARAMETERS = [TrainedParameter(name=name, shape=shape) for name, shape in SHAPES.items()]
SPEC = ActorSpec(backend="ddp", optimizer="adamw")
DECAYED = ["embed.weight", "layers.0.q.weight", "layers.0.o.weight", "head.weight"]
OTHERS = ["layers.0.norm.weight", "layers.0.o.bias"]


def make_moments(shape: Sequence[int], number: int = 0) -> dict[str, Any]:
    moments = torch.full(tuple(shape), float(number))
    return {"exp_avg": moments, "exp_avg_sq": moments, "step": torch.tensor(7.0)}


def make_state(*groups: list[str], with_names: bool = False) -> OptimizerState:
    """Make a state whose moments have the number of their parameter."""
    names = [name for group in groups for name in group]
    begin, saved = 0, []
    for group in groups:
        numbers = tuple(range(begin, begin + len(group)))
        saved.append(StateGroup(numbers=numbers, names=tuple(group) if with_names else ()))
        begin += len(group)
    by_number = {number: make_moments(SHAPES[name], number) for number, name in enumerate(names)}
    return OptimizerState(path=Path("optimizer.pt"), by_number=by_number, groups=saved)


def find_numbers(state: OptimizerState, **more: Any) -> dict[str, int]:
    assigned = assign_state(state, PARAMETERS, SPEC, **more)
    assert assigned.counts == (7,)
    return {name: int(values["exp_avg"].flatten()[0]) for name, values in assigned.by_name.items()}


def test_one_group_is_in_the_order_of_the_model() -> None:
    assert find_numbers(make_state(list(SHAPES))) == {name: number for number, name in enumerate(SHAPES)}


def test_two_groups_are_those_of_trainers() -> None:
    expected = {name: number for number, name in enumerate([*DECAYED, *OTHERS])}
    assert find_numbers(make_state(DECAYED, OTHERS)) == expected
    turned = {name: number for number, name in enumerate([*OTHERS, *DECAYED])}
    assert find_numbers(make_state(OTHERS, DECAYED)) == turned


def test_names_in_the_file_or_in_the_recording_decide() -> None:
    groups = [["head.weight", "layers.0.o.weight"], ["embed.weight", "layers.0.q.weight"], OTHERS]
    expected = {name: number for number, name in enumerate(name for group in groups for name in group)}
    assert find_numbers(make_state(*groups, with_names=True)) == expected
    # A recording has sets, and their parameters are in the model's order.
    in_order = [sorted(group, key=list(SHAPES).index) for group in groups]
    assert find_numbers(make_state(*in_order), recorded_groups=groups) == {
        name: number for number, name in enumerate(name for group in in_order for name in group)
    }


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (make_state(["embed.weight"]), "has groups of 1 parameters, and 6 are trained here"),
        (make_state([*OTHERS, *DECAYED]), r"exp_avg of its parameter 0 is \[4\], and embed.weight is \[9, 4\]"),
        (make_state(DECAYED[:2], DECAYED[2:], OTHERS), "has groups of 2 and 2 and 2 parameters"),
        (OptimizerState(path=Path("x"), by_name={"other": make_moments((2,))}), "has a state of other, which is not"),
        (OptimizerState(path=Path("x"), by_name={"head.weight": make_moments((2,))}), r"is \[2\], and head.weight is"),
        (OptimizerState(path=Path("x"), groups=[StateGroup(numbers=range(6))]), "holds no state of any parameter"),
        (
            OptimizerState(path=Path("x"), by_name={"head.weight": {"momentum_buffer": torch.ones(9, 4)}}),
            "keeps exp_avg",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_facts(state: OptimizerState, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        assign_state(state, PARAMETERS, SPEC)


def test_a_state_that_fits_in_two_ways_is_refused() -> None:
    # Of a norm of two dimensions and a bias the two rules of trainers make groups of the same shapes.
    shapes = {"a.weight": (4, 4), "norm.weight": (4, 4), "b.weight": (4,), "bias": (4,)}
    parameters = [TrainedParameter(name=name, shape=shape) for name, shape in shapes.items()]
    by_number = {number: {"momentum_buffer": None, "step": torch.tensor(1.0)} for number in range(4)}
    state = OptimizerState(
        path=Path("x"), by_number=by_number, groups=[StateGroup(numbers=(0, 1)), StateGroup(numbers=(2, 3))]
    )
    with pytest.raises(UsageError, match="fits in several ways"):
        assign_state(state, parameters, ActorSpec(backend="ddp", optimizer="sgd"))


def test_the_wrappers_of_a_job_are_taken_off_the_names() -> None:
    wrapped = {f"module._orig_mod.{name}": make_moments(shape) for name, shape in SHAPES.items()}
    state = OptimizerState(path=Path("x"), by_name=wrapped)
    assert set(assign_state(state, PARAMETERS, SPEC).by_name) == set(SHAPES)


def test_parameters_without_a_state_are_counted() -> None:
    state = OptimizerState(path=Path("x"), by_name={"head.weight": make_moments((9, 4))})
    assert assign_state(state, PARAMETERS, SPEC).describe() == "the state after 7 steps of 1 of 6 parameters, from x"


def test_the_state_of_bitsandbytes_in_32_bits_is_that_of_adamw() -> None:
    moments = torch.ones(9, 4)
    state = OptimizerState(path=Path("x"), by_name={"head.weight": {"state1": moments, "state2": moments, "step": 3}})
    assigned = assign_state(state, PARAMETERS, SPEC)
    assert set(assigned.by_name["head.weight"]) == {"exp_avg", "exp_avg_sq", "step"}


def test_the_state_of_bitsandbytes_in_8_bits_keeps_its_names() -> None:
    blocks = {name: torch.ones(1) for name in ("absmax1", "absmax2", "qmap1", "qmap2")}
    codes = torch.ones(9, 4, dtype=torch.uint8)
    kept = {"state1": codes, "state2": codes, "step": 3, **blocks}
    spec = ActorSpec(backend="ddp", optimizer="adamw-8bit")
    assigned = assign_state(OptimizerState(path=Path("x"), by_name={"head.weight": kept}), PARAMETERS, spec)
    assert assigned.by_name["head.weight"] == kept
    with pytest.raises(UsageError, match="keeps exp_avg and exp_avg_sq"):
        assign_state(OptimizerState(path=Path("x"), by_name={"head.weight": kept}), PARAMETERS, SPEC)


@pytest.mark.slow
def test_in_shards_of_two_ranks_a_state_goes_on_as_it_would_have(tmp_path: Path) -> None:
    words = ["adamw", "adafactor", "transformers-adafactor", "muon"]
    said = run_ranks(["-m", "tests.actor_init.optimizers.state_worker", str(tmp_path), *words], 2)
    distances = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert set(distances) == set(words)
    # Shards add gradients up in another order at most: one ulp of a weight near 1, times three steps.
    assert max(distances.values()) < 1e-6, distances


def test_a_state_in_half_precision_gets_the_dtype_of_the_masters() -> None:
    model = nn.Linear(4, 9, bias=False)
    moments = torch.ones(9, 4, dtype=torch.bfloat16)
    state = OptimizerState(path=Path("x"), by_name={"weight": {"exp_avg": moments, "exp_avg_sq": moments, "step": 3}})
    parameters = [TrainedParameter(name="weight", shape=(9, 4))]
    optimizer: Any = make_optimizer(SPEC, list(model.named_parameters()), state=assign_state(state, parameters, SPEC))
    held = optimizer.state[model.weight]
    assert held["exp_avg"].dtype is torch.float32
    assert held["step"].item() == 3.0
