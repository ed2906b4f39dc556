"""Each family steps as its own class does, alone, beside another and in shards."""

import json
import sys
from collections.abc import Callable
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
from actor_init.spec import ActorSpec, ParallelSpec, UsageError
from tests.actor_init.optimizers.step_worker import OUTER, SmallModel, step_with, take_steps
from tests.helpers.ranks import run_ranks
from tests.helpers.thread_ranks import run_with_groups

RATE = 1e-2


def make_spec(word: str, **settings: Any) -> ActorSpec:
    return ActorSpec(backend="ddp", optimizer=word, learning_rate=RATE, **settings)


def step_directly(word: str, own: dict[str, Any], of_companion: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Step with the class itself, as a job would set it up."""
    torch.manual_seed(0)
    model = SmallModel()
    parameters = dict(model.named_parameters())
    matrices = [parameters[name] for name in ("wide.weight", "narrow.weight")]
    others = [parameter for parameter in parameters.values() if not any(parameter is matrix for matrix in matrices)]
    everything = list(parameters.values())
    make_optimizers: dict[str, Callable[[], list[Optimizer]]] = {
        "adamw": lambda: [torch.optim.AdamW(everything, **own)],
        "adam": lambda: [torch.optim.Adam(everything, **own)],
        "sgd": lambda: [torch.optim.SGD(everything, **own)],
        "adafactor": lambda: [torch.optim.Adafactor(everything, **own)],
        "transformers-adafactor": lambda: [
            TransformersAdafactor(everything, scale_parameter=False, relative_step=False, **own)
        ],
        "muon": lambda: [torch.optim.Muon(matrices, **own), torch.optim.AdamW(others, **of_companion)],
    }
    return take_steps(model, make_optimizers[word]())


WORDS = ["adamw", "adam", "sgd", "adafactor", "transformers-adafactor", "muon"]
ADAM_TYPED = {"beta1": 0.7, "beta2": 0.8, "eps": 1e-3, "weight_decay": 0.3}
ADAM_OWN = {"betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.3}
# What is typed of each family, and how a job would write the same.
TYPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw": (ADAM_TYPED, ADAM_OWN),
    "adam": (ADAM_TYPED, ADAM_OWN),
    "sgd": ({"momentum": 0.6, "weight_decay": 0.3}, {"momentum": 0.6, "weight_decay": 0.3}),
    "adafactor": ({"weight_decay": 0.3}, {"weight_decay": 0.3}),
    "transformers-adafactor": ({"beta1": 0.7, "weight_decay": 0.3}, {"beta1": 0.7, "weight_decay": 0.3}),
    "muon": ({"momentum": 0.6, "weight_decay": 0.3}, {"momentum": 0.6, "weight_decay": 0.3}),
}


@pytest.mark.parametrize("is_typed", [False, True], ids=["defaults", "typed"])
@pytest.mark.parametrize("word", WORDS)
def test_three_steps_are_those_of_the_class_itself(word: str, is_typed: bool) -> None:
    typed, own = TYPED[word] if is_typed else ({}, {})
    # Weight decay alone is typed for the companion too.
    of_companion = {name: value for name, value in own.items() if name == "weight_decay"}
    expected = step_directly(word, {"lr": RATE, **own}, {"lr": RATE, **of_companion})
    found = step_with(make_spec(word, **typed))
    for name, weight in expected.items():
        # The same operations on the same numbers: not one bit may differ. On CUDA torch's fused kernel is taken.
        assert torch.equal(found[name], weight) or torch.cuda.is_available(), name


class AnyFamily(Optimizer):
    """Stands for the class of a family whose package may not be installed: it keeps the settings that it is given."""

    def __init__(self, params: Any, lr: float = 0.0, betas: Any = None, eps: Any = None, weight_decay: Any = None):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


# What is typed, the setting of a group that it is, and the families and companions that have it, by hand.
ADAM_LIKE = ["adamw", "adam", "adamw-8bit", "adam-8bit"]
LION_LIKE = ["lion", "lion-8bit"]
HAVE_BETAS = [*ADAM_LIKE, *LION_LIKE]
OPTION_CASES = [
    *(("learning_rate", word, [{"lr"}] * (2 if word == "muon" else 1)) for word in OPTIMIZERS),
    *(("weight_decay", word, [{"weight_decay"}] * (2 if word == "muon" else 1)) for word in OPTIMIZERS),
    *((beta, word, [{"betas"}]) for beta in ("beta1", "beta2") for word in HAVE_BETAS),
    ("beta1", "transformers-adafactor", [{"beta1"}]),
    *(("eps", word, [{"eps"}]) for word in ADAM_LIKE),
    ("momentum", "sgd", [{"momentum"}]),
    ("momentum", "muon", [{"momentum"}, set()]),
]


@pytest.mark.parametrize(("option", "word", "changes"), OPTION_CASES, ids=lambda value: value if value else None)
def test_what_is_typed_is_set_in_each_group_that_has_it_and_changes_nothing_else(
    option: str, word: str, changes: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also zero, which is a value like another."""
    if word in ("lion", "lion-8bit", "adamw-8bit", "adam-8bit"):
        monkeypatch.setattr("actor_init.optimizers.build.find_engine_class", lambda declaration: AnyFamily)
    named = list_named_parameters(SmallModel())

    def list_groups(**typed: Any) -> list[dict[str, Any]]:
        optimizer = make_optimizer(ActorSpec(**{"backend": "ddp", "optimizer": word, **typed}), named, outer=OUTER)
        assert optimizer is not None
        return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]

    plain = list_groups()
    for value in (0.0, 3e-7):
        place = {"beta1": 0, "beta2": 1}.get(option)
        for group, plain_group, names in zip(list_groups(**{option: value}), plain, changes, strict=True):
            assert {name for name in group if group[name] != plain_group[name]} | names == names
            found = [group[name][place] if name == "betas" and place is not None else group[name] for name in names]
            assert found == [value] * len(names)
            if "betas" in names and place is not None:
                assert group["betas"][1 - place] == plain_group["betas"][1 - place]


def test_every_option_of_every_family_is_among_these_cases() -> None:
    cases = {(word, option) for option, word, _ in OPTION_CASES if option != "learning_rate"}
    assert cases == {(word, option) for word, family in OPTIMIZERS.items() for option in family.options}


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


def test_members_of_a_combined_optimizer_step_on_their_own_groups_however_many_each_has() -> None:
    rates = (0.1, 0.2, 0.4)
    values = [torch.nn.Parameter(torch.ones(1)) for _ in rates]
    groups = [{"params": [value], "lr": rate} for value, rate in zip(values, rates, strict=True)]
    optimizer = CombinedOptimizer([torch.optim.SGD(groups[:2]), torch.optim.SGD(groups[2:], maximize=True)])
    for value in values:
        value.grad = torch.ones(1)
    optimizer.step()
    assert [float(value) for value in values] == pytest.approx([0.9, 0.8, 1.4])
    # A schedule sets the rates of the groups that the members step with, also after a state was loaded.
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    optimizer.step()
    assert [float(value) for value in values] == pytest.approx([-0.1, -0.2, 2.4])


@pytest.mark.parametrize("word", WORDS)
def test_in_uneven_shards_of_threads_each_family_steps_as_on_whole_parameters(word: str) -> None:
    """Three steps: the second is the first that goes on from a state."""
    settings: Any = {"weight_decay": 0.1} | ({"momentum": 0.9} if word == "sgd" else {})
    # The gradients are large, and SGD's steps are as large as they.
    rate = 1e-5 if word == "sgd" else 1e-2
    spec = ActorSpec(backend="fsdp2", optimizer=word, learning_rate=rate, **settings)
    whole = step_with(spec)
    ranks = run_with_groups(lambda world: step_with(spec, mesh=world.weights_mesh["shard"]), 3, ParallelSpec())
    for sharded in ranks:
        for name, weight in whole.items():
            # As with processes, below.
            assert float((sharded[name] - weight).abs().max()) < 1e-6, name


@pytest.mark.slow
def test_in_shards_of_two_ranks_each_family_steps_as_on_whole_parameters() -> None:
    said = run_ranks(["-m", "tests.actor_init.optimizers.step_worker", *WORDS], 2)
    distances = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    # Shards add gradients up in another order at most: one ulp of a weight near 1, times three steps.
    assert set(distances) == set(WORDS)
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

def remember(named_parameters, settings):
    optimizer = torch.optim.SGD([parameter for _, parameter in named_parameters], lr=1.0)
    optimizer.given = settings
    return optimizer

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


def test_a_function_of_the_user_is_given_what_the_first_group_of_the_job_has_and_else_what_is_typed(
    user_file: Path,
) -> None:
    """What is typed is in the groups of the job already, where they have such a setting."""
    named = list_named_parameters(SmallModel())
    names = frozenset(name for name, _ in named)
    groups = [
        ParameterGroup(family="", settings={"lr": 0.5, "betas": (0.7, 0.8), "eps": None}, names=names),
        ParameterGroup(family="", settings={"lr": 0.25, "betas": (0.1, 0.2)}, names=frozenset()),
    ]
    spec = ActorSpec(backend="ddp", optimizer=f"{user_file}:remember", learning_rate=0.1, beta2=0.9, weight_decay=0.3)
    typed = {"lr": 0.1, "beta2": 0.9, "weight_decay": 0.3}
    optimizer: Any = make_optimizer(spec, named)
    assert optimizer.given == typed
    optimizer = make_optimizer(spec, named, groups=groups)
    assert optimizer.given == {**typed, "lr": 0.5, "beta1": 0.7, "beta2": 0.8, "eps": None}


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
