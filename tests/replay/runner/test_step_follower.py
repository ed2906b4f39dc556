"""Steps that nobody asked for are followed until something speaks against them, and cost no pass anything."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actor_init.option_values import Dtype
from actor_init.schedule_and_norm import StepSettings
from actor_init.spec import ActorSpec
from capture.file_format.optimizer_step import Sample
from replay.runlog.records import CostSection, PhaseCost
from replay.runner.run_pass import PassInputs, StepTiming, WindowEnd
from replay.runner.step_follower import StepFollower
from tests.helpers.thread_ranks import CPU, call_on_ranks

SETTINGS = StepSettings(groups=[{"lr": 0.5}])
COST = CostSection(
    phases={"forward": PhaseCost(seconds=1.0, allocated_bytes=500, peak_allocated_bytes=900, peak_reserved_bytes=None)}
)


class CountingBackend:
    """Takes the steps that it is told to take."""

    num_steps = 0

    def progress(self) -> Any:
        return SimpleNamespace(num_steps=self.num_steps)

    def count_state_bytes(self) -> int:
        return 100 * bool(self.num_steps)


def follow(*, unasked: bool = True, needed: int = 1, free: int | None = 100) -> StepFollower:
    spec = SimpleNamespace(
        measure=SimpleNamespace(steps=True), steps_unasked=unasked, step_settings={0: SETTINGS, 1: SETTINGS}
    )
    world = SimpleNamespace(gather=lambda value: [value], device=None)
    return StepFollower(spec=cast(Any, spec), world=cast(Any, world), read_memory=lambda *_: (needed, free))


def make_inputs() -> PassInputs:
    return PassInputs(
        actor_inputs=cast(Any, None),
        compute_loss=cast(Any, None),
        train_mode=True,
        builds_graph=True,
        runs_backward=True,
        window_end=WindowEnd.COMPLETE,
        captured_row_length=1,
    )


def run(follower: StepFollower, backend: CountingBackend, index: int, *, steps: bool = True) -> tuple[Any, CostSection]:
    inputs = follower.plan_step(make_inputs(), index, cast(Any, backend))
    backend.num_steps += steps and (inputs.step_timing is not StepTiming.NONE)
    cost = follower.subtract_optimizer_state_bytes(COST)
    follower.count_step(inputs, cast(Any, backend))
    return inputs, cost


def test_a_step_that_was_asked_for_is_a_part_of_its_pass() -> None:
    follower, backend = follow(unasked=False), CountingBackend()
    inputs, _ = run(follower, backend, 0)
    assert (inputs.step_timing, inputs.step_settings) == (StepTiming.MEASURED, SETTINGS)
    # Behind the job's steps it steps on.
    inputs, cost = run(follower, backend, 5)
    assert (inputs.step_timing, inputs.step_settings, follower.num_steps) == (StepTiming.MEASURED, None, 2)
    assert cost == COST
    assert follower.describe() == []


def test_one_that_nobody_asked_for_is_none_and_its_state_is_in_no_peak() -> None:
    follower, backend = follow(), CountingBackend()
    inputs, cost = run(follower, backend, 0)
    assert inputs.step_timing is StepTiming.UNMEASURED
    assert inputs.step_settings == replace(SETTINGS, needs_finite=True)
    assert (cost, follower.latest_pass_has_stepped, follower.num_steps) == (COST, True, 1)
    _, cost = run(follower, backend, 1)
    assert (cost.phases["forward"].peak_allocated_bytes, cost.phases["forward"].allocated_bytes) == (800, 400)
    inputs, _ = run(follower, backend, 2)
    assert (inputs.step_timing, follower.latest_pass_has_stepped) == (StepTiming.NONE, False)


def test_a_gradient_that_is_not_finite_ends_the_steps() -> None:
    follower, backend = follow(), CountingBackend()
    run(follower, backend, 0, steps=False)
    assert (follower.num_steps, follower.why_stopped) == (0, "the gradient of step 1 is not finite here")
    assert run(follower, backend, 1)[0].step_timing is StepTiming.NONE


def test_behind_a_failed_pass_the_weights_are_those_of_the_beginning() -> None:
    follower, backend = follow(), CountingBackend()
    run(follower, backend, 0)
    follower.forget_steps("a pass failed")
    assert (follower.num_steps, follower.state_bytes) == (0, 0)
    assert run(follower, CountingBackend(), 1)[0].step_timing is StepTiming.NONE
    assert "1 step" in follower.describe()[0][1]
    assert "a pass failed" in follower.describe()[0][1]


@pytest.mark.parametrize(("needed", "free", "is_made"), [(60, 100, False), (50, 100, True), (60, None, True)])
def test_a_state_that_leaves_too_little_memory_is_not_made(needed: int, free: int | None, is_made: bool) -> None:
    follower = follow(needed=needed, free=free)
    step_timing = run(follower, CountingBackend(), 0)[0].step_timing
    assert step_timing is (StepTiming.UNMEASURED if is_made else StepTiming.NONE)
    assert ("Try: --step" in follower.why_stopped) is not is_made


@pytest.mark.parametrize(
    ("memory", "is_made"),
    [
        ([(50, 100), (50, 100)], True),
        ([(60, 100), (50, 100)], False),
        ([(50, 100), (60, 100)], False),
        ([(50, 100), (50, 90), (50, 100)], False),
        ([(60, 100), (60, 100)], False),
        # Of one rank it is not known.
        ([(60, None), (50, 100)], True),
        ([(60, None), (60, 100)], False),
        ([(60, 100), (60, None)], False),
    ],
)
def test_ranks_step_together_or_not_at_all(memory: list[tuple[int, int | None]], is_made: bool) -> None:
    """One that stepped alone would wait for the others, or train apart."""
    spec: Any = SimpleNamespace(
        measure=SimpleNamespace(steps=True), steps_unasked=True, step_settings={0: SETTINGS, 1: SETTINGS}
    )

    def step_on_rank(world: Any) -> tuple[list[StepTiming], bool]:
        follower = StepFollower(spec=spec, world=world, read_memory=lambda *_: memory[world.rank])
        backend = CountingBackend()
        timings = [run(follower, backend, index)[0].step_timing for index in range(2)]
        return timings, bool(follower.why_stopped)

    found = call_on_ranks(step_on_rank, [CPU] * len(memory))
    timing = StepTiming.UNMEASURED if is_made else StepTiming.NONE
    assert found == [([timing] * 2, not is_made)] * len(memory)


def test_ranks_sample_each_weight_that_the_job_sampled_on_any_of_them() -> None:
    """A backend gathers a weight with all ranks, so each asks for the names of all."""
    names_asked: list[set[str]] = []

    def sample_on_rank(world: Any) -> list[str]:
        follower = follow()
        follower.world, follower.num_steps = world, 1
        cast(Any, follower.spec).actor = SimpleNamespace(backend="fsdp2", dtype=Dtype.FP32)
        own = {f"w{world.rank}": Sample(name="", dtype="float32", shape=(1,), start=0, values=(0.5,))}
        checker: Any = SimpleNamespace(
            match_to_parameters=lambda _: own, read_initial_values=lambda samples: {name: [0.25] for name in samples}
        )

        def give_masters(names: set[str]) -> list[tuple[str, torch.Tensor]]:
            names_asked.append(set(names))
            return [(name, torch.tensor([0.75])) for name in sorted(names)]

        found = follower.sample_weights(
            cast(Any, SimpleNamespace(masters=give_masters)), cast(Any, SimpleNamespace(samples=())), checker
        )
        return [sample.name for sample in found]

    assert call_on_ranks(sample_on_rank, [CPU] * 2) == [["w0"], ["w1"]]
    assert names_asked == [{"w0", "w1"}] * 2


@pytest.mark.parametrize(
    ("backend", "num_data_ranks", "num_bytes"),
    [("deepspeed", 1, 8000), ("deepspeed", 8, 1000), ("fsdp2", 4, 2000), ("ddp", 8, 8000)],
)
def test_the_state_is_predicted_of_the_share_that_a_rank_holds(
    backend: str, num_data_ranks: int, num_bytes: int
) -> None:
    """AdamW keeps two numbers in fp32 for each of 1000 parameters. DDP gives each rank all of them."""
    actor = ActorSpec(backend=backend, dtype=Dtype.BF16, optimizer="adamw").with_step_defaults()
    spec: Any = SimpleNamespace(actor=actor)
    world: Any = SimpleNamespace(num_data_ranks=num_data_ranks, device=torch.device("cpu"))
    opened: Any = SimpleNamespace(facts=lambda: {"num_parameters": 1000})
    predicted, _ = StepFollower(spec=spec, world=world).read_memory(spec, world, opened)
    assert predicted == num_bytes


@pytest.mark.parametrize(("backend", "begun"), [("deepspeed", 0.00952148), ("fsdp2", 0.00950961)])
def test_a_step_is_measured_from_where_the_masters_began(backend: str, begun: float) -> None:
    """DeepSpeed makes them of weights in bf16, which is farther from the job's than a small step."""
    follower = follow()
    cast(Any, follower.spec).actor = SimpleNamespace(backend=backend, dtype=Dtype.BF16)
    follower.num_steps = 1
    sample = Sample(name="w", dtype="float32", shape=(1,), start=0, values=(0.0095,))
    checker = SimpleNamespace(
        match_to_parameters=lambda _: {"w": sample}, read_initial_values=lambda _: {"w": [0.00950961]}
    )
    masters = SimpleNamespace(masters=lambda _: [("w", torch.tensor([begun - 1e-5]))])
    [taken] = follower.sample_weights(cast(Any, masters), cast(Any, SimpleNamespace(samples=())), cast(Any, checker))
    assert taken.replay_values == pytest.approx([0.00950961 - 1e-5], abs=1e-8)
