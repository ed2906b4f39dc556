"""Take samples of a model's weights at each recorded pass, and of their gradients at each optimizer step.

They tell a replay whether its own weights and gradients are the same. `capture/file_format/optimizer_step.py` defines
which elements of a parameter are its sample; each rank keeps those that it holds.

Which parameters are sampled:

* in the first pass of a recording, which has a checkpoint's weights: up to NUM_IN_FIRST_PASS
* in the first pass after each optimizer step: the next NUM_PER_STEP that are trained, of whose gradients the next step
  keeps samples; and half as many that are frozen, up to NUM_PER_PASS
* in each other pass: the next NUM_PER_PASS

So a model of any size costs a job the same.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from capture.file_format.optimizer_step import (
    ParameterSamples,
    Sample,
    choose_sampled_run,
    format_numbers,
    strip_wrappers,
)
from capture.file_format.safe_unpickler import type_name
from capture.record.sharding import (
    SampleLocation,
    UnknownLayoutError,
    count_local_elements,
    locate_run,
    locate_run_in_flat,
)

NUM_IN_FIRST_PASS = 1024
NUM_PER_PASS = 8
NUM_PER_STEP = 16
# A model with no more parameters than this has all of them sampled at every step.
NUM_IN_SMALL_MODEL = 64
# How many parameters are looked at to tell whether gradients were emptied.
_NUM_CHECKED_FOR_GRADIENTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSamples:
    """Samples of parameters as they were taken, and what they were taken of.

    values     the samples of all parameters, one after the other
    locations  name of each parameter, and where its sample lies in it
    left_out   numbers of parameters without samples, by the reason
    """

    values: Tensor
    locations: Sequence[tuple[str, SampleLocation]]
    num_parameters: int
    num_frozen: int
    is_sharded: bool
    left_out: Mapping[str, int]

    def to_parameter_samples(self) -> ParameterSamples:
        """Return the samples as they are written, once `values` are on the host."""
        numbers = self.values.double().tolist()
        samples, begin = [], 0
        for name, location in self.locations:
            values = tuple(numbers[begin : begin + location.count])
            sample = Sample(name=name, dtype=location.dtype, shape=location.shape, start=location.start, values=values)
            samples.append(sample)
            begin += location.count
        return ParameterSamples(
            samples=tuple(samples),
            num_parameters=self.num_parameters,
            num_frozen=self.num_frozen,
            is_sharded=self.is_sharded,
            left_out=self.left_out,
        )


@dataclass(kw_only=True, slots=True)
class ParameterSlot:
    """The attribute of a module that is a parameter.

    A library may put another object there during the job, or other data into the same object. So a slot keeps neither,
    and looks them up each time.

    module  held weakly, so that a job that lets its model go gets the memory back
    key     name of the attribute
    reason  why the parameter has no samples, as far as its name tells
    weight_location, gradient_location  where the sample lies in the weight and in the gradient
    """

    name: str
    module: weakref.ref[nn.Module]
    key: str
    reason: str | None = None
    weight_location: "CachedLocation" = field(default_factory=lambda: CachedLocation())
    gradient_location: "CachedLocation" = field(default_factory=lambda: CachedLocation())

    def get_parameter(self) -> nn.Parameter | None:
        module = self.module()
        return None if module is None else module._parameters.get(self.key)

    def is_among(self, ids: Container[int]) -> bool:
        """Tell whether the parameter, or what an optimizer has in its place, has one of these ids."""
        return id(self.get_parameter()) in ids

    def get_local_weight(self) -> Any:
        """Return what this rank holds of the parameter."""
        return self.get_parameter()

    def get_local_gradient(self) -> Any:
        """Return what this rank holds of the gradient; None where there is none."""
        parameter = self.get_parameter()
        return None if parameter is None else parameter.grad

    def locate(self, cached: "CachedLocation", tensor: Any) -> SampleLocation | str:
        """Find the sample in `tensor`, the parameter or its gradient as it is now. A text says why it is not there."""
        layout = type(tensor), tensor.dtype, tensor.shape, tensor.stride()
        if cached.layout != layout:
            try:
                cached.location = locate_run(tensor, self.find_run)
            except UnknownLayoutError as error:
                cached.location = str(error) or f"of type {type_name(tensor)}"
            cached.layout = layout
        return cached.location

    def find_run(self, shape: Sequence[int]) -> tuple[int, int]:
        return choose_sampled_run(self.name, shape)


@dataclass(kw_only=True, slots=True)
class FlatParameterSlot(ParameterSlot):
    """A parameter that FSDP1 has put into a flat one, with others. `module` is the wrapper.

    number  position of the parameter among those in the flat one
    """

    number: int

    def get_parameter(self) -> nn.Parameter | None:
        module: Any = self.module()
        handle = getattr(module, "_handle", None)
        return None if handle is None else handle.flat_param

    def is_among(self, ids: Container[int]) -> bool:
        flat: Any = self.get_parameter()
        # With use_orig_params the optimizer has the original parameters, as views of the flat one.
        originals = getattr(flat, "_params", None)
        return id(flat) in ids or (originals is not None and id(originals[self.number]) in ids)

    def get_local_weight(self) -> Any:
        flat: Any = self.get_parameter()
        if flat is None:
            return None
        shard = getattr(flat, "_local_shard", None)
        return flat.detach() if shard is None else shard

    def get_local_gradient(self) -> Any:
        flat: Any = self.get_parameter()
        return None if flat is None else flat.grad

    def count_copies(self) -> int:
        """Count the ranks that hold the same shard: several if shards are of a node's ranks (HYBRID_SHARD)."""
        group = getattr(self.module(), "_inter_node_pg", None)
        return 1 if group is None else int(group.size())

    def locate(self, cached: "CachedLocation", tensor: Any) -> SampleLocation | str:
        try:
            return locate_run_in_flat(self.get_parameter(), tensor, self.number, self.find_run)
        except (UnknownLayoutError, AttributeError) as error:
            return str(error) or "in flat shards (FSDP1) of a kind that is not known here"


@dataclass(slots=True)
class CachedLocation:
    """Where a sample lies in a tensor, valid while the tensor has this type, dtype, shape and strides.

    location  a text says why there is none
    """

    location: SampleLocation | str = ""
    layout: tuple[Any, ...] = ()


FindGradient = Callable[[ParameterSlot, nn.Parameter], tuple[Tensor, SampleLocation] | None]


class ParameterSampler:
    """Takes samples of a model's parameters and of their gradients, on their device.

    It never waits for a device, calls no collective and keeps none of the job's memory. A parameter takes 2 to 10
    microseconds. Views of the parameters would take a tenth of that, but would keep memory alive that the job has moved
    its weights out of.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._has_listed_slots = False
        self._all_slots: list[ParameterSlot] = []
        # Those that have samples on this rank, and the next one of them in turn.
        self._sampled_slots: list[ParameterSlot] = []
        self._next_number = 0
        self._next_frozen_number = 0
        # Those of whose gradients the next optimizer step keeps samples.
        self._step_slots: Sequence[ParameterSlot] = ()
        self._num_frozen = 0
        self._is_sharded = False
        self._is_plain = True
        self._has_flat = False
        self._left_out: dict[str, int] = {}
        self._has_sampled = False
        self._has_begun_window = False

    @torch.inference_mode()
    def sample_weights(self, *, begins_window: bool = False) -> RawSamples | None:
        """Take samples of the next parameters; None where none can be taken.

        begins_window  this is the first pass after an optimizer step: its parameters are those of `sample_gradients`
        """
        self._list_slots()
        is_first = not self._has_sampled or (begins_window and not self._has_begun_window)
        num_candidates = self.num_trained if self._num_frozen else len(self._sampled_slots)
        num_per_step = num_candidates if num_candidates <= NUM_IN_SMALL_MODEL else NUM_PER_STEP
        max_slots = NUM_IN_FIRST_PASS if is_first else num_per_step if begins_window else NUM_PER_PASS
        follows_step = begins_window and not is_first
        is_trained = True if follows_step else None
        slots, self._next_number = self._choose_slots(self._next_number, max_slots, is_trained=is_trained)
        self._has_sampled = True
        if begins_window:
            self._has_begun_window, self._step_slots = True, slots
        frozen_slots: Sequence[ParameterSlot] = ()
        if follows_step and self._num_frozen:
            # Fewer than the trained ones: whoever asks whether most weights moved behind a step counts these, too.
            max_frozen = min(NUM_PER_PASS, -(-len(slots) // 2))
            frozen_slots, self._next_frozen_number = self._choose_slots(
                self._next_frozen_number, max_frozen, is_trained=False
            )
        views = _SampleViews()
        for slot in (*slots, *frozen_slots):
            if (weight := slot.get_local_weight()) is not None:
                views.add(slot.name, slot.locate(slot.weight_location, weight), weight)
        return self._copy_samples(views) if views.tensors or self._left_out else None

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    @property
    def is_same_after_forward(self) -> bool:
        """Tell whether samples may as well be taken when a forward has ended.

        That is so if no library gathers or moves the parameters: a sharded one may be whole after its forward.
        """
        self._list_slots()
        return self._is_plain

    @torch.inference_mode()
    def sample_gradients_with(self, find_gradient: FindGradient, excluded: Container[str] = ()) -> RawSamples | None:
        """Take samples of the gradients of the step's parameters, where `find_gradient` says that they are.

        excluded  names of parameters to leave out
        """
        views = _SampleViews()
        for slot in self._step_slots:
            parameter = slot.get_parameter()
            if parameter is None or slot.name in excluded:
                continue
            if (gradient_and_location := find_gradient(slot, parameter)) is not None:
                gradient, location = gradient_and_location
                views.add(slot.name, location, gradient)
        return self._copy_samples(views) if views.tensors else None

    @torch.inference_mode()
    def sample_gradients(
        self, ids: Container[int] | None = None, excluded: Container[str] = ()
    ) -> tuple[RawSamples | None, list[str]]:
        """Take samples of the gradients of the step's parameters.

        Returns also the names of those that are trained and have no gradient.

        ids       ids of the parameters to sample; None: all
        excluded  names of parameters to leave out
        """
        views, without_gradient = _SampleViews(), []
        for slot in self._step_slots:
            parameter = slot.get_parameter()
            if parameter is None or slot.name in excluded or (ids is not None and not slot.is_among(ids)):
                continue
            gradient = slot.get_local_gradient()
            if gradient is not None:
                views.add(slot.name, slot.locate(slot.gradient_location, gradient), gradient)
            elif parameter.requires_grad:
                without_gradient.append(slot.name)
        return self._copy_samples(views) if views.tensors else None, without_gradient

    def has_any_of(self, ids: Container[int]) -> bool:
        """Tell whether one of the model's parameters has one of these ids."""
        self._list_slots()
        # Those of the step come first: they are most likely among an optimizer's parameters.
        return any(slot.is_among(ids) for slot in (*self._step_slots, *self._all_slots))

    @property
    def has_flat_parameters(self) -> bool:
        """Tell whether FSDP1 has flattened some of the parameters."""
        self._list_slots()
        return self._has_flat

    def count_among(self, ids: Container[int]) -> int:
        """Count the model's parameters that have one of these ids, or lie in a flat one that has."""
        return sum(slot.is_among(ids) for slot in self._all_slots)

    def find_numbers(self, groups: Sequence[Sequence[Tensor]]) -> list[str] | None:
        """Return the numbers that the parameters of each group have among the model's, as `0-8,11`.

        `list_parameter_names` has their names. Returns None where it is not known, as of flattened ones (FSDP1).
        """
        if self.has_flat_parameters:
            return None
        numbers = {id(slot.get_parameter()): number for number, slot in enumerate(self._all_slots)}
        return [
            format_numbers(number for parameter in group if (number := numbers.get(id(parameter))) is not None)
            for group in groups
        ]

    def has_no_gradients(self, *, in_shards: bool) -> bool:
        """Tell whether the first few trained parameters have no gradients: they were emptied, or never filled.

        in_shards  look at sharded parameters too, whose gradients may be kept elsewhere for a time
        """
        self._list_slots()
        parameters = (slot.get_parameter() for slot in self._all_slots)
        trained = (parameter for parameter in parameters if parameter is not None and parameter.requires_grad)
        checked = list(islice(trained, _NUM_CHECKED_FOR_GRADIENTS))
        # Attributes of a DTensor, and of parameters that DeepSpeed partitions.
        sharding_attributes = ("placements", "ds_tensor", "_hp_mapping")
        is_whole = in_shards or not any(hasattr(checked[0], name) for name in sharding_attributes)
        return is_whole and all(parameter.grad is None for parameter in checked)

    @property
    def slots(self) -> Sequence[ParameterSlot]:
        """All parameters, also those without samples on this rank."""
        self._list_slots()
        return self._all_slots

    def count_cpu_elements(self) -> int:
        """Count the elements of the trained parameters on a CPU, of all ranks together."""
        trained = self._list_trained(on_cpu=True)
        # ZeRO 3 leaves no elements in a parameter, and keeps their number.
        return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in trained)

    def count_device_bytes(self) -> int:
        """Count the bytes of the trained parameters that are not on a CPU, as far as each rank holds them."""
        trained = {id(parameter): parameter for parameter in self._list_trained(on_cpu=False)}
        return sum(count_local_elements(parameter) * parameter.element_size() for parameter in trained.values())

    def _list_trained(self, *, on_cpu: bool) -> list[nn.Parameter]:
        return [
            parameter
            for slot in self.slots
            if (parameter := slot.get_parameter()) is not None
            and parameter.requires_grad
            and (parameter.device.type == "cpu") is on_cpu
        ]

    @property
    def step_slots(self) -> Sequence[ParameterSlot]:
        """Those of whose gradients the next optimizer step keeps samples."""
        return self._step_slots

    @property
    def num_trained(self) -> int:
        self._list_slots()
        return len(self._all_slots) - self._num_frozen

    def count_frozen(self) -> None:
        """Count anew, where the job has frozen other parameters since they were listed."""
        if (model := self._model()) is not None:
            self._num_frozen = len(list_frozen_names(model))

    def _choose_slots(
        self, first: int, max_slots: int, *, is_trained: bool | None
    ) -> tuple[Sequence[ParameterSlot], int]:
        """Choose the next slots in turn, from the one of number `first` on; return also the number that comes then.

        is_trained  choose those of trained parameters alone, or of frozen ones; None: of both
        """
        slots: list[ParameterSlot] = []
        num_seen, num_in_all = 0, len(self._sampled_slots)
        while num_seen < num_in_all and len(slots) < max_slots:
            slot = self._sampled_slots[(first + num_seen) % num_in_all]
            num_seen += 1
            parameter = None if is_trained is None else slot.get_parameter()
            if is_trained is None or (parameter is not None and parameter.requires_grad is is_trained):
                slots.append(slot)
        return slots, (first + num_seen) % max(num_in_all, 1)

    def _copy_samples(self, views: "_SampleViews") -> RawSamples:
        return RawSamples(
            values=torch.cat(views.tensors) if views.tensors else torch.empty(0, device="cpu"),
            locations=views.locations,
            num_parameters=len(self._all_slots),
            num_frozen=self._num_frozen,
            is_sharded=self._is_sharded or any(location.is_sharded for _, location in views.locations),
            left_out=self._left_out,
        )

    def _list_slots(self) -> None:
        """List the parameters, and those that have samples on this rank. Later calls do nothing."""
        if self._has_listed_slots or (model := self._model()) is None:
            return
        self._has_listed_slots = True
        left_out: Counter[str] = Counter()
        for slot, parameter in _find_distinct_slots(model):
            self._all_slots.append(slot)
            self._has_flat |= isinstance(slot, FlatParameterSlot)
            self._num_frozen += not parameter.requires_grad
            self._is_plain &= type(slot) is ParameterSlot and type(parameter) is nn.Parameter and not slot.reason
            self._is_plain &= not hasattr(parameter, "ds_tensor")
            location = slot.reason or slot.locate(slot.weight_location, slot.get_local_weight())
            if isinstance(location, str):
                left_out[location] += 1
                continue
            self._is_sharded |= location.is_sharded
            if location.count:
                self._sampled_slots.append(slot)
        self._left_out = dict(left_out)


def list_frozen_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are not trained; of one with several names, the first."""
    return [slot.name for slot, parameter in _find_distinct_slots(model) if not parameter.requires_grad]


def list_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters in the order of their numbers; of one with several names, the first."""
    return [slot.name for slot, _ in _find_distinct_slots(model)]


def _find_distinct_slots(model: nn.Module) -> Iterator[tuple[ParameterSlot, nn.Parameter]]:
    """Yield each parameter once, also one that has several names."""
    seen: set[tuple[int, int]] = set()
    for slot, parameter in _find_slots(model):
        key = (id(parameter), slot.number) if isinstance(slot, FlatParameterSlot) else (id(parameter), 0)
        if key not in seen:
            seen.add(key)
            yield slot, parameter


def _find_slots(model: nn.Module) -> Iterator[tuple[ParameterSlot, nn.Parameter]]:
    """Yield each parameter of the model, and those that FSDP1 has put into a flat one, under each name."""
    # Prefixes of the modules whose parameters FSDP1 has flattened.
    flattened: tuple[str, ...] = ()
    for prefix, module in model.named_modules():
        if (flat := _find_flat_parameter(module)) is not None:
            flattened = (*flattened, f"{prefix}." if prefix else "")
            for number, name in enumerate(flat._fqns):
                full_name = strip_wrappers(f"{prefix}.{name}" if prefix else name)
                yield FlatParameterSlot(name=full_name, module=weakref.ref(module), key="", number=number), flat
        if prefix.startswith(flattened) and flattened:
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None:
                raw_name = f"{prefix}.{key}" if prefix else key
                parts = raw_name.split(".")
                # Other releases of FSDP1 keep the flat parameter elsewhere: then nothing is known of what is in it.
                is_in_fsdp1 = "_fsdp_wrapped_module" in parts or "_flat_param" in parts
                reason = "in flat shards (FSDP1)" if is_in_fsdp1 else None
                yield (
                    ParameterSlot(name=strip_wrappers(raw_name), module=weakref.ref(module), key=key, reason=reason),
                    parameter,
                )


def _find_flat_parameter(module: nn.Module) -> Any:
    """Return the flat parameter of FSDP1's wrapper; None of other modules."""
    flat = getattr(vars(module).get("_handle"), "flat_param", None)
    return flat if hasattr(flat, "_fqns") and hasattr(flat, "_shapes") else None


@dataclass(slots=True)
class _SampleViews:
    """Views of samples on one device. Of a model on several devices these are the samples of the first one."""

    tensors: list[Tensor] = field(default_factory=list)
    locations: list[tuple[str, SampleLocation]] = field(default_factory=list)

    def add(self, name: str, location: SampleLocation | str, tensor: Any) -> None:
        """Add the elements at `location` in `tensor`, the weight or the gradient; nothing if they are not there."""
        if isinstance(location, str) or not location.count:
            return
        view = location.view_in(tensor)
        if not self.tensors or view.device == self.tensors[0].device:
            self.tensors.append(view)
            self.locations.append((name, location))
