"""Take samples of an optimizer's state before it steps, and read how often it had stepped.

A lost, stale or newly initialised state shows in neither weights nor gradients until its step has been taken. Samples
are taken of a few of the parameters of whose gradients the step keeps samples, in turn, at the same elements: so a
model of any size costs a job the same. Nothing here waits for a device: a count that lies on one is copied with the
samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from capture.file_format.optimizer_state import StateSample
from capture.record.engine_gradients import EngineGradients
from capture.record.parameter_sampler import CachedLocation, ParameterSampler, ParameterSlot
from capture.record.sharding import SampleLocation

NUM_PER_STEP = 8
# The name that torch's optimizers, and those of other packages, keep the number of steps by.
STEP = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class RawState:
    """Samples of an optimizer's state as they were taken.

    values        the samples one after the other
    device_steps  counts of steps that lay on their device
    locations     of each sample: the parameter, the name of the state, and where in the parameter it lies
    steps         counts of steps that were on the host
    """

    values: Tensor
    device_steps: Tensor
    locations: Sequence[tuple[str, str, SampleLocation]]
    steps: Sequence[int]

    def to_samples(self) -> tuple[StateSample, ...]:
        """Return the samples as they are written, once `values` are on the host."""
        numbers = self.values.double().tolist()
        by_place: dict[tuple[str, int], tuple[SampleLocation, dict[str, tuple[float, ...]]]] = {}
        begin = 0
        for name, key, location in self.locations:
            _, values = by_place.setdefault((name, location.start), (location, {}))
            values[key] = tuple(numbers[begin : begin + location.count])
            begin += location.count
        return tuple(
            StateSample(name=name, shape=tuple(location.shape), start=start, values=values)
            for (name, start), (location, values) in by_place.items()
        )

    def list_steps(self) -> tuple[int, ...]:
        """List the different counts of steps, once `device_steps` are on the host."""
        on_device = [int(count) for count in self.device_steps.tolist() if math.isfinite(count)]
        return tuple(sorted({*self.steps, *on_device}))


@dataclass(slots=True)
class _StateViews:
    """Views of samples on one device, and the counts of steps."""

    tensors: list[Tensor] = field(default_factory=list)
    locations: list[tuple[str, str, SampleLocation]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    device_steps: list[Tensor] = field(default_factory=list)

    def add(self, name: str, key: str, location: SampleLocation, tensor: Tensor) -> None:
        view = location.view_in(tensor)
        if not self.tensors or view.device == self.tensors[0].device:
            self.tensors.append(view)
            self.locations.append((name, key, location))

    def add_step(self, count: Any) -> None:
        if isinstance(count, Tensor):
            if count.numel() != 1:
                return
            if count.device.type != "cpu":
                self.device_steps.append(count.detach().reshape(1))
                return
            count = float(count)
        if isinstance(count, int | float) and not isinstance(count, bool):
            self.steps.append(int(count))

    def copy(self) -> RawState | None:
        if not self.tensors and not self.steps and not self.device_steps:
            return None
        # Samples and counts are of several dtypes, which would be joined by a kernel each.
        device = next(tensor.device for tensor in (*self.tensors, *self.device_steps, torch.empty(0, device="cpu")))
        return RawState(
            values=_join(self.tensors),
            device_steps=_join([step for step in self.device_steps if step.device == device]),
            locations=self.locations,
            steps=self.steps,
        )


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([*tensors]) if tensors else torch.empty(0, device="cpu")


class StateSampler:
    """Takes the samples of one recording, in the job's thread. Its methods may raise."""

    def __init__(self, sampler: ParameterSampler) -> None:
        self._sampler = sampler
        self._locations: dict[str, CachedLocation] = {}
        self._next_number = 0

    @torch.inference_mode()
    def sample(self, optimizer: Optimizer, engine: EngineGradients | None = None) -> RawState | None:
        """Take samples of what `optimizer` holds of the next parameters; None where it holds nothing yet.

        engine  has the partitions that DeepSpeed steps on instead of the parameters
        """
        views = _StateViews()
        # The classes of apex and DeepSpeed keep one count for a whole group.
        for group in optimizer.param_groups:
            views.add_step(group.get(STEP))
        if not optimizer.state:
            return views.copy()
        for partition in () if engine is None else engine.partitions:
            views.add_step(optimizer.state.get(partition, {}).get(STEP))
        has_state, lacks_state = False, False
        slots = self._sampler.step_slots
        first, num_sampled = self._next_number, 0
        for number in range(len(slots)):
            slot = slots[(first + number) % len(slots)]
            parameter: Any = slot.get_parameter()
            if num_sampled == NUM_PER_STEP or parameter is None:
                continue
            self._next_number = first + number + 1
            if engine is not None:
                num_sampled += self._add_partition(views, optimizer, engine, slot, parameter)
            elif (state := optimizer.state.get(parameter)) is not None:
                has_state |= bool(state)
                lacks_state |= not state
                num_sampled += self._add_parameter(views, slot, parameter, state)
        # A parameter without a state begins at 0, which tells something only beside others that have one.
        if has_state and lacks_state and views.steps:
            views.steps.append(0)
        return views.copy()

    def _add_parameter(self, views: _StateViews, slot: ParameterSlot, parameter: Any, state: Mapping[str, Any]) -> bool:
        """Add samples of a parameter's state. Returns whether this rank has any."""
        num_before = len(views.tensors)
        views.add_step(state.get(STEP))
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                # All state of a parameter's shape is laid out alike, and found once.
                location = slot.locate(self._locations.setdefault(slot.name, CachedLocation()), value)
                if key != STEP and isinstance(location, SampleLocation) and location.count:
                    views.add(slot.name, key, location, value)
        return len(views.tensors) > num_before

    def _add_partition(
        self, views: _StateViews, optimizer: Optimizer, engine: EngineGradients, slot: ParameterSlot, parameter: Any
    ) -> bool:
        """Add samples of the state of DeepSpeed's partition: a parameter lies there as in the partition's gradient.

        Returns whether this rank has any.
        """
        if (gradient_and_location := engine.find(slot, parameter)) is None:
            return False
        gradient, location = gradient_and_location
        num_before = len(views.tensors)
        partition = next((partition for partition in engine.partitions if partition.grad is gradient), None)
        state = {} if partition is None else optimizer.state.get(partition, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == gradient.shape and value.is_contiguous() and key != STEP:
                views.add(slot.name, key, location, value)
        return len(views.tensors) > num_before
