"""Take a pass's arguments as it begins and its outputs as it ends, in the job's thread, without waiting."""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from capture.file_format.micro_batch import ID_NAMES, Origin
from capture.file_format.safe_unpickler import type_name
from capture.file_format.tensor_codec import Output, can_encode
from capture.record.background_writer import warn
from capture.record.call_arguments import find_forward_signature, sort_arguments
from capture.record.host_copy import copy_to_host, is_capturing_graph
from capture.record.job_facts import (
    describe_call_settings,
    find_attention_kernel,
    find_kernels,
    read_autocast_dtype,
    read_versions,
)
from capture.record.parameter_sampler import ParameterSampler, RawSamples
from capture.record.rng_and_outputs import RandomSnapshot, compute_token_log_probs, find_logits, take_random_snapshot
from capture.record.step_window import StepWindow

_SAMPLES = " weights"  # no argument of a forward has this name
WITH_CACHE, IN_GRAPH = "given a cache of earlier tokens", "captured as a CUDA graph"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingOpened:
    """Says that a recording was opened, on this rank of so many."""

    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSnapshot:
    """A forward's arguments on the host, complete once every event in `copied` has happened."""

    tensors: Mapping[str, Tensor]
    copied: list[torch.cuda.Event]
    call_facts: Mapping[str, object]
    left_out: Mapping[str, str]
    trains: bool
    origin: Callable[[], Origin]  # worked out in the background
    random: RandomSnapshot | None
    weights: RawSamples | None
    optimizer_step: int | None
    settings: Mapping[str, str]  # beside those of the process
    notes: "PassNotes | None" = None  # made before the pass

    @property
    def num_bytes(self) -> int:
        noted = () if self.notes is None else self.notes.tensors.values()
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *noted))


@dataclass(frozen=True, kw_only=True, slots=True)
class PassNotes:
    """Tensors that the job's loop noted for the pass `forward`, on the host once `copied` has happened.

    left_out  what could not be noted, with the reason
    """

    forward: int
    tensors: Mapping[str, Tensor]
    copied: list[torch.cuda.Event]
    left_out: Mapping[str, str]

    @classmethod
    def of(cls, forward: int, values: Mapping[str, object]) -> "PassNotes":
        """Begin to copy `values`: tensors on any device, numbers, or lists of numbers; None is nothing."""
        tensors: dict[str, Tensor] = {}
        left_out: dict[str, str] = {}
        for name, value in values.items():
            if value is None:
                continue
            tensor = value if isinstance(value, Tensor) else _as_tensor(value)
            if tensor is not None and can_encode(tensor):
                tensors[name] = tensor
            else:
                left_out[name] = f"noted as {type_name(value)}"
        copies, copied = copy_to_host(tensors)
        return cls(forward=forward, tensors=copies, copied=copied, left_out=left_out)

    def joined(self, later: "PassNotes") -> "PassNotes":
        """Return both; of what was noted twice, the later one."""
        return replace(
            later,
            tensors={**self.tensors, **later.tensors},
            copied=[*self.copied, *later.copied],
            left_out={**self.left_out, **later.left_out},
        )


def _as_tensor(value: Any) -> Tensor | None:
    try:
        return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOutputs:
    """What came of the pass `forward`: plain values, and tensors that are on the host once `copied` has happened."""

    forward: int
    tensors: Mapping[str, Tensor]
    copied: list[torch.cuda.Event]
    plain: Mapping[str, Output]
    settings: Mapping[str, str]  # those that only the pass showed
    weights: RawSamples | None  # if they were taken when it had ended

    @classmethod
    def of(
        cls,
        forward: int,
        tensors: Mapping[str, Tensor],
        plain: Mapping[str, Output],
        settings: Mapping[str, str] | None = None,
        weights: RawSamples | None = None,
    ) -> "PassOutputs":
        copies, copied = copy_to_host(tensors if weights is None else {**tensors, _SAMPLES: weights.values})
        if weights is not None:
            weights = replace(weights, values=copies.pop(_SAMPLES))
        return cls(
            forward=forward, tensors=copies, copied=copied, plain=plain, settings=settings or {}, weights=weights
        )


class RecordingClock:
    """A clock that never goes back, so that the names of files sort as recorded."""

    def __init__(self) -> None:
        self._began = datetime.now(timezone.utc), time.monotonic_ns()

    def at(self, monotonic_ns: int) -> str:
        """Return the time in UTC, to the microsecond."""
        began, began_ns = self._began
        return (began + timedelta(microseconds=(monotonic_ns - began_ns) // 1000)).isoformat(timespec="microseconds")


class SnapshotMaker:
    """Makes a `Pass` of each call of `model`; with `reproduce` one that can be done again.

    names   the forward's names of arguments to those that they are kept by
    window  what is seen of the optimizer's steps, with `reproduce`
    """

    def __init__(
        self, model: nn.Module, clock: RecordingClock, *, model_name: str, reproduce: bool, names: Mapping[str, str]
    ) -> None:
        self._names = names
        self._signature = find_forward_signature(model)
        attention = find_attention_kernel(model)
        self._of_model = {"kernels": find_kernels(model)} if reproduce else {}
        self._of_model |= {} if attention is None else {"attention": attention}
        self._clock = clock
        self._model_name = model_name
        self._reproduce = reproduce
        self._sampler = ParameterSampler(model) if reproduce else None
        self.window = None if self._sampler is None else StepWindow(self._sampler)
        self._ids_BS: Tensor | None = None
        self._begins_window: bool | None = None  # of a pass whose weights are sampled when it has ended
        self._wants_log_probs = reproduce
        self._vocabularies = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
        self._computing = ComputeDtypeProbe(model) if reproduce and not is_compiled(model) else None

    def take(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        rank: int,
        world_size: int,
        forward: int,
        notes: PassNotes | None = None,
    ) -> PassSnapshot | str:
        """Take a call's arguments and what was noted before it, or say why these cannot replay the pass."""
        taken = sort_arguments(self._signature, args, kwargs)
        if self._names:
            taken = taken.renamed(self._names)
        trains = torch.is_grad_enabled()
        if taken.continues_a_cache(trains=trains):
            return WITH_CACHE
        if is_capturing_graph(taken.tensors):
            return IN_GRAPH
        weights = self._sampled_before(trains)
        settings = describe_call_settings(taken.tensors, self._of_model) if self._reproduce else {}
        if self._computing is not None:
            settings |= self._computing.begin((trains, settings["autocast"]))
        self._ids_BS = next((taken.tensors[name] for name in ID_NAMES if name in taken.tensors), None)
        to_copy = taken.tensors if weights is None else {**taken.tensors, _SAMPLES: weights.values}
        tensors, copied = copy_to_host(to_copy)
        if weights is not None:
            weights = replace(weights, values=tensors.pop(_SAMPLES))
        return PassSnapshot(
            tensors=tensors,
            copied=copied,
            call_facts=taken.call_facts,
            left_out=taken.left_out,
            trains=trains,
            origin=partial(self._origin, rank, world_size, forward, time.monotonic_ns()),
            random=take_random_snapshot(on_cuda=bool(copied)) if self._reproduce else None,
            weights=weights,
            optimizer_step=None if self.window is None else self.window.number,
            settings=settings,
            notes=None if notes is None else replace(notes, forward=forward),
        )

    def end_pass(self) -> tuple[dict[str, str], RawSamples | None]:
        """Return what the pass that ends has shown: settings, and samples of the weights if not taken before."""
        begins_window, self._begins_window = self._begins_window, None
        weights = None if begins_window is None else self._sampled(begins_window)
        return {} if self._computing is None else self._computing.end(), weights

    def log_probs_of(self, output: Any) -> Tensor | None:
        """Compute log-probs of a few tokens of the latest pass, which ends with `output`.

        A failure is one warning, and the end of log-probs; the pass is still recorded.
        """
        ids_BS, self._ids_BS = self._ids_BS, None
        if ids_BS is None or not self._wants_log_probs:
            return None
        try:
            logits = find_logits(output, ids_BS, self._vocabularies)
            if logits is None or is_capturing_graph({"logits": logits}):
                return None
            return compute_token_log_probs(logits, ids_BS)
        except Exception as error:  # the job is worth more than its record
            self._wants_log_probs = False
            warn(f"capture: no log-probs of tokens are kept from here on: {type(error).__name__}: {error}")
            return None

    def _sampled_before(self, trains: bool) -> RawSamples | None:
        """Take samples of the weights of a pass that begins, unless its end will do as well.

        While a pass begins, a device may stand idle until it gets its first work.
        """
        self._begins_window = None
        if self._sampler is None:
            return None
        begins_window = trains and self.window is not None and self.window.keep_pass()
        if self._sampler.is_same_after_forward:
            self._begins_window = begins_window
            return None
        return self._sampled(begins_window)

    def _sampled(self, begins_window: bool) -> RawSamples | None:
        """Take samples of the weights, on their device.

        A failure is one warning, and the end of samples; the pass is still recorded.
        """
        if self._sampler is None:
            return None
        try:
            return self._sampler.weights(begins_window=begins_window)
        except Exception as error:  # the job is worth more than its record
            self._sampler = self.window = None
            warn(f"capture: no samples of the weights are kept from here on: {type(error).__name__}: {error}")
            return None

    def _origin(self, rank: int, world_size: int, forward: int, monotonic_ns: int) -> Origin:
        return Origin(
            source="",
            rank=rank,
            world_size=world_size,
            step=forward,
            time=self._clock.at(monotonic_ns),
            model_name=self._model_name,
            versions=read_versions(),
        )


class ComputeDtypeProbe:
    """Looks at the first linear layer that runs, in one pass of each kind, and then removes its hooks.

    Compiled layers have no hooks: these would be compiled too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: dict[tuple[Any, ...], dict[str, str]] = {}
        self._kind: tuple[Any, ...] | None = None  # of the pass that is being looked at
        self._found: dict[str, str] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, kind: tuple[Any, ...]) -> dict[str, str]:
        """Begin a pass. Returns what is known of its kind; if that is nothing, `end` returns it."""
        self.end()
        model = self._model()
        if kind not in self._known and model is not None:
            self._kind, self._found = kind, {}
            self._handles = [module.register_forward_pre_hook(self._look) for module in _linear_layers(model)]
        return self._known.get(kind, {})

    def end(self) -> dict[str, str]:
        """End a pass. Returns what was found in it, if it was looked at."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._kind is None:
            return {}
        self._known[self._kind] = self._found
        self._kind = None
        return self._found

    def _look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        given = args[0] if args else None
        if self._found or torch.compiler.is_compiling() or not isinstance(given, Tensor):
            return
        autocast = read_autocast_dtype(given.device.type)
        dtype = str(given.dtype).removeprefix("torch.") if autocast == "off" else autocast
        self._found = {"autocast": autocast, "computed_in": dtype}


def is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _linear_layers(model: nn.Module) -> Iterator[nn.Module]:
    """List the linear layers inside `model`; not `model` itself, whose hooks are being called."""
    for child in model.children():
        if is_compiled(child):
            continue
        if isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D":
            yield child
        yield from _linear_layers(child)
