"""A few elements of a model's weights beside each recorded pass: enough to know whether other weights are the same.

Of each parameter a run of NUM_ELEMENTS neighbours, at a place that its name and full shape alone decide, so that it is
the same place in any sharding: each rank keeps what it holds. The first pass of a recording, which is the one that has
a checkpoint's weights, takes up to NUM_IN_FIRST_PASS parameters, each later one the next NUM_A_PASS: a model of any
size costs a job the same.
"""

import hashlib
import json
import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from capture.micro_batch import CaptureError
from capture.plain_data import type_name
from capture.sharding import NotMappedError, Place, place_of

NUM_ELEMENTS = 4
NUM_IN_FIRST_PASS = 1024
NUM_A_PASS = 8

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Neighbours in the flattened parameter, from `start` on, as the job had them."""

    name: str  # without what wrappers put in front
    dtype: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What one rank kept of its weights in one pass."""

    samples: tuple[Sample, ...]
    num_parameters: int  # of the model, as the rank sees it
    num_frozen: int  # of those, that are not trained
    is_sharded: bool  # this rank holds a part of the samples, and others hold the rest
    left_out: Mapping[str, int] = field(default_factory=dict)  # why: number of parameters

    def text(self) -> str:
        """As it is written: JSON, which costs a job's background thread a tenth of what nested plain data would."""
        samples = {s.name: [s.dtype, s.shape, s.start, s.values] for s in self.samples}
        counts = {"num_parameters": self.num_parameters, "num_frozen": self.num_frozen, "is_sharded": self.is_sharded}
        return json.dumps({"samples": samples, **counts, "left_out": dict(self.left_out)})

    @classmethod
    def of_text(cls, text: str, source: str) -> Self:
        """Raises CaptureError for what `text` did not write."""
        try:
            written = json.loads(text)
            samples = tuple(_sample(name, *parts) for name, parts in written["samples"].items())
            found = cls(samples=samples, **{key: value for key, value in written.items() if key != "samples"})
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
            raise CaptureError(f"{source}: weights are no fingerprint: {text[:80]}") from None
        counts = (found.num_parameters, found.num_frozen, *found.left_out.values())
        if type(found.is_sharded) is not bool or not all(type(count) is int for count in counts):
            raise CaptureError(f"{source}: weights are no fingerprint: {text[:80]}")
        return found


def _sample(name: Any, dtype: Any, shape: Any, start: Any, values: Any) -> Sample:
    """Raises TypeError or ValueError."""
    numbers = [*shape, start]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(name + dtype, str):
        raise TypeError
    if not all(type(value) is float for value in values) or start + len(values) > math.prod(shape):
        raise ValueError
    return Sample(name=name, dtype=dtype, shape=tuple(shape), start=start, values=tuple(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSnapshot:
    """One pass's samples as they were taken, one after the other, and what they are of."""

    values: Tensor
    places: Sequence[tuple[str, Place]]  # by name
    num_parameters: int
    num_frozen: int
    is_sharded: bool
    left_out: Mapping[str, int]

    def fingerprint(self) -> Fingerprint:
        """Once `values` are on the host."""
        numbers = self.values.double().tolist()
        samples, begin = [], 0
        for name, place in self.places:
            values = tuple(numbers[begin : begin + place.count])
            samples.append(Sample(name=name, dtype=place.dtype, shape=place.shape, start=place.start, values=values))
            begin += place.count
        return Fingerprint(
            samples=tuple(samples),
            num_parameters=self.num_parameters,
            num_frozen=self.num_frozen,
            is_sharded=self.is_sharded,
            left_out=self.left_out,
        )


@dataclass(kw_only=True, slots=True)
class _Slot:
    """Where a module keeps a parameter. A library may put another object there, or other data into the same one."""

    name: str
    module: weakref.ref[nn.Module]  # so that a job that lets its model go gets the memory back
    key: str
    place: Place | str = ""  # text: why it is left out
    known: tuple[Any, ...] = ()  # type, dtype, shape and strides of the parameter that has this place


class WeightSampler:
    """Takes samples of a model's parameters. No wait for a device, no collective, and no hold on the job's memory."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._num_parameters = 0
        self._num_frozen = 0
        self._is_sharded = False
        self._left_out: dict[str, int] = {}
        self._next = 0

    @torch.inference_mode()
    def take(self, model: nn.Module) -> WeightSnapshot | None:
        """The next parameters' samples, on their device; None where none can be had. Always the same `model`.

        2 to 10 microseconds a parameter. To keep views of the parameters would take a tenth of that, and would keep
        memory from being freed that the job moves its weights out of.
        """
        if is_first := not self._num_parameters:
            self._look(model)
        views: list[Tensor] = []
        places: list[tuple[str, Place]] = []
        num_wanted = NUM_IN_FIRST_PASS if is_first else NUM_A_PASS
        for _ in range(min(num_wanted, len(self._slots))):
            slot = self._slots[self._next % len(self._slots)]
            self._next = (self._next + 1) % len(self._slots)
            module = slot.module()
            parameter = None if module is None else module._parameters.get(slot.key)
            if parameter is None:
                continue
            place = _place(slot, parameter)
            if isinstance(place, str) or not place.count:
                continue
            held = place.held(parameter)
            if views and held.device != views[0].device:
                continue  # a model over several devices: those of the first one
            views.append(held.as_strided((place.count,), (place.stride,), held.storage_offset() + place.offset))
            places.append((slot.name, place))
        if not views and not self._left_out:
            return None
        return WeightSnapshot(
            values=torch.cat(views) if views else torch.empty(0, device="cpu"),
            places=places,
            num_parameters=self._num_parameters,
            num_frozen=self._num_frozen,
            is_sharded=self._is_sharded,
            left_out=self._left_out,
        )

    def _look(self, model: nn.Module) -> None:
        """Once: which parameters there are, and which of them have samples here."""
        seen: set[int] = set()
        left_out: Counter[str] = Counter()
        for prefix, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                raw = f"{prefix}.{key}" if prefix else key
                slot = _Slot(name=plain_name(raw), module=weakref.ref(module), key=key)
                self._num_frozen += not parameter.requires_grad
                place = _reason_by_name(raw) or _place(slot, parameter)
                if isinstance(place, str):
                    left_out[place] += 1
                    continue
                self._is_sharded |= place.is_of_shard
                if place.count:
                    self._slots.append(slot)
        self._num_parameters = len(seen)
        self._left_out = dict(left_out)


def run_of(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """First element, in the flattened parameter, and number of elements: all in one row of the last dimension."""
    width = shape[-1] if shape else 1
    count = min(NUM_ELEMENTS, width)
    digest = hashlib.blake2b(f"{name} {list(shape)}".encode(), digest_size=16).digest()
    row, column = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    return row % (math.prod(shape) // width) * width + column % (width - count + 1), count


def plain_name(name: str) -> str:
    """Without what DDP, DeepSpeed, torch.compile, FSDP, checkpoint wrappers and PEFT put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and (parts[0] == "module" or parts[:2] == ["base_model", "model"]):
        parts = parts[1 if parts[0] == "module" else 2 :]
    return ".".join(parts)


def _reason_by_name(name: str) -> str | None:
    parts = name.split(".")
    if "_fsdp_wrapped_module" in parts or "_flat_param" in parts:
        return "in flat shards (FSDP1)"
    if "base_layer" in parts or any(part.startswith("lora_") for part in parts):
        return "of an adapter"
    return None


def _place(slot: _Slot, parameter: Any) -> Place | str:
    """Where the parameter's samples are now, or why that cannot be said."""
    known = type(parameter), parameter.dtype, parameter.shape, parameter.stride()
    if known != slot.known:
        try:
            slot.place = place_of(parameter, lambda shape: run_of(slot.name, shape))
        except NotMappedError as error:
            slot.place = str(error) or f"of type {type_name(parameter)}"
        slot.known = known
    return slot.place
