"""A step is taken with the settings that it is given, and else with those of the spec."""

import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig

from actor_init.backends.ddp import DDPBackend
from actor_init.backends.fsdp2 import FSDP2Backend
from actor_init.model import ModelSource
from actor_init.schedule_and_norm import GROUP_NUMBER, Clipping, StepSettings, compute_total_norm, load_schedule
from actor_init.spec import ActorSpec, Dtype
from actor_init.weights import RandomWeights
from actor_init.world import World
from tests.actor_init.backends.test_fsdp2_groups import TINY

RATE, LIMIT = 0.5, 0.25


def open_actor(
    kind: type[Any],
    world: World,
    max_norm: float | None = LIMIT,
    *,
    dtype: Dtype = Dtype.FP32,
    optimizer: str = "sgd",
    momentum: float | None = None,
) -> Any:
    source = ModelSource(name="tiny", config=LlamaConfig(**TINY), weights=RandomWeights(seed=0, std=0.02))
    name = {DDPBackend: "ddp", FSDP2Backend: "fsdp2"}[kind]
    rate = RATE if optimizer != "none" else None
    spec = ActorSpec(
        backend=name, dtype=dtype, optimizer=optimizer, learning_rate=rate, max_norm=max_norm, momentum=momentum
    )
    return kind.open(spec.with_defaults(), source, world)


def put_gradients(actor: Any, size: float) -> float:
    """Give all elements of the model a gradient, and return its norm."""
    num_elements = 0
    for parameter in actor.model.parameters():
        parameter.grad = torch.full_like(parameter, size)
        num_elements += parameter.numel()
    return size * math.sqrt(num_elements)


def read_weights(actor: Any) -> torch.Tensor:
    return torch.cat([weight.flatten().double() for _, weight in actor.weights()])


CLIPPED = StepSettings(groups=[{}], clippings=[Clipping(order=2, limit=1.5)])
CASES: dict[str, tuple[float | None, StepSettings | None, float, float]] = {
    # The limit of the spec, the settings, the rate and the limit that the step is taken with.
    "of the spec": (LIMIT, None, RATE, LIMIT),
    "without a limit": (None, None, RATE, math.inf),
    "another rate": (LIMIT, StepSettings(groups=[{"lr": 0.2}]), 0.2, LIMIT),
    "another limit, wider than the spec's": (LIMIT, CLIPPED, RATE, 1.5),
    "a limit where the spec has none": (None, CLIPPED, RATE, 1.5),
}


@pytest.mark.parametrize("kind", [DDPBackend, FSDP2Backend])
@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_rate_and_the_limit_that_hold_for_it(kind: type[Any], case: str, world: World) -> None:
    max_norm, settings, rate, limit = CASES[case]
    actor = open_actor(kind, world, max_norm)
    before, norm = read_weights(actor), put_gradients(actor, 0.1)
    assert norm > 1.5
    # The norm is that before clipping.
    assert actor.end_window(step=True, settings=settings) == pytest.approx(norm)
    moved = before - read_weights(actor)
    expected = torch.full_like(moved, rate * 0.1 * min(1.0, limit / norm))
    # The weights are fp32, of a size of 1 at most.
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=2e-7)
    assert actor.progress().num_steps == 1


@pytest.mark.parametrize("kind", [DDPBackend, FSDP2Backend])
@pytest.mark.parametrize(
    ("step", "size", "needs_finite", "moves"),
    [
        (False, 0.1, False, False),
        (True, math.inf, True, False),
        (True, 0.1, True, True),
        # A job whose steps were taken whatever the norm was.
        (True, math.inf, False, True),
    ],
)
def test_no_weight_moves_and_no_rate_changes_without_a_step(
    kind: type[Any], step: bool, size: float, needs_finite: bool, moves: bool, world: World
) -> None:
    """A gradient that is left is none of the next window, either."""
    actor = open_actor(kind, world)
    before = read_weights(actor)
    put_gradients(actor, size)
    actor.end_window(step=step, settings=StepSettings(groups=[{"lr": 0.2}], needs_finite=needs_finite))
    assert bool((read_weights(actor) != before).any()) is moves
    assert list(actor.gradients()) == []
    assert actor.progress().num_steps == int(moves)
    assert actor.progress().learning_rate == (0.2 if moves else RATE)


def test_each_group_of_the_optimizer_goes_on_from_the_rate_of_its_own_group_of_the_job() -> None:
    """The optimizer may have a group of the job several times, and in another order."""
    numbers = (1, 0, 1)
    optimizer = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.ones(1))], GROUP_NUMBER: number} for number in numbers], lr=1.0
    )
    schedule = LambdaLR(optimizer, lambda num_steps: 0.5**num_steps)
    rates = (0.3, 0.7)
    settings = StepSettings(groups=[{"lr": rates[0], "weight_decay": 0.1, "eps": 1e-9}, {"lr": rates[1]}])
    settings.apply(optimizer, schedule)
    assert [group["lr"] for group in optimizer.param_groups] == [rates[number] for number in numbers]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1, 0.0]
    # SGD has no such setting.
    assert all("eps" not in group for group in optimizer.param_groups)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [rates[number] / 2 for number in numbers]
    StepSettings(groups=[{"weight_decay": 0.2}, {}]).apply(optimizer, schedule)
    schedule.step()
    assert schedule.get_last_lr() == [rates[number] / 4 for number in numbers]


@pytest.mark.parametrize("kind", [DDPBackend, FSDP2Backend])
def test_the_loss_scale_of_fp16_is_in_no_number_and_falls_where_a_gradient_overflows(
    kind: type[Any], world: World
) -> None:
    actor = open_actor(kind, world, dtype=Dtype.FP16)
    # A scaler has its scale from the first loss on.
    actor.scaler.scale(torch.zeros(1))
    scale, before = actor.loss_scale(), read_weights(actor)
    assert scale > 1
    norm = put_gradients(actor, 0.1 * scale) / scale
    for _, gradient in actor.gradients():
        torch.testing.assert_close(gradient, torch.full_like(gradient, 0.1))
    assert actor.end_window(step=True) == pytest.approx(norm)
    moved = before - read_weights(actor)
    # The weights are those that fp16 computes with: of a size of 1 at most.
    torch.testing.assert_close(moved, torch.full_like(moved, RATE * 0.1 * LIMIT / norm), rtol=0.0, atol=1e-3)
    assert (actor.loss_scale(), actor.progress().num_steps) == (scale, 1)
    before = read_weights(actor)
    put_gradients(actor, math.inf)
    assert actor.end_window(step=True) == math.inf
    assert torch.equal(read_weights(actor), before)
    assert (actor.loss_scale(), actor.progress().num_steps) == (scale / 2, 1)


@pytest.mark.parametrize("kind", [DDPBackend, FSDP2Backend])
@pytest.mark.parametrize(
    ("optimizer", "momentum", "numbers", "counts"), [("sgd", None, 0, 0), ("sgd", 0.9, 1, 0), ("adamw", None, 2, 1)]
)
def test_the_bytes_of_a_state_are_those_of_moments_and_counts(
    kind: type[Any], optimizer: str, momentum: float | None, numbers: int, counts: int, world: World
) -> None:
    actor = open_actor(kind, world, optimizer=optimizer, momentum=momentum)
    assert actor.count_state_bytes() == 0
    put_gradients(actor, 0.1)
    actor.end_window(step=True)
    parameters = list(actor.model.parameters())
    num_elements = sum(parameter.numel() for parameter in parameters)
    assert actor.count_state_bytes() == 4 * (numbers * num_elements + counts * len(parameters))


def test_an_actor_without_an_optimizer_has_no_state_and_no_progress(world: World) -> None:
    actor = open_actor(FSDP2Backend, world, None, optimizer="none")
    norm = put_gradients(actor, 0.1)
    assert actor.end_window(step=False) == pytest.approx(norm)
    assert (actor.count_state_bytes(), actor.progress().num_steps, actor.progress().learning_rate) == (0, 0, 0.0)
    assert list(actor.optimizer_states([name for name, _ in actor.model.named_parameters()])) == []


def test_the_norm_of_millions_of_numbers_is_right_on_a_cpu() -> None:
    """torch's own sums squares one after the other in fp32, which is off by 3e-4 here."""
    gradients = [torch.full((8_000_000,), 0.1), torch.full((3,), 2.0)]
    expected = math.sqrt(8_000_000 * float(torch.tensor(0.1).double()) ** 2 + 3 * 4.0)
    assert float(compute_total_norm(gradients)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("num_saved", "num_loaded"), [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_a_schedule_goes_on_with_more_groups_or_fewer(num_saved: int, num_loaded: int) -> None:
    """Under tp there are more groups, which all have the same rate; a job's groups have their own."""

    def make(rates: list[float]) -> LambdaLR:
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
        return LambdaLR(torch.optim.SGD(groups), lambda num_steps: 1 / (1 + num_steps))

    rates = [0.3, 0.7] if num_saved == num_loaded == 2 else [0.3] * num_saved
    saved, loaded = make(rates), make([0.9] * num_loaded)
    saved.step()
    load_schedule(loaded, saved.state_dict())
    assert loaded.last_epoch == 1
    loaded.step()
    expected = rates if num_loaded == num_saved else [0.3] * num_loaded
    assert loaded.get_last_lr() == pytest.approx([rate / 3 for rate in expected])
