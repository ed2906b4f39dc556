"""What a job's thread hands over to be written: that it records, a pass as it begins, what came of it. No waiting."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from capture.call_arguments import forward_signature, take_apart
from capture.fingerprint import WeightSampler, WeightSnapshot
from capture.host_copy import copy_to_host, is_capturing_graph
from capture.job import attention_of, settings_of, versions
from capture.micro_batch import Origin
from capture.reproduction import RandomSnapshot, random_snapshot
from capture.writer import warn

_SAMPLES = " weights"  # no argument of a forward has this name


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A recording, on this rank."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A forward's arguments on the host, complete once every event in `copied` has happened."""

    tensors: Mapping[str, Tensor]
    copied: list[torch.cuda.Event]
    call_facts: Mapping[str, Any]
    left_out: Mapping[str, str]
    trains: bool
    origin: Callable[[], Origin]  # worked out in the background
    random: RandomSnapshot | None
    weights: WeightSnapshot | None
    settings: Mapping[str, str]  # beside those of the process

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """What came of the pass `step`: tensors on the host once `copied` has happened, and plain values."""

    step: int
    tensors: Mapping[str, Tensor]
    copied: list[torch.cuda.Event]
    plain: Mapping[str, Any]

    @classmethod
    def of(cls, step: int, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> "Outputs":
        copies, copied = copy_to_host(tensors)
        return cls(step=step, tensors=copies, copied=copied, plain=plain)


class Clock:
    """Monotonic from its making on, so that names sort as recorded."""

    def __init__(self) -> None:
        self._began = datetime.now(UTC), time.monotonic_ns()

    def at(self, monotonic_ns: int) -> str:
        """In UTC, to the microsecond."""
        began, began_ns = self._began
        return (began + timedelta(microseconds=(monotonic_ns - began_ns) // 1000)).isoformat(timespec="microseconds")


class Taker:
    """Makes passes of what `model` is called with; with `reproduce`, with all it takes to do them again."""

    def __init__(self, model: nn.Module, clock: Clock, *, model_name: str, reproduce: bool) -> None:
        self._signature = forward_signature(model)
        self._attention = attention_of(model)
        self._clock = clock
        self._model_name = model_name
        self._reproduce = reproduce
        self._sampler = WeightSampler() if reproduce else None

    def take(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rank: int, world_size: int, step: int
    ) -> Pass | None:
        """None for a pass that cannot be replayed from its arguments."""
        taken = take_apart(self._signature, args, kwargs)
        if taken.continues_a_cache or is_capturing_graph(taken.tensors):
            return None
        weights = self._sampled(module)
        to_copy = taken.tensors if weights is None else {**taken.tensors, _SAMPLES: weights.values}
        tensors, copied = copy_to_host(to_copy)
        if weights is not None:
            weights = replace(weights, values=tensors.pop(_SAMPLES))
        return Pass(
            tensors=tensors,
            copied=copied,
            call_facts=taken.call_facts,
            left_out=taken.left_out,
            trains=torch.is_grad_enabled(),
            origin=partial(self._origin, rank, world_size, step, time.monotonic_ns()),
            random=random_snapshot(on_cuda=bool(copied)) if self._reproduce else None,
            weights=weights,
            settings=settings_of(taken.tensors, self._attention) if self._reproduce else {},
        )

    def _sampled(self, module: nn.Module) -> WeightSnapshot | None:
        """Samples of the weights, on their device. Trouble with them is not the pass's."""
        if self._sampler is None:
            return None
        try:
            return self._sampler.take(module)
        except Exception as error:  # the job is worth more than its record
            self._sampler = None
            warn(f"capture: no samples of the weights are kept from here on: {type(error).__name__}: {error}")
            return None

    def _origin(self, rank: int, world_size: int, step: int, monotonic_ns: int) -> Origin:
        return Origin(
            source="",
            rank=rank,
            world_size=world_size,
            step=step,
            time=self._clock.at(monotonic_ns),
            model_name=self._model_name,
            versions=versions(),
        )
