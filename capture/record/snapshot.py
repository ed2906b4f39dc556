"""Take a pass's arguments as it begins and its outputs as it ends, in the job's thread, without waiting."""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from capture.file_format.micro_batch import ID_NAMES, SHIFT_LABELS, Origin
from capture.file_format.safe_unpickler import type_name
from capture.file_format.tensor_codec import Output, TrainingMode, can_encode
from capture.record.background_writer import warn
from capture.record.call_arguments import find_forward_signature, sort_arguments
from capture.record.engine_gradients import read_engine_loss_scale
from capture.record.generator_marks import GeneratorSnapshot, read_cuda_state, take_generator_snapshot
from capture.record.host_copy import ArgumentCopier, ArgumentCopies, copy_to_host, is_capturing_graph
from capture.record.job_facts import (
    ModelDevices,
    PassDevice,
    describe_model,
    find_attention_kernel,
    is_compiled,
    read_autocast_dtype,
    read_device_name,
    read_versions,
)
from capture.record.model_facts import RawModelFacts
from capture.record.model_facts_taker import ModelFactsTaker
from capture.record.outputs import compute_token_log_probs, find_logits
from capture.record.pair_masks import PairMask, read_pair_mask
from capture.record.parameter_sampler import ParameterSampler, RawSamples
from capture.record.random_states import HostStateFollower, HostStates, PassKind, RandomSnapshot
from capture.record.step_window import StepWindow
from capture.record.training_mode import TrainingModeReader
from capture.record.wrapper_facts import GradientSyncReader

# The name of the samples of the weights beside a pass's tensors. No argument of a forward can have it.
_SAMPLES = " weights"
# The same of what a mask of pairs of tokens says.
_PAIRS = " pairs"
# What the names of the chosen experts begin with beside a pass's outputs.
_ROUTES = " routes "
# Why a pass cannot be replayed from its arguments.
WITH_CACHE, IN_GRAPH = "given a cache of earlier tokens", "captured as a CUDA graph"
WITH_MASK_OF_PAIRS = "given an attention mask of pairs of tokens"
WITH_ADDED_MASK = f"{WITH_MASK_OF_PAIRS} as bool, which eager attention adds to the scores as 0 and 1"
_MASK = "attention_mask"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingOpened:
    """Says that a recording was opened, and on which rank of how many."""

    rank: int
    world_size: int


class PassSnapshot(NamedTuple):
    """A forward's arguments on the host, and what was read where it began.

    make_origin     is called in the background, since it takes a while
    optimizer_step  number of the step that comes after the pass; None if steps are not recorded
    settings        those that the environment of the process does not tell; later ones count
    training        which parts of the model train, as far as its beginning tells; None if that is not recorded
    notes           what was noted before the pass
    model_facts     what the model is, in the first recorded pass, and in the first one that trains
    pair_mask       what a mask of pairs of tokens said, which is not among the tensors; None without one
    """

    copies: ArgumentCopies
    call_facts: Mapping[str, object]
    left_out: Mapping[str, str]
    trains: bool
    make_origin: Callable[[], Origin]
    random: RandomSnapshot | None
    weights: RawSamples | None
    optimizer_step: int | None
    settings: Sequence[Mapping[str, str]]
    training: TrainingMode | None = None
    notes: "PassNotes | None" = None
    model_facts: RawModelFacts | None = None
    pair_mask: PairMask | None = None

    @property
    def num_tokens(self) -> int:
        """The pass's token ids, padding included; 0 without token ids."""
        ids = _find_ids(self.copies.tensors)
        return 0 if ids is None else ids.numel()

    @property
    def num_bytes(self) -> int:
        num_noted = 0 if self.notes is None else sum(tensor.nbytes for tensor in self.notes.tensors.values())
        return self.copies.num_bytes + num_noted


@dataclass(frozen=True, kw_only=True, slots=True)
class PassNotes:
    """Tensors that the job's loop noted for the pass `forward`, on the host once `copy_events` have happened.

    left_out  what could not be noted, with the reason
    """

    forward: int
    tensors: Mapping[str, Tensor]
    copy_events: list[torch.cuda.Event]
    left_out: Mapping[str, str]

    @classmethod
    def begin_copy(cls, forward: int, values: Mapping[str, object]) -> "PassNotes":
        """Begin to copy `values`: tensors on any device, numbers, or lists of either; those that are None are left."""
        tensors: dict[str, Tensor] = {}
        left_out: dict[str, str] = {}
        for name, value in values.items():
            if value is None:
                continue
            tensor = value if isinstance(value, Tensor) else _make_tensor(value)
            if tensor is not None and can_encode(tensor):
                tensors[name] = tensor
            else:
                left_out[name] = f"noted as {type_name(value)}"
        copies, copy_events = copy_to_host(tensors)
        return cls(forward=forward, tensors=copies, copy_events=copy_events, left_out=left_out)

    def merge(self, later: "PassNotes") -> "PassNotes":
        """Return the notes of both; where both have a name, the later tensor."""
        return replace(
            later,
            tensors={**self.tensors, **later.tensors},
            copy_events=[*self.copy_events, *later.copy_events],
            left_out={**self.left_out, **later.left_out},
        )


def _make_tensor(value: Any) -> Tensor | None:
    try:
        if isinstance(value, list | tuple) and any(isinstance(member, Tensor) for member in value):
            # To read them one by one would wait for their device.
            return torch.stack([*value]).detach()
        return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PassLogits:
    """The logits [B, S, V] and token ids [B, S] of a pass, and log-probs of a few tokens."""

    logits: Tensor
    ids: Tensor
    log_probs: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PassEnd:
    """What is read where a pass ends. By then a device has work, and does not wait for the job's thread.

    settings     those that were not known before the pass ran
    weights      samples of the weights; None if they were taken where the pass began
    training     which parts of the model train; None if that is what its snapshot has
    model_facts  what the model is, if it trains other parameters than before
    host_states  those of the host's generators where the pass began; None if they are what its snapshot has
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    weights: RawSamples | None = None
    training: TrainingMode | None = None
    model_facts: RawModelFacts | None = None
    host_states: HostStates | None = None

    @property
    def is_empty(self) -> bool:
        values = self.weights, self.training, self.model_facts, self.host_states
        return not self.settings and all(value is None for value in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOutputs:
    """What came out of the pass `forward`: plain values, and tensors on the host once `copy_events` have happened.

    end           what was read where it ended
    random_after  the states of torch's generators where the forward ended
    routes        names of routers, and the experts that each of them chose for each token; none of a dense model
    """

    forward: int
    tensors: Mapping[str, Tensor]
    copy_events: list[torch.cuda.Event]
    plain: Mapping[str, Output]
    end: PassEnd
    random_after: GeneratorSnapshot | None = None
    routes: Sequence[tuple[tuple[str, ...], Tensor]] = ()

    @classmethod
    def begin_copy(
        cls,
        forward: int,
        tensors: Mapping[str, Tensor],
        plain: Mapping[str, Output],
        end: PassEnd = PassEnd(),  # frozen
        random_after: GeneratorSnapshot | None = None,
        routes: Sequence[tuple[tuple[str, ...], Tensor]] = (),
    ) -> "PassOutputs":
        to_copy = {**tensors, **{f"{_ROUTES}{number}": choices for number, (_, choices) in enumerate(routes)}}
        to_copy |= {} if end.weights is None else {_SAMPLES: end.weights.values}
        copies, copy_events = copy_to_host(to_copy)
        host_routes = [(names, copies.pop(f"{_ROUTES}{number}")) for number, (names, _) in enumerate(routes)]
        if end.weights is not None:
            end = replace(end, weights=replace(end.weights, values=copies.pop(_SAMPLES)))
        return cls(
            forward=forward,
            tensors=copies,
            copy_events=copy_events,
            plain=plain,
            end=end,
            random_after=random_after,
            routes=host_routes,
        )


def _find_ids(tensors: Mapping[str, Tensor]) -> Tensor | None:
    for name in ID_NAMES:
        if name in tensors:
            return tensors[name]
    return None


class RecordingClock:
    """A clock that never goes back, so that files sorted by name are in the order of the passes."""

    def __init__(self) -> None:
        self._start, self._start_ns = datetime.now(timezone.utc), time.monotonic_ns()

    def format_time(self, monotonic_ns: int) -> str:
        """Format a time of `time.monotonic_ns` as UTC, to the microsecond."""
        elapsed = timedelta(microseconds=(monotonic_ns - self._start_ns) // 1000)
        return (self._start + elapsed).isoformat(timespec="microseconds")


class SnapshotMaker:
    """Makes a `PassSnapshot` of each call of `model`; with `reproduce` one that holds what it takes to run it again.

    names           the forward's names of arguments to those that a capture gives them
    window          follows the optimizer's steps, with `reproduce`
    samples_at_end  whether weights are sampled where a pass ends, which is better than where it begins: there a device
                    may stand idle until it gets its first work. `choose_where_to_sample` finds out
    """

    def __init__(
        self, model: nn.Module, clock: RecordingClock, *, model_name: str, reproduce: bool, names: Mapping[str, str]
    ) -> None:
        self._names = names
        self._signature = find_forward_signature(model)
        attention = find_attention_kernel(model)
        self._model_settings = describe_model(model) if reproduce else {}
        self._model_settings |= {} if attention is None else {"attention": attention}
        # By the device's number and autocast's dtype.
        self._settings_by_device: dict[tuple[int, str], dict[str, str]] = {}
        self._copier = ArgumentCopier()
        self._clock = clock
        self._model_name = model_name
        self._reproduce = reproduce
        self._training_mode = TrainingModeReader(model) if reproduce else None
        self._devices = ModelDevices(model)
        # The device of the running pass, if it has a generator, and whether the states at its end are kept.
        self._cuda_device: torch.device | None = None
        self._keeps_random_after = False
        self._host_states = HostStateFollower()
        # Those of the host's generators where the running pass began, if its end tells other ones.
        self._host_states_before: HostStates | None = None
        self._sampler = ParameterSampler(model) if reproduce else None
        self._facts_taker = ModelFactsTaker(model) if reproduce else None
        self._gradient_sync = GradientSyncReader(model) if reproduce else None
        self.window = None if self._sampler is None else StepWindow(self._sampler)
        self._ids_BS: Tensor | None = None
        self.has_labels = False
        self.samples_at_end = False
        # Whether the running pass is recorded, and its number if it also trains.
        self._is_recorded = False
        self._training_pass: int | None = None
        self._keeps_log_probs = reproduce
        self._vocabulary_sizes = {
            module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
        }
        self._compute_dtype = ComputeDtypeProbe(model) if reproduce and not is_compiled(model) else None

    def make(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        rank: int,
        world_size: int,
        forward: int,
        notes: PassNotes | None = None,
    ) -> PassSnapshot | str:
        """Begin to copy a call's arguments. Returns a text, the reason, if the pass cannot be replayed from these."""
        arguments = sort_arguments(self._signature, args, kwargs)
        if self._names:
            arguments = arguments.rename(self._names)
        trains = torch.is_grad_enabled()
        if arguments.left_out and arguments.depends_on_cache(trains=trains):
            return WITH_CACHE
        if is_capturing_graph(arguments.tensors):
            return IN_GRAPH
        self._ids_BS = _find_ids(arguments.tensors)
        to_copy, pair_mask = dict(arguments.tensors), None
        # A capture has a mask of the tokens alone, by which a replay makes that of the pairs.
        if _MASK in to_copy and to_copy[_MASK].ndim > 2:
            # transformers hands such a mask on as it is: SDPA takes bool, and its eager attention hides nothing by it.
            if to_copy[_MASK].dtype == torch.bool and self._model_settings.get("attention") == "eager":
                return WITH_ADDED_MASK
            if (pair_mask := self._read_pair_mask(to_copy.pop(_MASK))) is None:
                return WITH_MASK_OF_PAIRS
            to_copy[_PAIRS] = pair_mask.first_seen_BS
        weights = None if self.samples_at_end else self._sample_weights(trains)
        device = self._devices.find(arguments.tensors)
        settings = self._read_settings(device, trains) if self._reproduce else ()
        self.has_labels = "labels" in to_copy or SHIFT_LABELS in to_copy
        if weights is not None:
            to_copy[_SAMPLES] = weights.values
        copies = self._copier.copy(to_copy)
        if pair_mask is not None:
            pair_mask = pair_mask.on_host(copies.tensors.pop(_PAIRS))
        if weights is not None:
            weights = replace(weights, values=copies.tensors.pop(_SAMPLES))
        self._is_recorded, self._training_pass = True, forward if trains else None
        # Of a model on several devices one generator alone would be recorded, and tell of a part of the masks.
        self._cuda_device = device.device if device.type == "cuda" else None
        training = None if self._training_mode is None else self._training_mode.expect()
        is_training = training is not None and training["model"]
        self._keeps_random_after = self._reproduce and not self._devices.are_several
        return PassSnapshot(
            copies=copies,
            call_facts=arguments.call_facts,
            left_out=arguments.left_out,
            trains=trains,
            make_origin=partial(self._make_origin, rank, world_size, forward, time.monotonic_ns()),
            random=self._take_random_before((trains, is_training)) if self._reproduce else None,
            training=training,
            weights=weights,
            optimizer_step=None if self.window is None else self.window.number,
            settings=settings,
            notes=None if notes is None else replace(notes, forward=forward),
            model_facts=None if self._facts_taker is None else self._facts_taker.take(forward=forward, trains=trains),
            pair_mask=pair_mask,
        )

    def _read_settings(self, device: PassDevice, trains: bool) -> Sequence[Mapping[str, str]]:
        """Read the settings of a pass, without making what is the same in each."""
        autocast = read_autocast_dtype(device.type)
        settings = self._settings_by_device.get((device.number, autocast))
        if settings is None:
            settings = {"device": read_device_name(device.device), "autocast": autocast, **self._model_settings}
            self._settings_by_device[device.number, autocast] = settings
        synced = self._gradient_sync.read() if self._gradient_sync is not None and trains else {}
        computed = {} if self._compute_dtype is None else self._compute_dtype.begin((trains, autocast))
        return settings, synced, computed

    def read_engine_scale(self) -> float:
        """Return what an engine around the model multiplies the loss by, 1 without one."""
        return 1.0 if self._sampler is None else read_engine_loss_scale(self._sampler.model)

    def _read_pair_mask(self, mask: Tensor) -> PairMask | None:
        if self._ids_BS is None or self._ids_BS.ndim != 2:
            return None
        takes_positions = "position_ids" in self._signature.parameters
        try:
            return read_pair_mask(mask, self._ids_BS, takes_positions=takes_positions)
        except torch.cuda.OutOfMemoryError:
            # It takes a few bytes for each pair, which a job near its limit may not have before a forward.
            return None

    def end_pass(self) -> PassEnd:
        """Read what is left for the end of the latest pass."""
        is_recorded, self._is_recorded = self._is_recorded, False
        taker, training_pass, self._training_pass = self._facts_taker, self._training_pass, None
        facts = None if taker is None or training_pass is None else taker.take_change(training_pass)
        if facts is not None and self._sampler is not None:
            self._sampler.count_frozen()
        host_states, self._host_states_before = self._host_states_before, None
        return PassEnd(
            host_states=host_states,
            settings={} if self._compute_dtype is None else self._compute_dtype.end(),
            weights=self._sample_weights(training_pass is not None) if is_recorded and self.samples_at_end else None,
            training=None if self._training_mode is None else self._training_mode.correct(),
            model_facts=facts,
        )

    def _take_random_before(self, kind: PassKind) -> RandomSnapshot:
        may_wait = self._cuda_device is not None and self._keeps_random_after
        host_states = self._host_states.begin(kind, may_wait=may_wait)
        return RandomSnapshot(host_states, read_cuda_state(self._cuda_device))

    def take_random_after(self) -> GeneratorSnapshot | None:
        """Take the states of torch's generators where the forward of the latest pass ends.

        They come first of all that is kept at the end, and a backward, which sets states back under activation
        checkpointing, comes later. None if the pass is not recorded.
        """
        keeps_states, self._keeps_random_after = self._keeps_random_after, False
        if not keeps_states:
            return None
        after = take_generator_snapshot(self._cuda_device)
        self._host_states_before = self._host_states.end(after.cpu)
        return after

    def take_logits(self, output: Any) -> PassLogits | None:
        """Find the logits of the latest pass, which ends with `output`; None if there are none that predict a token.

        A failure is one warning, and the end of what is made of logits; the pass is still recorded.
        """
        ids_BS, self._ids_BS = self._ids_BS, None
        if ids_BS is None or not self._keeps_log_probs:
            return None
        try:
            logits = find_logits(output, ids_BS, self._vocabulary_sizes)
            if logits is None or is_capturing_graph({"logits": logits}):
                return None
            log_probs = compute_token_log_probs(logits, ids_BS)
            return None if log_probs is None else PassLogits(logits=logits, ids=ids_BS, log_probs=log_probs)
        except Exception as error:
            self._keeps_log_probs = False
            warn(f"capture: no log-probs of tokens are kept from here on: {type(error).__name__}: {error}")
            return None

    def choose_where_to_sample(self) -> None:
        self.samples_at_end = self._sampler is not None and self._sampler.is_same_after_forward

    def _sample_weights(self, trains: bool) -> RawSamples | None:
        """Take samples of the weights of a recorded pass, on their device.

        A failure is one warning, and the end of samples; the pass is still recorded.
        """
        if self._sampler is None:
            return None
        begins_window = trains and self.window is not None and self.window.keep_pass()
        try:
            return self._sampler.sample_weights(begins_window=begins_window)
        except Exception as error:
            self._sampler = self.window = None
            warn(f"capture: no samples of the weights are kept from here on: {type(error).__name__}: {error}")
            return None

    def _make_origin(self, rank: int, world_size: int, forward: int, monotonic_ns: int) -> Origin:
        return Origin(
            source="",
            rank=rank,
            world_size=world_size,
            step=forward,
            time=self._clock.format_time(monotonic_ns),
            model_name=self._model_name,
            versions=read_versions(),
        )


class ComputeDtypeProbe:
    """Finds the dtype that the model computes in, at the first linear layer that runs in one pass of each kind.

    It hooks the linear layers for that pass alone. Compiled layers get no hooks: the hooks would be compiled too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._settings_by_kind: dict[tuple[Any, ...], dict[str, str]] = {}
        # The kind of the pass that the hooks look at now, and what they have seen.
        self._kind: tuple[Any, ...] | None = None
        self._settings: dict[str, str] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, kind: tuple[Any, ...]) -> dict[str, str]:
        """Begin a pass. Returns the settings of its kind, if these are known; otherwise `end` returns them."""
        if self._kind is None and (settings := self._settings_by_kind.get(kind)) is not None:
            return settings
        self.end()
        model = self._model()
        if kind not in self._settings_by_kind and model is not None:
            self._kind, self._settings = kind, {}
            self._handles = [
                module.register_forward_pre_hook(self._look_at_input) for module in _list_linear_layers(model)
            ]
        return self._settings_by_kind.get(kind, {})

    def end(self) -> dict[str, str]:
        """End a pass. Returns the settings that it has shown, if it was looked at."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._kind is None:
            return {}
        self._settings_by_kind[self._kind] = self._settings
        self._kind = None
        return self._settings

    def _look_at_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        tensor = args[0] if args else None
        if self._settings or torch.compiler.is_compiling() or not isinstance(tensor, Tensor):
            return
        autocast = read_autocast_dtype(tensor.device.type)
        dtype = str(tensor.dtype).removeprefix("torch.") if autocast == "off" else autocast
        self._settings = {"autocast": autocast, "computed_in": dtype}


def _list_linear_layers(model: nn.Module) -> Iterator[nn.Module]:
    """List the linear layers inside `model`. `model` itself is left out: its hooks are being called now."""
    for child in model.children():
        if is_compiled(child):
            continue
        if isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D":
            yield child
        yield from _list_linear_layers(child)
