"""Find the gradients that DeepSpeed's engine gives to torch's optimizer.

They are flat partitions in fp32, unscaled and clipped. DeepSpeed's optimizers wrap the one that steps, and call it once
for each group (ZeRO 1, 2) or sub-group (ZeRO 3) of their partitions. They keep the norm that they clipped by, so the
clipping can be undone. deepspeed is not imported: what is not where version 0.19 has it is not sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from capture.record.parameter_sampler import ParameterSlot
from capture.record.sharding import SampleLocation

_CLIP_EPS = 1e-6  # DeepSpeed's
_GROUPS_OF_PARTITIONS = {  # attributes of its optimizers: the flat partitions, and the model's parameters in them
    "single_partition_of_fp32_groups": "bit16_groups",
    "fp32_groups_flat_partition": "bf16_groups",
    "fp32_partitioned_groups_flat": "fp16_groups",
    "fp32_groups_flat": "fp16_groups",
}


def find_engine_optimizer(model: nn.Module | None, optimizer: Optimizer) -> Any | None:
    """Find DeepSpeed's optimizer around `optimizer`, if that trains `model`, which is an engine or in one."""
    if model is None:
        return None
    first: Any = next(model.parameters(), None)
    known = vars(model).get("optimizer"), getattr(first, "_z3_optimizer", None), getattr(first, "_zero_optimizer", None)
    for wrapper in known:
        if any(getattr(wrapper, name, None) is optimizer for name in ("optimizer", "backup_optimizer")):
            return wrapper
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGradients:
    """The gradients of the partitions that the optimizer steps on now."""

    wrapper: Any
    held: Sequence[Tensor]  # the optimizer's parameters that have gradients

    @classmethod
    def now(cls, wrapper: Any, optimizer: Optimizer) -> "EngineGradients":
        held = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        return cls(wrapper=wrapper, held=held)

    def find(self, slot: ParameterSlot, parameter: Any) -> tuple[Tensor, SampleLocation] | None:
        """Find the gradient that holds the slot's samples, and where in it they are; None if it is not among these."""
        if hasattr(parameter, "ds_tensor"):
            return self._in_sub_group(slot, parameter)
        if (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
            address, own = mapping.lp_fragment_address, mapping.hp_fragment_address
            return self._at(slot, parameter, mapping.hp_fragment, address.start, address.numel, own.start)
        return self._in_copy(slot, parameter)

    def num_parameters(self) -> list[int]:
        """Count the model's parameters in each group that steps now."""
        counted: list[int] = []
        for name, groups in _GROUPS_OF_PARTITIONS.items():
            for flat, own in zip(getattr(self.wrapper, name, ()), getattr(self.wrapper, groups, ()), strict=False):
                if any(one is flat for one in self.held):
                    counted.append(len(own))
            if counted:
                break
        return counted or [len(own) for own in getattr(self.wrapper, "fp32_groups", ())]  # a copy of each parameter

    @property
    def grad_norm(self) -> Tensor | float | None:
        """The global norm before clipping, without fp16's loss scale."""
        norm = getattr(self.wrapper, "_global_grad_norm", None)
        scale = getattr(getattr(self.wrapper, "loss_scale_config", None), "cur_scale", None)
        if norm is not None and scale is not None and hasattr(self.wrapper, "fp32_groups"):
            norm = norm / scale  # the unfused optimizer leaves the scale in
        if isinstance(norm, Tensor):
            return norm.detach() if norm.numel() == 1 else None
        return float(norm) if isinstance(norm, int | float) else None

    @property
    def max_norm(self) -> float | None:
        value = getattr(self.wrapper, "clip_grad", None)
        return float(value) if isinstance(value, int | float) and value > 0 else None

    def before_clipping(self, values: Tensor) -> Tensor:
        """Undo the clipping of `values`, unless that would need a wait for a device."""
        norm, max_norm = self.grad_norm, self.max_norm
        if norm is None or max_norm is None:
            return values
        if isinstance(norm, float):
            return values * max(1.0, (norm + _CLIP_EPS) / max_norm)
        if norm.device != values.device:
            if norm.is_cuda:  # moving it would wait for that device
                return values
            norm = norm.to(values.device)
        return values * torch.clamp((norm.reshape(()) + _CLIP_EPS) / max_norm, min=1.0)

    @property
    def is_undone(self) -> bool:
        """Tell whether `before_clipping` can undo the clipping."""
        norm = self.grad_norm
        if self.max_norm is None or isinstance(norm, float):
            return True
        return norm is not None and all(not norm.is_cuda or one.device == norm.device for one in self.held)

    def _in_sub_group(self, slot: ParameterSlot, parameter: Any) -> tuple[Tensor, SampleLocation] | None:
        """Find the gradient under ZeRO 3: one tensor has the partitions of several parameters, one by one."""
        position = getattr(self.wrapper, "grad_position", {}).get(parameter.ds_id)
        place = slot.place(slot.of_weight, parameter)
        if position is None or isinstance(place, str) or not place.count:
            return None
        number, begin, _ = position
        flat = self.wrapper.fp32_partitioned_groups_flat[number]
        for held in self.held:
            if held is flat and held.grad is not None:
                name = str(held.grad.dtype).removeprefix("torch.")
                return held.grad, replace(place, offset=begin + place.offset, dtype=name, held_as=None)
        return None

    def _in_copy(self, slot: ParameterSlot, parameter: Any) -> tuple[Tensor, SampleLocation] | None:
        """Find the gradient at stage 0 in half precision: of a flat copy of each group, or of one of each parameter."""
        for number, group in enumerate(getattr(self.wrapper, "fp16_groups", ())):
            begin = 0
            for index, own in enumerate(group):
                if own is parameter:
                    copies = getattr(self.wrapper, "fp32_groups", None)
                    if copies is not None:
                        return self._at(slot, parameter, copies[number][index], 0, parameter.numel(), 0)
                    flat = self.wrapper.fp32_groups_flat[number]
                    return self._at(slot, parameter, flat, 0, parameter.numel(), begin)
                begin += own.numel()
        return None

    def _at(
        self, slot: ParameterSlot, parameter: Tensor, own: Tensor, start: int, count: int, begin: int
    ) -> tuple[Tensor, SampleLocation] | None:
        """Find the samples in the gradient of the partition that shares its storage with `own`.

        There `count` elements of the parameter, from `start` on, lie at `begin`.
        """
        storage = own.untyped_storage().data_ptr()
        held = next((one for one in self.held if one.untyped_storage().data_ptr() == storage), None)
        if held is None or held.grad is None or not held.grad.is_contiguous():
            return None
        shape = tuple(parameter.shape)
        first, length = slot.run(shape)
        low, high = max(first, start), min(first + length, start + count)
        if high <= low:
            return None
        place = SampleLocation(
            shape=shape,
            start=low,
            count=high - low,
            offset=begin + low - start,
            stride=1,
            is_of_shard=count < parameter.numel() or hasattr(parameter, "_hp_mapping"),
            dtype=str(held.grad.dtype).removeprefix("torch."),
            held_as=None,
        )
        return held.grad, place


def count_skipped_steps(model: nn.Module | None) -> int:
    """Count the steps that DeepSpeed's engine left out because gradients overflowed."""
    skipped = None if model is None else vars(model).get("skipped_steps")
    return skipped if isinstance(skipped, int) else 0


def has_engine_stepped(model: nn.Module | None) -> bool | None:
    """Tell whether the engine has stepped before: its optimizers have a state from the start. None: not known."""
    steps = None if model is None else vars(model).get("global_steps")
    return steps > 0 if isinstance(steps, int) else None
