"""Take samples of a model's weights at each recorded pass, and of their gradients at each optimizer step.

By these a replay knows whether its own are the same. Where a parameter's sample lies is in
`capture/file_format/optimizer_step.py`; each rank keeps what it holds of it.

Which parameters are sampled:

* in the first pass of a recording, which has a checkpoint's weights: up to NUM_IN_FIRST_PASS
* in the first pass after each optimizer step: the next NUM_A_STEP that are trained, whose gradients the next step keeps
* in each other pass: the next NUM_A_PASS

So a model of any size costs a job the same.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from capture.file_format.optimizer_step import ParameterSamples, Sample, choose_sampled_run, strip_wrappers
from capture.file_format.safe_unpickler import type_name
from capture.record.sharding import SampleLocation, UnknownLayoutError, locate_run, locate_run_in_flat

NUM_IN_FIRST_PASS = 1024
NUM_PER_PASS = 8
NUM_PER_STEP = 16
NUM_IN_SMALL_MODEL = 64  # a model of no more parameters has all of them sampled at every step
_NUM_ASKED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSamples:
    """Samples as they were taken, one after the other, and what they were taken of."""

    values: Tensor
    places: Sequence[tuple[str, SampleLocation]]  # by name
    num_parameters: int
    num_frozen: int
    is_sharded: bool
    left_out: Mapping[str, int]

    def parameter_samples(self) -> ParameterSamples:
        """Return the samples as they are written, once `values` are on the host."""
        numbers = self.values.double().tolist()
        samples, begin = [], 0
        for name, place in self.places:
            values = tuple(numbers[begin : begin + place.count])
            samples.append(Sample(name=name, dtype=place.dtype, shape=place.shape, start=place.start, values=values))
            begin += place.count
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

    A library may put another object there, or other data into the same object.
    """

    name: str
    module: weakref.ref[nn.Module]  # so that a job that lets its model go gets the memory back
    key: str
    reason: str | None = None  # why there are no samples, as far as the name says
    of_weight: "CachedLocation" = field(default_factory=lambda: CachedLocation())
    of_gradient: "CachedLocation" = field(default_factory=lambda: CachedLocation())

    def parameter(self) -> nn.Parameter | None:
        module = self.module()
        return None if module is None else module._parameters.get(self.key)

    def is_among(self, ids: Container[int]) -> bool:
        """Tell whether the parameter, or what an optimizer has in its place, has one of these ids."""
        return id(self.parameter()) in ids

    def held(self) -> Any:
        """Return what this rank holds of the parameter."""
        return self.parameter()

    def gradient(self) -> Any:
        """Return what this rank holds of the gradient; None where there is none."""
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    def place(self, placed: "CachedLocation", held: Any) -> SampleLocation | str:
        """Find the samples in `held`, the parameter or its gradient, as it is now; a text says why they cannot be."""
        known = type(held), held.dtype, held.shape, held.stride()
        if placed.known != known:
            try:
                placed.place = locate_run(held, self.run)
            except UnknownLayoutError as error:
                placed.place = str(error) or f"of type {type_name(held)}"
            placed.known = known
        return placed.place

    def run(self, shape: Sequence[int]) -> tuple[int, int]:
        return choose_sampled_run(self.name, shape)


@dataclass(kw_only=True, slots=True)
class FlatParameterSlot(ParameterSlot):
    """A parameter that FSDP1 has put into a flat one, with others. `module` is the wrapper."""

    number: int  # in the flat parameter

    def parameter(self) -> nn.Parameter | None:
        module: Any = self.module()
        handle = getattr(module, "_handle", None)
        return None if handle is None else handle.flat_param

    def is_among(self, ids: Container[int]) -> bool:
        flat: Any = self.parameter()
        originals = getattr(flat, "_params", None)  # with use_orig_params
        return id(flat) in ids or (originals is not None and id(originals[self.number]) in ids)

    def held(self) -> Any:
        flat: Any = self.parameter()
        if flat is None:
            return None
        sharded = getattr(flat, "_local_shard", None)
        return flat.detach() if sharded is None else sharded

    def gradient(self) -> Any:
        flat: Any = self.parameter()
        return None if flat is None else flat.grad

    def place(self, placed: "CachedLocation", held: Any) -> SampleLocation | str:
        try:
            return locate_run_in_flat(self.parameter(), held, self.number, self.run)
        except (UnknownLayoutError, AttributeError) as error:
            return str(error) or "in flat shards (FSDP1) of a kind that is not known here"


@dataclass(slots=True)
class CachedLocation:
    """Where samples lie in a tensor, valid while that has this type, dtype, shape and strides."""

    place: SampleLocation | str = ""  # text: why it is left out
    known: tuple[Any, ...] = ()


Find = Callable[[ParameterSlot, nn.Parameter], tuple[Tensor, SampleLocation] | None]


class ParameterSampler:
    """Takes samples of a model's parameters and of their gradients, on their device.

    It never waits for a device, calls no collective and keeps none of the job's memory. A parameter takes 2 to 10
    microseconds. Views of the parameters would take a tenth of that, but would keep memory alive that the job has moved
    its weights out of.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._has_looked = False
        self._all: list[ParameterSlot] = []  # also those without samples
        self._slots: list[ParameterSlot] = []
        self._window: Sequence[ParameterSlot] = ()  # those whose gradients the next step keeps
        self._num_frozen = 0
        self._is_sharded = False
        self._is_plain = True
        self._left_out: dict[str, int] = {}
        self._next = 0
        self._has_taken = False
        self._has_begun = False

    @torch.inference_mode()
    def weights(self, *, begins_window: bool = False) -> RawSamples | None:
        """Take samples of the next parameters; None where none can be taken.

        begins_window  this is the first pass after an optimizer step: `gradients` will be those of these parameters
        """
        self._look()
        is_first = not self._has_taken or (begins_window and not self._has_begun)
        num_in_all = self.num_trained if self._num_frozen else len(self._slots)
        num_a_step = num_in_all if num_in_all <= NUM_IN_SMALL_MODEL else NUM_PER_STEP
        num_wanted = NUM_IN_FIRST_PASS if is_first else num_a_step if begins_window else NUM_PER_PASS
        chosen = self._next_slots(num_wanted, are_trained=begins_window and not is_first)
        self._has_taken = True
        if begins_window:
            self._has_begun, self._window = True, chosen
        collected = _SampleViews()
        for slot in chosen:
            if (held := slot.held()) is not None:
                collected.add(slot.name, slot.place(slot.of_weight, held), held)
        return self._snapshot(collected) if collected.views or self._left_out else None

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    @property
    def is_same_after_forward(self) -> bool:
        """Tell whether samples may as well be taken when a forward has ended: nothing gathers or moves the parameters.

        A sharded one may be whole by then.
        """
        self._look()
        return self._is_plain

    @torch.inference_mode()
    def gradients_in(self, find: Find, but: Container[str] = ()) -> RawSamples | None:
        """Take samples of the gradients of the window's parameters, where `find` says that they are."""
        collected = _SampleViews()
        for slot in self._window:
            parameter = slot.parameter()
            if parameter is not None and slot.name not in but and (gradient := find(slot, parameter)) is not None:
                collected.add(slot.name, gradient[1], gradient[0])
        return self._snapshot(collected) if collected.views else None

    @torch.inference_mode()
    def gradients(
        self, of: Container[int] | None = None, but: Container[str] = ()
    ) -> tuple[RawSamples | None, list[str]]:
        """Take samples of the gradients of the window's parameters.

        Returns also the names of those that are trained and have no gradient.

        of   ids of the parameters to sample; None: all
        but  names of parameters to leave out
        """
        collected, without = _SampleViews(), []
        for slot in self._window:
            parameter = slot.parameter()
            if parameter is None or slot.name in but or (of is not None and not slot.is_among(of)):
                continue
            gradient = slot.gradient()
            if gradient is not None:
                collected.add(slot.name, slot.place(slot.of_gradient, gradient), gradient)
            elif parameter.requires_grad:
                without.append(slot.name)
        return self._snapshot(collected) if collected.views else None, without

    def is_of_model(self, parameters: Container[int]) -> bool:
        """Tell whether one of the model's parameters has one of these ids."""
        self._look()
        return any(slot.is_among(parameters) for slot in (*self._window, *self._all))

    @property
    def has_flat(self) -> bool:
        """Tell whether FSDP1 has flattened some of the parameters."""
        self._look()
        return any(isinstance(slot, FlatParameterSlot) for slot in self._all)

    def num_among(self, ids: Container[int]) -> int:
        """Count the model's parameters that have one of these ids, or lie in a flat one that has."""
        return sum(slot.is_among(ids) for slot in self._all)

    def has_no_gradients(self, *, in_shards: bool) -> bool:
        """Tell whether the first few trained parameters have no gradients: they were emptied, or never filled.

        in_shards  look at sharded parameters too, whose gradients may be kept elsewhere for a time
        """
        self._look()
        trained = (p for slot in self._all if (p := slot.parameter()) is not None and p.requires_grad)
        asked = [parameter for _, parameter in zip(range(_NUM_ASKED), trained, strict=False)]
        is_whole = in_shards or not any(hasattr(asked[0], name) for name in ("placements", "ds_tensor", "_hp_mapping"))
        return is_whole and all(parameter.grad is None for parameter in asked)

    @property
    def num_trained(self) -> int:
        return len(self._all) - self._num_frozen

    def _next_slots(self, num_wanted: int, *, are_trained: bool) -> Sequence[ParameterSlot]:
        """Choose the next slots in turn; if `are_trained`, those of frozen parameters are passed over."""
        chosen: list[ParameterSlot] = []
        num_seen = 0
        while num_seen < len(self._slots) and len(chosen) < num_wanted:
            slot = self._slots[(self._next + num_seen) % len(self._slots)]
            num_seen += 1
            if not are_trained or ((parameter := slot.parameter()) is not None and parameter.requires_grad):
                chosen.append(slot)
        self._next = (self._next + num_seen) % max(len(self._slots), 1)
        return chosen

    def _snapshot(self, collected: "_SampleViews") -> RawSamples:
        return RawSamples(
            values=torch.cat(collected.views) if collected.views else torch.empty(0, device="cpu"),
            places=collected.places,
            num_parameters=len(self._all),
            num_frozen=self._num_frozen,
            is_sharded=self._is_sharded or any(place.is_of_shard for _, place in collected.places),
            left_out=self._left_out,
        )

    def _look(self) -> None:
        """Find the parameters, and those that have samples on this rank. Later calls do nothing."""
        model = self._model()
        if self._has_looked or model is None:
            return
        self._has_looked = True
        left_out: Counter[str] = Counter()
        for slot, parameter in _slots_once(model):
            self._all.append(slot)
            self._num_frozen += not parameter.requires_grad
            self._is_plain &= type(slot) is ParameterSlot and type(parameter) is nn.Parameter and not slot.reason
            self._is_plain &= not hasattr(parameter, "ds_tensor")
            place = slot.reason or slot.place(slot.of_weight, slot.held())
            if isinstance(place, str):
                left_out[place] += 1
                continue
            self._is_sharded |= place.is_of_shard
            if place.count:
                self._slots.append(slot)
        self._left_out = dict(left_out)


def list_frozen_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are not trained; of one with several names, the first."""
    return [slot.name for slot, parameter in _slots_once(model) if not parameter.requires_grad]


def _slots_once(model: nn.Module) -> Iterator[tuple[ParameterSlot, nn.Parameter]]:
    """Yield each parameter once, also one that has several names."""
    seen: set[tuple[int, int]] = set()
    for slot, parameter in _slots_of(model):
        key = (id(parameter), slot.number) if isinstance(slot, FlatParameterSlot) else (id(parameter), 0)
        if key not in seen:
            seen.add(key)
            yield slot, parameter


def _slots_of(model: nn.Module) -> Iterator[tuple[ParameterSlot, nn.Parameter]]:
    flattened: tuple[str, ...] = ()  # prefixes of what FSDP1 has flattened
    for prefix, module in model.named_modules():
        if (flat := _flat_parameter_of(module)) is not None:
            flattened = (*flattened, f"{prefix}." if prefix else "")
            for number, name in enumerate(flat._fqns):
                full = strip_wrappers(f"{prefix}.{name}" if prefix else name)
                yield FlatParameterSlot(name=full, module=weakref.ref(module), key="", number=number), flat
        if prefix.startswith(flattened) and flattened:
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None:
                raw = f"{prefix}.{key}" if prefix else key
                parts = raw.split(".")
                is_of_fsdp1 = "_fsdp_wrapped_module" in parts or "_flat_param" in parts  # of another release than known
                reason = "in flat shards (FSDP1)" if is_of_fsdp1 else None
                yield (
                    ParameterSlot(name=strip_wrappers(raw), module=weakref.ref(module), key=key, reason=reason),
                    parameter,
                )


def _flat_parameter_of(module: nn.Module) -> Any:
    """Return the flat parameter of FSDP1's wrapper; None of other modules."""
    flat = getattr(vars(module).get("_handle"), "flat_param", None)
    return flat if hasattr(flat, "_fqns") and hasattr(flat, "_shapes") else None


@dataclass(slots=True)
class _SampleViews:
    """Views of samples on one device. Of a model over several devices these are the samples of the first one."""

    views: list[Tensor] = field(default_factory=list)
    places: list[tuple[str, SampleLocation]] = field(default_factory=list)
    device: torch.device | None = None

    def add(self, name: str, place: SampleLocation | str, of: Any) -> None:
        if isinstance(place, str) or not place.count:
            return
        held = of if place.held_as is None else place.held(of)
        if self.views and held.device != self.device:
            return
        self.device = held.device
        self.views.append(held.as_strided((place.count,), (place.stride,), held.storage_offset() + place.offset))
        self.places.append((name, place))
