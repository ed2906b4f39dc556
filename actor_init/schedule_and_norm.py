"""Follow the steps of the optimizer for every backend: the schedule of its learning rate, the norm, the loss scale."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from actor_init.spec import ActorSpec, Dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The number of steps taken, without steps that fp16 skipped, and the learning rate of the next one."""

    num_steps: int
    learning_rate: float

    @classmethod
    def from_schedule(cls, schedule: LambdaLR | None) -> "Progress":
        if schedule is None:
            return cls(num_steps=0, learning_rate=0.0)
        return cls(num_steps=schedule.last_epoch, learning_rate=float(schedule.get_last_lr()[0]))


TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP32: torch.float32, Dtype.FP16: torch.float16}


# What torch's optimizer keeps of a group of `ModelSource.optimizer_groups`: its number there.
GROUP_NUMBER = "micro_replay_group"


@dataclass(frozen=True, kw_only=True, slots=True)
class Clipping:
    """One clipping of a step's gradients.

    order  of the norm of all gradients; None: each element's value is clipped
    """

    order: float | None
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """What one step of the optimizer is taken with, in place of what the spec says.

    clippings     of the gradients, in their order, in place of the one to the spec's norm; empty: that one
    groups        settings as torch's optimizers have them, of each parameter group of the model's source by number
    needs_finite  the step is left out where the gradient's norm is not finite
    """

    groups: Sequence[Mapping[str, Any]]
    needs_finite: bool = False
    clippings: Sequence[Clipping] = ()

    def apply(self, optimizer: Optimizer, schedule: LambdaLR | None) -> None:
        """Set those that a group has before a step. Where rates are among them, the schedule goes on from those."""
        for group in optimizer.param_groups:
            settings = self.groups[group.get(GROUP_NUMBER, 0)]
            group.update({name: value for name, value in settings.items() if name in group})
        if schedule is not None and "lr" in self.groups[0]:
            schedule.base_lrs = [group["lr"] for group in optimizer.param_groups]


def allows_step(settings: StepSettings | None, norm: float | Tensor | None) -> bool:
    """May a step be taken with a gradient of this norm?"""
    return settings is None or not settings.needs_finite or norm is None or math.isfinite(norm)


@torch.no_grad()
def clip_gradients(parameter_groups: Sequence[Sequence[nn.Parameter]], clippings: Sequence[Clipping]) -> None:
    """Clip the gradients of all parameters, one clipping after the other, as torch's functions do.

    parameter_groups  of one mesh each, where they are DTensors: an operation takes one mesh at a time
    """
    groups = [[value.grad for value in group if value.grad is not None] for group in parameter_groups]
    local_gradients = [
        gradient.to_local() if isinstance(gradient, DTensor) else gradient for group in groups for gradient in group
    ]
    for clipping in clippings:
        if clipping.order is None:
            for gradient in local_gradients:
                gradient.clamp_(-clipping.limit, clipping.limit)
            continue
        order = clipping.order
        norms = [compute_total_norm(group) if order == 2 else get_total_norm(group, order) for group in groups if group]
        whole_norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        factor = clipping.limit / (torch.linalg.vector_norm(torch.stack(whole_norms), order) + 1e-6)
        for gradient in local_gradients:
            gradient.mul_(factor.clamp(max=1.0).to(gradient.dtype))


@torch.no_grad()
def count_state_bytes(optimizer: Optimizer | None) -> int:
    """Count the bytes of what this rank's optimizer keeps of its steps."""
    states = optimizer.state.values() if optimizer is not None else ()
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in (value.to_local() if isinstance(value, DTensor) else value for value in tensors)
    )


def make_schedule(spec: ActorSpec, optimizer: Optimizer) -> LambdaLR:
    """Return the schedule; its `last_epoch` counts the steps taken. The first warm-up step has learning rate 0."""
    num_warmup = spec.lr_warmup_steps
    return LambdaLR(optimizer, lambda step: step / num_warmup if step < num_warmup else 1.0)


def update_scale_and_rate(scaler: torch.amp.GradScaler, schedule: LambdaLR | None) -> None:
    """Update the loss scale for the next window, and if the optimizer stepped, the learning rate.

    A step that the scaler skipped because fp16 overflowed does not count.
    """
    scale = scaler.get_scale()
    if scaler.is_enabled():
        scaler.update()
    if schedule is not None and scaler.get_scale() >= scale:
        schedule.step()


def undo_loss_scale(gradient: Tensor, scale: float) -> Tensor:
    """Return a gradient in fp32 without the loss scale: itself where there is nothing to do."""
    return gradient.float() if scale == 1 else gradient.float() / scale


def load_schedule(schedule: LambdaLR, saved: Mapping[str, Any]) -> None:
    """Load `schedule.state_dict()`. Under tp there are more groups than without, which then have all the same rate."""
    num_groups = len(schedule.base_lrs)
    state = {
        key: value[:1] * num_groups if isinstance(value, list) and len(value) != num_groups else value
        for key, value in saved.items()
    }
    schedule.load_state_dict(state)


def compute_total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients, fp32 or wider; torch's own except on a CPU, where it sums squares naively in
    fp32.

    That is off by 3e-4 for 8 million elements, and by 3e-3 for 50 million (torch 2.13).
    """
    if not gradients or gradients[0].device.type != "cpu":
        return get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
