"""DeepSpeed's engine says whether it stepped: without a step, the schedule stays where it was."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actor_init.backends.deepspeed import DeepSpeedBackend, StepGate
from actor_init.schedule_and_norm import StepSettings, make_schedule
from actor_init.spec import ActorSpec


@pytest.mark.parametrize(
    ("step", "overflows", "norm", "num_steps"),
    [(True, False, 2.0, 1), (True, True, float("inf"), 0), (True, False, float("nan"), 0), (False, False, 2.0, 0)],
)
def test_the_schedule_counts_the_steps_that_were_taken(
    step: bool, overflows: bool, norm: float, num_steps: int
) -> None:
    """In fp16 the engine leaves out a step whose gradients overflow."""
    spec = ActorSpec(optimizer="adamw", lr_warmup_steps=4).with_defaults()
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    engine = SimpleNamespace(
        basic_optimizer=optimizer,
        step=lambda: optimizer.step(),
        get_global_grad_norm=lambda: norm,
        was_step_applied=lambda: not overflows,
        zero_optimization_stage=lambda: 1,
    )
    parts: dict[str, Any] = dict.fromkeys(("source", "attention", "kernels", "config"))
    backend = DeepSpeedBackend(
        spec=spec,
        engine=engine,
        gate=StepGate(),
        schedule=make_schedule(spec, optimizer),
        num_parameters=1,
        **parts,
    )
    settings = StepSettings(groups=[{}], needs_finite=True)
    backend.end_window(step=step, settings=None if overflows else settings)
    assert (backend.progress().num_steps, backend.progress().learning_rate) == (num_steps, num_steps / 4)
