"""Collect what a job does from one optimizer step to the next: passes, shares of their losses, gradients, the norm.

A step may have several parts: several optimizers step, or one is called for its partitions one after the other
(DeepSpeed). Parts without a pass with autograd on between them are one step.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from capture.file_format.optimizer_step import OptimizerStep, merge_equal_settings
from capture.record import optimizer_hooks
from capture.record.engine_gradients import (
    EngineGradients,
    count_skipped_steps,
    find_engine_optimizer,
    has_engine_stepped,
)
from capture.record.host_copy import copy_to_host, is_capturing_graph
from capture.record.parameter_sampler import ParameterSampler, RawSamples

_MAX_GROUPS = 64  # groups of an optimizer whose settings are kept
_SHARE, _SETTING, _NORM = "share ", "setting ", "norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """One part of a step, as it is handed to the writer. Its tensors are on the host once `copied` has happened.

    step       all but the gradients and the numbers in `flat` and `others`
    gradients  what was sampled; their values are the first ones of `flat`
    flat       values of gradients, then one number for each of `names`
    others     numbers that lay on another device, by name
    """

    step: OptimizerStep
    gradients: RawSamples | None
    flat: Tensor
    names: Sequence[str]
    others: Mapping[str, Tensor]
    copied: list[torch.cuda.Event]

    def record(self) -> OptimizerStep:
        """Return the step as it is written, once all is on the host."""
        count = len(self.flat) - len(self.names)
        values = dict(zip(self.names, self.flat[count:].double().tolist(), strict=True))
        values |= {name: float(value.item()) for name, value in self.others.items()}
        settings = [dict(group) for group in self.step.settings]
        for name, value in values.items():
            if name.startswith(_SETTING):
                group, key = name.removeprefix(_SETTING).split(" ", 1)
                settings[int(group)][key] = value
        return replace(
            self.step,
            shares=tuple(values.get(f"{_SHARE}{number}") for number in self.step.passes),
            gradients=None if self.gradients is None else replace(self.gradients, values=self.flat).parameter_samples(),
            grad_norm=values.get(_NORM),
            settings=merge_equal_settings(settings),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clipping:
    """The gradients before the latest clipping, and what the clipping was given."""

    after_pass: int
    gradients: RawSamples | None
    without_gradient: Sequence[str]
    num_clipped: int | None
    max_norm: float | None
    norm: Tensor | None
    is_part_of_norm: bool

    @property
    def has_a_limit(self) -> bool:
        """Tell whether it may have changed the gradients: jobs that want the norm alone clip to infinity."""
        return self.max_norm != math.inf


class StepWindow:
    """Follows the passes and steps of one model, in the job's thread. `number` is that of the next step.

    Its methods may raise.
    """

    def __init__(self, sampler: ParameterSampler) -> None:
        self.number = 0
        self.on_backward: Callable[[int], None] = lambda number: None  # is told as a loss is differentiated
        self._sampler = sampler
        # for each optimizer that was seen: whether it is the model's, and DeepSpeed's optimizer around it
        self._related: weakref.WeakKeyDictionary[Optimizer, tuple[bool, weakref.ref[Any] | None]]
        self._related = weakref.WeakKeyDictionary()
        self._num_skipped = 0
        self._begin()

    def _begin(self) -> None:
        self._passes: list[int] = []
        self._shares: dict[int, Tensor] = {}
        self._watched: set[int] = set()
        self._is_kept = False  # whether one of the passes is recorded
        self._clipping: _Clipping | None = None
        self._was_clipped_before = False  # before the last pass
        self._has_stepped = False
        self._sampled: set[str] = set()  # names, in the parts of the step so far

    def begin_pass(self, number: int) -> None:
        """Note that a forward with autograd on begins."""
        if self._has_stepped or self._was_emptied():
            self._begin()
        self._passes.append(number)

    def keep_pass(self) -> bool:
        """Note that the pass that has begun is recorded. Returns whether it is the first one since the last step."""
        is_first, self._is_kept = not self._is_kept, True
        return is_first

    def watch_loss(self, number: int, loss: Tensor) -> None:
        """Watch the backward for the share of pass `number`: the derivative of what is differentiated by its loss.

        The first loss of a pass counts: the model's own, else the one that the loop noted.
        """
        if number in self._watched or not loss.requires_grad or is_capturing_graph({"loss": loss}):
            return
        self._watched.add(number)

        def differentiated(gradient: Tensor | None) -> None:
            if gradient is None:  # DDP passes all outputs through one function, also a loss that nobody differentiates
                return
            self.on_backward(number)
            share, before = gradient.detach().reshape(1), self._shares.get(number)
            self._shares[number] = share.clone() if before is None else before + share

        loss.register_hook(differentiated)

    def clips(self, parameters: Sequence[Tensor], max_norm: Any, norm: Any) -> None:
        """Note that the gradients of these parameters will be clipped by their norm."""
        before = self._clipping
        if not self._is_kept or self._has_stepped or (before and before.has_a_limit and self._is_up_to_date):
            return
        ids = set(map(id, parameters))
        if not self._sampler.is_of_model(ids):
            return
        limit = float(max_norm) if isinstance(max_norm, int | float) else None
        num_clipped = None if len(ids) >= self._sampler.num_trained else len(ids)
        if before is not None and self._is_up_to_date:
            self._clipping = replace(before, max_norm=limit, num_clipped=num_clipped)
            return
        self._was_clipped_before |= before is not None and before.has_a_limit
        gradients, without = self._sampler.gradients()
        own, is_part = copy_local_norm(norm)
        self._clipping = _Clipping(
            after_pass=self._passes[-1],
            gradients=gradients,
            without_gradient=without,
            num_clipped=num_clipped,
            max_norm=limit,
            norm=own,
            is_part_of_norm=is_part,
        )

    def clipped(self, norm: Any) -> None:
        """Note that the gradients were clipped, and their norm, if it was not known before."""
        if self._clipping is not None and self._clipping.norm is None:
            own, is_part = copy_local_norm(norm)
            self._clipping = replace(self._clipping, norm=own, is_part_of_norm=is_part)

    def steps(self, optimizer: Optimizer) -> StepPart | None:
        """Note that an optimizer will step. Returns None if it is not the model's, or no pass of its window is kept."""
        is_related, engine = self._relation(optimizer)
        if not is_related:
            return None
        if not self._has_stepped:
            self._has_stepped = True
            self.number += 1
        if not self._is_kept:
            return None
        wrapper = None if engine is None else engine()
        return self._part(optimizer) if wrapper is None else self._part_of_engine(optimizer, wrapper)

    @torch.no_grad()
    def _part_of_engine(self, optimizer: Optimizer, wrapper: Any) -> StepPart:
        """Describe the partitions that DeepSpeed steps on now."""
        gradients_held = EngineGradients.now(wrapper, optimizer)
        gradients = self._sampler.gradients_in(gradients_held.find, but=self._sampled)
        if gradients is not None:
            self._sampled |= {name for name, _ in gradients.places}
            gradients = replace(gradients, values=gradients_held.before_clipping(gradients.values))
        settings, tensors = read_optimizer_settings(optimizer)
        counts = gradients_held.num_parameters()
        if len(counts) != len(settings):  # it is not known which parameters the partitions are of
            counts = [0] * len(settings)
        for group, count in zip(settings, counts, strict=True):
            group["num_parameters"] = count
        tensors |= {f"{_SHARE}{number}": share for number, share in self._shares.items()}
        if (norm := gradients_held.grad_norm) is not None:
            tensors[_NORM] = torch.tensor([norm], device="cpu") if isinstance(norm, float) else norm.reshape(1)
        step = OptimizerStep(
            number=self.number - 1,
            passes=tuple(self._passes),
            shares=(None,) * len(self._passes),
            max_norm=gradients_held.max_norm,
            is_unclipped=gradients_held.is_undone,
            optimizer=type(optimizer).__name__,
            settings=settings,
            has_state=has_engine_stepped(self._sampler.model),
        )
        return _part_of(step, gradients, tensors)

    @torch.no_grad()
    def _part(self, optimizer: Optimizer) -> StepPart:
        clipping = self._clipping if self._is_up_to_date else None
        if clipping is None:
            ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            gradients, without = self._sampler.gradients(ids, but=self._sampled)
        elif self._sampled:
            gradients, without = None, []
        else:
            gradients, without = clipping.gradients, list(clipping.without_gradient)
        self._sampled |= {name for name, _ in gradients.places} if gradients is not None else {""}
        settings, tensors = read_optimizer_settings(optimizer)
        if self._sampler.has_flat:
            for group, own in zip(settings, _groups_of(optimizer), strict=False):
                group["num_parameters"] = self._sampler.num_among(set(map(id, own["params"])))
        tensors |= {f"{_SHARE}{number}": share for number, share in self._shares.items()}
        if clipping is not None and clipping.norm is not None:
            tensors[_NORM] = clipping.norm
        step = OptimizerStep(
            number=self.number - 1,
            passes=tuple(self._passes),
            shares=(None,) * len(self._passes),
            without_gradient=tuple(without),
            is_part_of_norm=clipping is not None and clipping.is_part_of_norm,
            max_norm=None if clipping is None else clipping.max_norm,
            num_clipped=None if clipping is None else clipping.num_clipped,
            is_unclipped=(optimizer_hooks.SEES_ALL_CLIPPING or clipping is not None)
            and not (self._was_clipped_before or self._was_clipped_since_sampled),
            optimizer=type(optimizer).__name__,
            settings=settings,
            has_state=bool(optimizer.state),
        )
        return _part_of(step, gradients, tensors)

    @property
    def has_stepped(self) -> bool:
        """Tell whether an optimizer of the model has begun to step since the latest pass with autograd on."""
        return self._has_stepped

    @property
    def _was_clipped_since_sampled(self) -> bool:
        """Tell whether a clipping with a limit came before the last pass, so that its samples are not of the whole."""
        return self._clipping is not None and self._clipping.has_a_limit and not self._is_up_to_date

    @property
    def _is_up_to_date(self) -> bool:
        """Tell whether no pass has begun since the latest clipping."""
        return self._clipping is not None and self._clipping.after_pass == self._passes[-1]

    def _was_emptied(self) -> bool:
        """Tell whether a backward's gradients are gone without a step: fp16 leaves out steps that overflow."""
        before, self._num_skipped = self._num_skipped, count_skipped_steps(self._sampler.model)
        if self._num_skipped > before:
            return True
        had_some = self._clipping is not None and self._clipping.gradients is not None
        return (had_some or bool(self._shares)) and self._sampler.has_no_gradients(in_shards=had_some)

    def _relation(self, optimizer: Optimizer) -> tuple[bool, weakref.ref[Any] | None]:
        known = self._related.get(optimizer)
        if known is None:
            ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            known = self._sampler.is_of_model(ids), None
            if not known[0] and (wrapper := find_engine_optimizer(self._sampler.model, optimizer)) is not None:
                known = True, weakref.ref(wrapper)
            self._related[optimizer] = known
        return known


def read_optimizer_settings(optimizer: Optimizer) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return each group's plain settings, and those that are tensors, without waiting for a device.

    Groups without parameters are left out.
    """
    settings: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    groups = _groups_of(optimizer)
    for number, group in enumerate(groups[:_MAX_GROUPS]):
        plain: dict[str, Any] = {"num_parameters": len(group["params"])}
        for key, value in group.items():
            if key == "params":
                continue
            if type(value) in (bool, int, float):
                plain[key] = value
            elif type(value) in (tuple, list) and all(type(one) in (bool, int, float) for one in value):
                plain[key] = list(value)
            elif isinstance(value, Tensor) and value.numel() == 1:
                tensors[f"{_SETTING}{number} {key}"] = value.detach().reshape(1)
        settings.append(plain)
    for group in groups[_MAX_GROUPS:]:  # so that the sum is that of all groups
        settings[-1]["num_parameters"] += len(group["params"])
    return settings, tensors


def _groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if group["params"]]


def _part_of(step: OptimizerStep, gradients: RawSamples | None, tensors: Mapping[str, Tensor]) -> StepPart:
    first = next(iter(tensors.values()), torch.empty(0, device="cpu"))
    values = torch.empty(0, device=first.device) if gradients is None else gradients.values
    near = {name: tensor for name, tensor in tensors.items() if tensor.device == values.device}
    copies, copied = copy_to_host(
        {"": torch.cat([values, *near.values()])} | {name: one for name, one in tensors.items() if name not in near}
    )
    return StepPart(
        step=step,
        gradients=None if gradients is None else replace(gradients, values=torch.empty(0, device="cpu")),
        flat=copies.pop(""),
        names=tuple(near),
        others=copies,
        copied=copied,
    )


def copy_local_norm(norm: Any) -> tuple[Tensor | None, bool]:
    """Copy what this rank has of a norm, and tell whether it is a part: then the squares of all ranks add up.

    A norm over shards may be unreduced (DTensor); the whole of it would take a collective.
    """
    if not isinstance(norm, Tensor) or norm.numel() != 1:
        return None, False
    local: Any = norm.detach()
    placements: Sequence[Any] = getattr(norm, "placements", ())
    parts = [number for number, placement in enumerate(placements) if placement.is_partial()]
    if hasattr(local, "_local_tensor"):
        local = local._local_tensor
    own: Tensor = local.reshape(1).clone()
    if parts:
        num_parts = math.prod(norm.device_mesh.size(number) for number in parts)  # type: ignore[attr-defined]
        own *= math.sqrt(num_parts / torch.distributed.get_world_size())
    return own, bool(parts)
