"""Each family steps as its own class does, alone, beside another and in shards."""

import json
import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from transformers.optimization import Adafactor as TransformersAdafactor

from actor_init.declarations.optimizers import OPTIMIZERS
from actor_init.declarations.optimizers.declaration import ParameterGroup
from actor_init.optimizers.build import find_outer_parameters, list_named_parameters, make_optimizer
from actor_init.optimizers.combined import CombinedOptimizer
from actor_init.schedule_and_norm import StepSettings
from actor_init.spec import ActorSpec, UsageError
from tests.actor_init.optimizers.step_worker import OUTER, SmallModel, step_with, take_steps
from tests.helpers.ranks import run_ranks

RATE = 1e-2


def make_spec(word: str, **settings: Any) -> ActorSpec:
    return ActorSpec(backend="ddp", optimizer=word, learning_rate=RATE, **settings)


def step_directly(word: str) -> dict[str, torch.Tensor]:
    """Step with the class itself, as a job would set it up."""
    torch.manual_seed(0)
    model = SmallModel()
    parameters = dict(model.named_parameters())
    matrices = [parameters[name] for name in ("wide.weight", "narrow.weight")]
    others = [parameter for parameter in parameters.values() if not any(parameter is matrix for matrix in matrices)]
    everything = list(parameters.values())
    optimizers: dict[str, list[Optimizer]] = {
        "adamw": [torch.optim.AdamW(everything, lr=RATE)],
        "adam": [torch.optim.Adam(everything, lr=RATE)],
        "sgd": [torch.optim.SGD(everything, lr=RATE)],
        "adafactor": [torch.optim.Adafactor(everything, lr=RATE)],
        "transformers-adafactor": [
            TransformersAdafactor(everything, lr=RATE, scale_parameter=False, relative_step=False)
        ],
        "muon": [torch.optim.Muon(matrices, lr=RATE), torch.optim.AdamW(others, lr=RATE)],
    }
    return take_steps(model, optimizers[word])


@pytest.mark.parametrize("word", ["adamw", "adam", "sgd", "adafactor", "transformers-adafactor", "muon"])
def test_three_steps_are_those_of_the_class_itself(word: str) -> None:
    expected, found = step_directly(word), step_with(make_spec(word))
    for name, weight in expected.items():
        # The same operations on the same numbers: not one bit may differ. On CUDA torch's fused kernel is taken.
        assert torch.equal(found[name], weight) or torch.cuda.is_available(), name


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_job_that_stepped_with_the_fused_kernel_is_followed_with_it(is_fused: bool) -> None:
    torch.manual_seed(0)
    model = SmallModel()
    expected = take_steps(model, [torch.optim.AdamW(model.parameters(), lr=RATE, fused=is_fused)])
    torch.manual_seed(0)
    model = SmallModel()
    named = list_named_parameters(model)
    names = frozenset(name for name, _ in named)
    group = ParameterGroup(family="adamw", settings={"lr": RATE}, names=names, is_fused=is_fused)
    found = take_steps(model, [make_optimizer(make_spec("adamw"), named, groups=[group])])
    # The same kernel on the same numbers: not one bit may differ. The other one differs in the last bits.
    assert all(torch.equal(found[name], weight) for name, weight in expected.items()) or torch.cuda.is_available()


@pytest.mark.slow
def test_in_shards_of_two_ranks_each_family_steps_as_on_whole_parameters() -> None:
    words = ["adamw", "adam", "sgd", "adafactor", "transformers-adafactor", "muon"]
    said = run_ranks(["-m", "tests.actor_init.optimizers.step_worker", *words], 2)
    distances = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    # Shards add gradients up in another order at most: one ulp of a weight near 1, times three steps.
    assert set(distances) == set(words)
    assert max(distances.values()) < 1e-6


def test_the_groups_of_a_job_have_their_own_family_and_settings() -> None:
    model = SmallModel()
    named = list_named_parameters(model)
    matrices = frozenset({"wide.weight", "narrow.weight"})
    others = frozenset(name for name, _ in named) - matrices
    groups = [
        ParameterGroup(family="sgd", settings={"lr": 0.5, "momentum": 0.9}, names=matrices),
        ParameterGroup(family="adamw", settings={"lr": 0.25, "weight_decay": 0.0}, names=others),
    ]
    # A setting that a group lacks is the class's own.
    full = [
        ParameterGroup(
            family=group.family,
            settings=OPTIMIZERS[group.family].read_job_settings(group.settings),
            names=group.names,
        )
        for group in groups
    ]
    optimizer = make_optimizer(make_spec("adamw"), named, groups=full)
    assert isinstance(optimizer, CombinedOptimizer)
    assert [type(member).__name__ for member in optimizer.members] == ["SGD", "AdamW"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, len(others)]


def test_a_parameter_that_the_groups_of_a_job_lack_is_refused() -> None:
    named = list_named_parameters(SmallModel())
    groups = [ParameterGroup(family="sgd", settings={"lr": 0.5}, names=frozenset({"wide.weight"}))]
    with pytest.raises(UsageError, match="has no stack, which is trained here"):
        make_optimizer(make_spec("adamw"), named, groups=groups)


def test_a_combined_optimizer_goes_on_from_its_state() -> None:
    model, other = SmallModel(), SmallModel()
    other.load_state_dict(model.state_dict())
    spec = make_spec("muon")
    first = make_optimizer(spec, list_named_parameters(model), outer=OUTER)
    second = make_optimizer(spec, list_named_parameters(other), outer=OUTER)
    assert first is not None
    assert second is not None
    take_steps(model, [first])
    other.load_state_dict(model.state_dict())
    # torch takes the tensors of a state as they are, so without a copy the two would share their moments.
    second.load_state_dict(deepcopy(first.state_dict()))
    expected, found = take_steps(model, [first]), take_steps(other, [second])
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_embedding_and_head_are_left_to_the_companion_of_muon() -> None:
    assert find_outer_parameters(SmallModel()) == OUTER


USER_FILE = """
import torch

def build(named_parameters, settings):
    return torch.optim.RMSprop([parameter for _, parameter in named_parameters], lr=settings["lr"])

def build_adamw(named_parameters, settings):
    return torch.optim.AdamW(named_parameters, lr=settings["lr"], betas=(0.5, settings["beta2"]))

def forget(named_parameters, settings):
    return torch.optim.SGD([named_parameters[0][1]], lr=1.0)

def return_number(named_parameters, settings):
    return 3

def fail(named_parameters, settings):
    raise KeyError("warmup")
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


def test_a_function_of_the_user_makes_the_optimizer(user_file: Path) -> None:
    optimizer = make_optimizer(make_spec(f"{user_file}:build"), list_named_parameters(SmallModel()))
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert optimizer.param_groups[0]["lr"] == RATE


def test_the_optimizer_of_the_users_function_follows_the_groups_and_the_steps_of_the_job(user_file: Path) -> None:
    torch.manual_seed(0)
    model = SmallModel()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    own = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0, "lr": 0.25}]
    job = torch.optim.AdamW(own, lr=0.5, betas=(0.8, 0.9))
    after_one = {name: weight.clone() for name, weight in take_steps(model, [job], 1).items()}
    for group in job.param_groups:
        group.update(lr=group["lr"] / 2, betas=(0.7, 0.9))
    expected = take_steps(model, [job], 1)

    torch.manual_seed(0)
    model = SmallModel()
    named = list_named_parameters(model)
    shared = {"betas": (0.8, 0.9), "momentum": 0.9}
    groups = [
        ParameterGroup(
            family="mine.py:build_adamw",
            settings={"lr": rate, "weight_decay": decay, **shared},
            names=frozenset(name for name, parameter in named if (parameter.ndim > 1) is is_matrix),
        )
        for rate, decay, is_matrix in [(0.5, 0.5, True), (0.25, 0.0, False)]
    ]
    spec = ActorSpec(backend="ddp", optimizer=f"{user_file}:build_adamw")
    optimizer = make_optimizer(spec, named, groups=groups)
    assert optimizer is not None
    found = take_steps(model, [optimizer], 1)
    assert all(torch.equal(found[name], weight) for name, weight in after_one.items())
    assert sorted(name for group in optimizer.param_groups for name in group["param_names"]) == sorted(dict(named))

    settings = [{"lr": rate, "betas": (0.7, 0.9), "momentum": 0.9} for rate in (0.25, 0.125)]
    StepSettings(groups=settings).apply(optimizer, None)
    assert all("momentum" not in group for group in optimizer.param_groups)
    found = take_steps(model, [optimizer], 1)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("forget", "does not step on embedding.weight and 5 more"),
        ("return_number", "return_number returned a int"),
        ("fail", "fail raised KeyError"),
        ("nothing", "has no function nothing"),
    ],
)
def test_a_function_that_gives_no_optimizer_of_the_parameters_is_refused(
    user_file: Path, function: str, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        make_optimizer(make_spec(f"{user_file}:{function}"), list_named_parameters(SmallModel()))


class FakeLion(torch.optim.SGD):
    """Stands for lion-pytorch's class, which has these settings."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.betas = betas


def test_lion_is_that_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("lion_pytorch")
    package.Lion = FakeLion  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lion_pytorch", package)
    monkeypatch.setattr("actor_init.optimizers.build.find_spec", lambda name: name == "lion_pytorch" or None)
    optimizer = make_optimizer(make_spec("lion", weight_decay=0.5), list_named_parameters(SmallModel()))
    assert isinstance(optimizer, FakeLion)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
