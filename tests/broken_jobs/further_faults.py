"""Patches of dropout, and of what happens to weights between two steps."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.broken_jobs.declarations import At, Fault, Parameters
from tests.broken_jobs.faults import GradientPatch, through_bf16


def stays_in_eval_mode(model: Any) -> None:
    """The loop's model.train() is lost, as where an evaluation was not undone."""
    model.eval()
    model.train = lambda mode=True: model


def masks_drawn_anew(model: Any) -> None:
    """What is recomputed in the backward drops out other values than the forward did."""
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
    )


def dropout_set(rate: float) -> Any:
    """The rate of every nn.Dropout, and of attention's own."""

    def breaks(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = rate
            for attribute in ("attention_dropout", "attn_pdrop"):
                if isinstance(vars(module).get(attribute), float):
                    setattr(module, attribute, rate)

    return breaks


def cleared_before_forward(model: Any) -> None:
    """The gradients of a window's earlier micro-batches are lost, as where the loop over them empties them."""
    model.register_forward_pre_hook(lambda *_: model.zero_grad())


def optimizer_of_frozen_parameters() -> Fault:
    """The optimizer has the frozen parameters and no other, as where it was made before the adapter."""
    frozen: list[nn.Parameter] = []

    def collect(model: Any) -> None:
        frozen.extend(parameter for parameter in model.parameters() if not parameter.requires_grad)

    def give(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["params"] = frozen

    return Fault(model=collect, optimizer=give)


def loaded_on_rank_0_alone(wrapped: Any) -> None:
    """The last rank keeps the weights that it drew: DDP has given all ranks rank 0's before these were loaded."""
    if dist.get_rank() == dist.get_world_size() - 1:
        draws = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.05)


def setting_of_last_rank(name: str, value: Any) -> Any:
    """One setting of the optimizer is another one on the last rank."""

    def breaks(optimizer: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            for group in optimizer.param_groups:
                group[name] = value

    return breaks


def cast_and_back(at_step: int) -> GradientPatch:
    """After that step the weights go through bf16, as where the model is cast in place for a checkpoint."""

    def breaks(parameters: Parameters, at: At) -> None:
        if at.step == at_step:
            copy_into(parameters, {name: through_bf16(parameter.detach()) for name, parameter in parameters.items()})

    return breaks


def frozen_through_bf16(parameters: Parameters, _: At) -> None:
    """What is frozen goes through bf16, as where it is pushed in place to an engine that generates."""
    frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
    copy_into(frozen, {name: through_bf16(parameter.detach()) for name, parameter in frozen.items()})


def frozen_after(step: int, names: str) -> GradientPatch:
    """From the next step on, the parameters whose names have `names` in them are not trained."""

    def breaks(parameters: Parameters, at: At) -> None:
        for name, parameter in parameters.items():
            if names in name and at.step == step:
                parameter.requires_grad_(False)
                parameter.grad = None

    return breaks


def average_swapped_in(at_step: int) -> GradientPatch:
    """After that step the weights are their moving average, and training goes on from it."""
    averages: dict[str, Tensor] = {}

    def breaks(parameters: Parameters, at: At) -> None:
        add_to_averages(averages, parameters)
        if at.step == at_step:
            copy_into(parameters, averages)

    return breaks


def reloaded(at_step: int, read_after: int) -> GradientPatch:
    """After step `at_step` the weights are those of after step `read_after` again, as from an older checkpoint."""
    kept: dict[str, Tensor] = {}

    def breaks(parameters: Parameters, at: At) -> None:
        if at.step == read_after:
            kept.update({name: parameter.detach().clone() for name, parameter in parameters.items()})
        if at.step == at_step:
            copy_into(parameters, kept)

    return breaks


def add_to_averages(averages: dict[str, Tensor], parameters: Parameters) -> None:
    """Move the averages a tenth of the way to the weights; they begin with these."""
    for name, parameter in parameters.items():
        averages.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)


def copy_into(parameters: Parameters, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
