"""Find the gradients that DeepSpeed's engine gives to torch's optimizer.

They are flat partitions in fp32, unscaled and clipped. DeepSpeed's optimizers wrap the one that steps, and call it once
for each group (ZeRO 1, 2) or sub-group (ZeRO 3) of their partitions. They keep the norm that they clipped by, so the
clipping can be undone. deepspeed is not imported: attributes that are not where version 0.19 has them are not sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from capture.record.parameter_sampler import ParameterSlot
from capture.record.sharding import HeldPart, SampleLocation, UnknownLayoutError, locate_part_in_partition

# What DeepSpeed adds to the norm before it divides by the limit.
_CLIP_EPSILON = 1e-6
# Attributes of DeepSpeed's optimizers: the flat partitions, and the groups of the model's parameters that lie in them.
_GROUPS_BY_PARTITIONS = {
    "single_partition_of_fp32_groups": "bit16_groups",
    "fp32_groups_flat_partition": "bf16_groups",
    "fp32_partitioned_groups_flat": "fp16_groups",
    "fp32_groups_flat": "fp16_groups",
}


def find_engine_optimizer(model: nn.Module | None, optimizer: Optimizer) -> Any | None:
    """Find DeepSpeed's optimizer around `optimizer`, if that trains `model`, which is an engine or in one."""
    for wrapper in _list_wrappers(model):
        if any(getattr(wrapper, name, None) is optimizer for name in ("optimizer", "backup_optimizer")):
            return wrapper
    return None


def _list_wrappers(model: nn.Module | None) -> list[Any]:
    """List what may be DeepSpeed's optimizer around the one that trains `model`."""
    if model is None:
        return []
    first: Any = next(model.parameters(), None)
    # The engine has its optimizer as an attribute. Of a model inside an engine, the parameters have it.
    candidates = (
        vars(model).get("optimizer"),
        getattr(first, "_z3_optimizer", None),
        getattr(first, "_zero_optimizer", None),
    )
    return [candidate for candidate in candidates if candidate is not None]


def read_engine_loss_scale(model: nn.Module | None) -> float:
    """Return what DeepSpeed's engine multiplies the loss of a backward by, for fp16; 1 where it does not.

    ZeRO's optimizers have it as `loss_scale`, which the job may set; those of stage 0 in a config.
    """
    for wrapper in _list_wrappers(model):
        config = getattr(wrapper, "loss_scale_config", None)
        scale = getattr(wrapper, "loss_scale", None) if config is None else getattr(config, "cur_scale", None)
        if isinstance(scale, int | float) and scale > 0:
            return float(scale)
    return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGradients:
    """The gradients of the partitions that the optimizer steps on now.

    wrapper     DeepSpeed's optimizer around the one that steps
    partitions  those parameters of the one that steps that have gradients
    """

    wrapper: Any
    partitions: Sequence[Tensor]

    @classmethod
    def from_optimizer(cls, wrapper: Any, optimizer: Optimizer) -> "EngineGradients":
        partitions = [
            partition for group in optimizer.param_groups for partition in group["params"] if partition.grad is not None
        ]
        return cls(wrapper=wrapper, partitions=partitions)

    def find(self, slot: ParameterSlot, parameter: Any) -> tuple[Tensor, SampleLocation] | None:
        """Find the gradient that holds the slot's samples, and where in it they are; None if it is not among these."""
        if (gradient_and_part := self._find(parameter)) is None:
            return None
        gradient, part = gradient_and_part
        location = part.locate(slot.find_run(part.shape), dtype=gradient.dtype)
        return (gradient, location) if location.count else None

    def find_part(self, slot: ParameterSlot, parameter: Any) -> tuple[Tensor, HeldPart] | None:
        """Find the gradient that holds a part of the parameter's, and which part; None if it is not among these."""
        # Under MiCS several ranks have the same part, and their norms would add up to more than the whole.
        return None if type(self.wrapper).__name__.startswith("MiCS") else self._find(parameter)

    def list_parameters(self) -> list[Sequence[Any]]:
        """List the model's parameters in each group that steps now."""
        groups_stepping: list[Sequence[Any]] = []
        for partitions_name, groups_name in _GROUPS_BY_PARTITIONS.items():
            all_partitions = getattr(self.wrapper, partitions_name, ())
            groups = getattr(self.wrapper, groups_name, ())
            for flat, group in zip(all_partitions, groups, strict=False):
                if any(partition is flat for partition in self.partitions):
                    groups_stepping.append(group)
            if groups_stepping:
                return groups_stepping
        # The optimizer has no flat partitions, but a copy of each parameter.
        if not (copies := getattr(self.wrapper, "fp32_groups", ())):
            return []
        groups = getattr(self.wrapper, "fp16_groups", ())
        return list(groups if [*map(len, groups)] == [*map(len, copies)] else copies)

    @property
    def grad_norm(self) -> Tensor | float | None:
        """The global norm before clipping, without fp16's loss scale."""
        norm = getattr(self.wrapper, "_global_grad_norm", None)
        scale = getattr(getattr(self.wrapper, "loss_scale_config", None), "cur_scale", None)
        # DeepSpeed's unfused optimizer leaves the loss scale in the norm.
        if norm is not None and scale is not None and hasattr(self.wrapper, "fp32_groups"):
            norm = norm / scale
        if isinstance(norm, Tensor) and norm.numel() != 1:
            return None
        if isinstance(norm, Tensor):
            # To move it to the gradients' device would wait for that; the host has it already.
            return float(norm) if norm.device.type == "cpu" else norm.detach()
        return float(norm) if isinstance(norm, int | float) else None

    @property
    def device_type(self) -> str | None:
        return self.partitions[0].device.type if self.partitions else None

    @property
    def max_norm(self) -> float | None:
        value = getattr(self.wrapper, "clip_grad", None)
        return float(value) if isinstance(value, int | float) and value > 0 else None

    def undo_clipping(self, values: Tensor) -> Tensor:
        """Return `values` as they were before the clipping; unchanged if that would need a wait for a device."""
        norm, max_norm = self.grad_norm, self.max_norm
        if norm is None or max_norm is None:
            return values
        if isinstance(norm, float):
            return values * max(1.0, (norm + _CLIP_EPSILON) / max_norm)
        if norm.device != values.device:
            # Moving the norm would wait for its device.
            return values
        return values * torch.clamp((norm.reshape(()) + _CLIP_EPSILON) / max_norm, min=1.0)

    @property
    def can_undo_clipping(self) -> bool:
        """Tell whether `undo_clipping` returns the gradients before the clipping."""
        norm = self.grad_norm
        if self.max_norm is None or isinstance(norm, float):
            return True
        return norm is not None and all(partition.device == norm.device for partition in self.partitions)

    def _find(self, parameter: Any) -> tuple[Tensor, HeldPart] | None:
        """Find the gradient that holds elements of the parameter's, and which; None if it is not among these."""
        if hasattr(parameter, "ds_tensor"):
            return self._find_in_sub_group(parameter)
        # ZeRO 1, 2 and BF16: the parameter tells which part of it (low precision) lies where in the partition (high).
        if (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
            part, fragment = mapping.lp_fragment_address, mapping.hp_fragment_address
            tensor, first, count, offset = mapping.hp_fragment, part.start, part.numel, fragment.start
        elif (copy := self._find_copy(parameter)) is not None:
            first, count = 0, parameter.numel()
            tensor, offset = copy
        else:
            return None
        if (gradient := self._find_gradient(tensor)) is None:
            return None
        return gradient, HeldPart(
            shape=tuple(parameter.shape),
            first=first,
            count=count,
            offset=offset,
            is_whole_tensor=False,
            is_part=hasattr(parameter, "_hp_mapping") or count < parameter.numel(),
        )

    def _find_in_sub_group(self, parameter: Any) -> tuple[Tensor, HeldPart] | None:
        """Find the gradient under ZeRO 3: one tensor has the partitions of several parameters, one by one."""
        position = getattr(self.wrapper, "grad_position", {}).get(parameter.ds_id)
        if position is None:
            return None
        number, offset, _ = position
        flat = self.wrapper.fp32_partitioned_groups_flat[number]
        if flat.grad is None or not any(partition is flat for partition in self.partitions):
            return None
        try:
            return flat.grad, replace(locate_part_in_partition(parameter), offset=offset)
        except UnknownLayoutError:
            return None

    def _find_copy(self, parameter: Any) -> tuple[Tensor, int] | None:
        """Find a parameter's copy at stage 0 in half precision, and where it begins in the tensor that is returned.

        There is a flat copy of each group, or a copy of each parameter.
        """
        for number, group in enumerate(getattr(self.wrapper, "fp16_groups", ())):
            offset = 0
            for index, member in enumerate(group):
                if member is parameter:
                    copies = getattr(self.wrapper, "fp32_groups", None)
                    if copies is not None:
                        return copies[number][index], 0
                    return self.wrapper.fp32_groups_flat[number], offset
                offset += member.numel()
        return None

    def _find_gradient(self, fragment: Tensor) -> Tensor | None:
        """Find the gradient of the partition that shares its storage with `fragment`."""
        storage = fragment.untyped_storage().data_ptr()
        partition = next(
            (partition for partition in self.partitions if partition.untyped_storage().data_ptr() == storage), None
        )
        gradient = None if partition is None else partition.grad
        return gradient if gradient is not None and gradient.is_contiguous() else None


def count_skipped_steps(model: nn.Module | None) -> int:
    """Count the steps that DeepSpeed's engine left out because gradients overflowed."""
    skipped = None if model is None else vars(model).get("skipped_steps")
    return skipped if isinstance(skipped, int) else 0


def has_engine_stepped(model: nn.Module | None) -> bool | None:
    """Tell whether the engine has stepped before: its optimizers have a state from the start. None: not known."""
    steps = None if model is None else vars(model).get("global_steps")
    return steps > 0 if isinstance(steps, int) else None
