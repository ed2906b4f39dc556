"""Take a forward's arguments apart by name: tensors, plain call facts, and what cannot be kept.

A tensor inside a list, tuple or dict gets a dotted name: `position_embeddings.0`.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn

from capture.file_format.safe_unpickler import MAX_DEPTH, plain_copy, type_name
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


def checked_names(arguments: Mapping[str, str] | None) -> dict[str, str]:
    """Check what maps a forward's names to those of a capture, such as `{"idx": "input_ids"}`.

    Raises TypeError for anything else than names, ValueError where two arguments would get one name.
    """
    names = dict(arguments or {})
    if not all(isinstance(name, str) and name.isidentifier() for pair in names.items() for name in pair):
        raise TypeError(f'arguments must map names to names, as {{"idx": "input_ids"}}, not {arguments!r}')
    if len(set(names.values())) < len(names):
        raise ValueError(f"arguments gives two arguments one name: {names}")
    return names


def forward_signature(model: nn.Module) -> inspect.Signature:
    """Find the signature that names the model's arguments: a wrapper's own forward takes `*inputs, **kwargs`."""
    module: nn.Module | None = model
    while module is not None:
        signature = inspect.signature(module.forward)
        if not any(kind.kind is inspect.Parameter.VAR_POSITIONAL for kind in signature.parameters.values()):
            return signature
        inner = (getattr(module, name, None) for name in _WRAPPED_NAMES)
        module = next((candidate for candidate in inner if isinstance(candidate, nn.Module)), None)
    return inspect.signature(model.forward)


def take_apart(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> CallArguments:
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
        taken.call_facts[name] = plain_copy(value)
    except TypeError:
        taken.left_out[name] = type_name(value)
