"""Find out on a small copy of a model what it does to its head's logits, and prove that chunks give the same numbers.

The copy is that of packing_probe.py, fed one document. What it does after its head is watched: a model that does more
than apply functions of each logit by itself keeps whole logits, and so does one whose log-probs or gradients come out
different in chunks.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from actor_init.action_log_probs import action_log_probs
from actor_init.adapters import Adapter, add_adapter
from actor_init.declarations.backends import find_backend_declaration
from actor_init.head.head_patch import find_head
from actor_init.inputs.packing import prepare_inputs
from actor_init.model import ModelSource, build_on_meta
from actor_init.model_form import FUNCTIONS, HeadForm, LogitStep
from actor_init.probe.packing_probe import (
    build_small_model,
    compute_gradients,
    compute_relative_error,
    make_one_document,
)
from actor_init.probe.small_config import VOCABULARY, make_small_configs
from actor_init.spec import ActorSpec, Compile, Head

# Relative to the norm. fp32's rounding gives up to 4e-7, a logit scale that is left out 0.1 or more.
BOUND = 1e-4
SEED = 1
NUM_CHUNKS = 3
# Steps that change no logit, such as a scale of 1.
IDENTITY_STEPS = [LogitStep(function=name, numbers=(number,)) for name, number in (("mul", 1), ("div", 1), ("add", 0))]


class NotInChunksError(Exception):
    """Raised for a model whose log-probs cannot be computed from its head alone. The message says why."""


def probe_head(config: PretrainedConfig, device: torch.device) -> HeadForm:
    """Return the form of a model's head; whole logits, with the reason, where chunks are not proved right."""
    reason = ""
    for small in make_small_configs(config):
        try:
            model = build_small_model(small, "eager", SEED, device)
        # A class checks its config itself, and raises any type.
        except Exception as error:
            reason = reason or f"no small copy of {config.model_type} can be built: {_summarise(error)}"
            continue
        try:
            return _prove_chunks(model, device)
        except NotInChunksError as error:
            return HeadForm(kind=Head.WHOLE, why=str(error))
        # The model's layers raise any type.
        except Exception as error:
            reason = reason or f"a small copy of {config.model_type} does not run: {_summarise(error)}"
    return HeadForm(kind=Head.WHOLE, why=reason)


def explain_whole_head(spec: ActorSpec, source: ModelSource) -> str:
    """Return why a model has whole logits, before its small copy is asked; empty if nothing is known to need them."""
    if spec.has_user_model:
        return "a user's model"
    if spec.compile is Compile.DEEPCOMPILE:
        return "DeepCompile's graph is the whole model"
    if spec.parallel.tp > 1 and not find_backend_declaration(spec.backend).splits_head:
        return f"{spec.backend} gives every tp rank the whole vocabulary"
    return _explain_adapted_head(source.config, source.adapter)


def _explain_adapted_head(config: PretrainedConfig, adapter: Adapter | None) -> str:
    if adapter is None:
        return ""
    model = build_on_meta(config, attention="eager", dtype=torch.float32)
    add_adapter(model, adapter)
    return _explain_other_head(find_head(model))


def _explain_other_head(head: nn.Module | None) -> str:
    if head is None:
        return "the model names no head"
    kind = type(head)
    return "" if kind is nn.Linear else f"the head is {kind.__module__.partition('.')[0]}'s {kind.__name__}"


def _prove_chunks(model: PreTrainedModel, device: torch.device) -> HeadForm:
    """Return the form, with logits whole and in chunks compared. Raises NotInChunksError, or what the model raises."""
    head = find_head(model)
    if why := _explain_other_head(head):
        raise NotInChunksError(why)
    assert head is not None
    inputs = prepare_inputs(make_one_document(), packing=False).to(device)
    with _HeadWatch(head) as watch:
        whole_BA = action_log_probs(_WatchedModel(model, watch), inputs)
    expected = {"": whole_BA.detach(), **compute_gradients(model, whole_BA.flatten())}
    chunk_bytes = VOCABULARY * whole_BA.element_size() * -(-whole_BA.numel() // NUM_CHUNKS)
    form = HeadForm(steps=watch.find_steps(), chunk_bytes=chunk_bytes)
    chunked_BA = action_log_probs(model, replace(inputs, head=form))
    actual = {"": chunked_BA.detach(), **compute_gradients(model, chunked_BA.flatten())}
    error = compute_relative_error(actual, expected)
    if error > BOUND:
        raise NotInChunksError(f"a small copy's numbers are {error:.2g} off in chunks")
    return replace(form, chunk_bytes=None)


class _HeadWatch(AbstractContextManager["_HeadWatch"]):
    """Record what is done to the output of a head, between its call and what the model returns as logits."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        self._mode = _FunctionRecorder()

    def __enter__(self) -> "_HeadWatch":
        self._handle = self._head.register_forward_hook(self._record_output)
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()
        self._mode.stop()

    def _record_output(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._mode.start(output)

    def record_logits(self, logits: Tensor) -> None:
        self._mode.stop()
        self.logits = logits

    def find_steps(self) -> tuple[LogitStep, ...]:
        """Return the functions between head and logits. Raises NotInChunksError for one that is not known."""
        return self._mode.find_steps(self.logits)


class _WatchedModel:
    """Call a model, and tell the watch which logits it returned."""

    def __init__(self, model: PreTrainedModel, watch: _HeadWatch) -> None:
        self._model, self._watch = model, watch

    def __call__(self, **arguments: Any) -> Any:
        output = self._model(**arguments)
        self._watch.record_logits(output.logits)
        return output


class _FunctionRecorder(TorchFunctionMode):
    """Follow one tensor through torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self._is_on = False
        self._num_calls = 0
        # The steps from the head to a tensor, by the tensor's id. The tensors are kept alive, so that no other gets
        # their id.
        self._steps: dict[int, tuple[LogitStep, ...]] = {}
        self._live_tensors: list[Tensor] = []
        self._unknown: list[str] = []

    def start(self, output: Tensor) -> None:
        self._num_calls += 1
        if not self._is_on:
            self._is_on = True
            self._remember(output, ())
            self.__enter__()

    def stop(self) -> None:
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)

    def find_steps(self, logits: Tensor) -> tuple[LogitStep, ...]:
        if self._num_calls != 1:
            raise NotInChunksError(f"the model calls its head {self._num_calls} times")
        if self._unknown or id(logits) not in self._steps:
            what = ", ".join(dict.fromkeys(self._unknown)) or "something that was not seen"
            raise NotInChunksError(f"the model does {what} with its head's logits")
        return self._steps[id(logits)]

    def _remember(self, tensor: Tensor, steps: tuple[LogitStep, ...]) -> None:
        self._steps[id(tensor)] = steps
        self._live_tensors.append(tensor)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = str(getattr(func, "__name__", func))
        if name != "__get__" and any(id(argument) in self._steps for argument in (*args, *(kwargs or {}).values())):
            self._follow(name, tuple(args), dict(kwargs or {}), output)
        return output

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if name == "contiguous" and id(args[0]) in self._steps:
            self._remember(output, self._steps[id(args[0])])
            return
        function, numbers = name.removesuffix("_"), args[1:]
        is_plain = all(type(number) in (int, float) for number in numbers) and not kwargs
        if is_plain and function in FUNCTIONS and id(args[0]) in self._steps:
            steps, step = self._steps[id(args[0])], LogitStep(function=function, numbers=tuple(map(float, numbers)))
            self._remember(output, steps if step in IDENTITY_STEPS else (*steps, step))
        elif isinstance(output, Tensor) or output is None:
            self._unknown.append(name)


def _summarise(error: Exception) -> str:
    first = " ".join(str(error).split()).split(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {first}"
