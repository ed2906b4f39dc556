"""Take a forward's arguments apart by name: tensors, plain call facts, and what cannot be kept.

A tensor inside a list, tuple or dict gets a dotted name: `position_embeddings.0`.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from capture.file_format.safe_unpickler import MAX_DEPTH, copy_plain, type_name
from capture.file_format.tensor_codec import can_encode

_WRAPPED_NAMES = ("module", "_orig_mod", "model")  # DDP and DeepSpeed, torch.compile, OpenRLHF and PEFT
_CACHE_NAMES = ("past_key_values", "cache_params")

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallArguments:
    """A forward's arguments by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # the job's own, not copied
    call_facts: dict[str, object] = field(default_factory=dict)  # copied
    left_out: dict[str, str] = field(default_factory=dict)  # name to type
    empty_caches: set[str] = field(default_factory=set)  # names of those left out that hold no token yet

    def renamed(self, names: Mapping[str, str]) -> "CallArguments":
        """Return the same with other names where `names` has them."""

        def named(values: Mapping[str, ValueT]) -> dict[str, ValueT]:
            return {names.get(name, name): value for name, value in values.items()}

        return CallArguments(
            tensors=named(self.tensors),
            call_facts=named(self.call_facts),
            left_out=named(self.left_out),
            empty_caches={names.get(name, name) for name in self.empty_caches},
        )

    def continues_a_cache(self, *, trains: bool) -> bool:
        """Tell whether the result depends on keys and values that are not among the arguments.

        A training pass that is given an empty cache is as any other; with autograd off its tokens begin a generation.
        """
        caches = {name for name in _CACHE_NAMES if name in self.left_out}
        return bool(caches - self.empty_caches if trains else caches)


def check_argument_names(arguments: Mapping[str, str] | None) -> dict[str, str]:
    """Check what maps a forward's names to those of a capture, such as `{"idx": "input_ids"}`.

    Raises TypeError for anything else than names, ValueError where two arguments would get one name.
    """
    names = dict(arguments or {})
    if not all(isinstance(name, str) and name.isidentifier() for pair in names.items() for name in pair):
        raise TypeError(f'arguments must map names to names, as {{"idx": "input_ids"}}, not {arguments!r}')
    if len(set(names.values())) < len(names):
        raise ValueError(f"arguments gives two arguments one name: {names}")
    return names


def find_forward_signature(model: nn.Module) -> inspect.Signature:
    """Find the signature that names the model's arguments: a wrapper's own forward takes `*inputs, **kwargs`."""
    module: nn.Module | None = model
    while module is not None:
        signature = inspect.signature(module.forward)
        if not any(kind.kind is inspect.Parameter.VAR_POSITIONAL for kind in signature.parameters.values()):
            return signature
        inner = (getattr(module, name, None) for name in _WRAPPED_NAMES)
        module = next((candidate for candidate in inner if isinstance(candidate, nn.Module)), None)
    return inspect.signature(model.forward)


def sort_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> CallArguments:
    """Sort the arguments of a call. Raises TypeError where positional arguments do not fit the signature."""
    taken = CallArguments()
    if not args:  # every argument has a name: without binding it is twice as quick
        for name, value in kwargs.items():
            _sort_in(taken, name, value, MAX_DEPTH)
        return taken
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            for key, item in value.items():
                _sort_in(taken, key, item, MAX_DEPTH)
        else:
            _sort_in(taken, name, value, MAX_DEPTH)
    return taken


def _holds_a_tensor(value: Any, max_depth: int) -> bool:
    if isinstance(value, Tensor):
        return True
    if not max_depth or type(value) not in (list, tuple, dict):
        return False
    return any(_holds_a_tensor(item, max_depth - 1) for item in (value.values() if isinstance(value, dict) else value))


def _is_empty(cache: Any) -> bool:
    """Tell whether a cache says that it holds no token. A length that lies on a device is not waited for."""
    try:
        length = cache.get_seq_length()
    except Exception:  # a cache of states alone, or of another library
        return False
    return type(length) is int and length == 0


def _sort_in(taken: CallArguments, name: str, value: Any, max_depth: int) -> None:
    if name in _CACHE_NAMES and value is not None:
        taken.left_out[name] = type_name(value)
        taken.empty_caches.update({name} if _is_empty(value) else ())
        return
    if isinstance(value, Tensor) and can_encode(value):
        taken.tensors[name] = value
        return
    if max_depth and type(value) in (list, tuple, dict) and _holds_a_tensor(value, max_depth):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _sort_in(taken, f"{name}.{key}", item, max_depth - 1)
        return
    try:
        taken.call_facts[name] = copy_plain(value)
    except TypeError:
        taken.left_out[name] = type_name(value)


# Hook a job's model, to see where each of its passes begins and ends.

Begins = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
Ends = Callable[[Any, BaseException | None], None]


def _nobody(*_: Any) -> None:
    pass


class ForwardHooks:
    """Calls `begins` with the module and its arguments, and `ends` with its output or what the forward raised.

    Not passes of their own are a forward inside another one, a forward inside a backward, which is a checkpoint's
    re-run, and one that a compiler traces. Passes of a forked child are not seen, nor those of a copy of the model
    (deepcopy, pickle): it is another model, whose hooks have nobody to call.
    """

    def __init__(self, begins: Begins = _nobody, ends: Ends = _nobody) -> None:
        self._begins = begins
        self._ends = ends
        self._process = os.getpid()
        self._depth = 0
        self._error_before: BaseException | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __reduce__(self) -> tuple[type["ForwardHooks"], tuple[()]]:
        return type(self), ()

    def attach(self, model: nn.Module) -> None:
        """Hook `model`, in front of other hooks, such as FSDP's, that change the arguments."""
        self._handles = [
            model.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
            model.register_forward_hook(self.after_forward, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._hears():
            return
        self._depth += 1
        if self._depth == 1:
            self._error_before = sys.exc_info()[1]
            self._begins(module, args, kwargs)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._hears() or not self._depth:
            return
        self._depth -= 1
        if self._depth:
            return
        error, before = sys.exc_info()[1], self._error_before
        self._error_before = None
        self._ends(output, None if error is before else error)

    def _hears(self) -> bool:
        return not (torch.compiler.is_compiling() or is_in_backward() or os.getpid() != self._process)


def is_in_backward() -> bool:
    """Tell whether a backward is running: then a forward is a checkpoint's re-run of one that was seen.

    torch.utils.checkpoint asks the same way.
    """
    return bool(torch._C._current_graph_task_id() != -1)
