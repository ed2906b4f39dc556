"""Sort a forward's arguments, by name, into tensors, plain facts of the call, and what cannot be kept.

A tensor inside a list, tuple or dict gets a dotted name: `position_embeddings.0`.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from capture.file_format.safe_unpickler import MAX_DEPTH, copy_plain, type_name
from capture.file_format.tensor_codec import can_encode

# Attributes under which wrappers hold the module that they wrap: DDP and DeepSpeed; torch.compile; OpenRLHF and PEFT.
_WRAPPED_NAMES = ("module", "_orig_mod", "model")
_CACHE_NAMES = ("past_key_values", "cache_params")

ValueT = TypeVar("ValueT")


class CallArguments(NamedTuple):
    """A forward's arguments by name.

    tensors       the job's own tensors, not copied
    call_facts    copies of plain values
    left_out      names of what cannot be kept, with the type
    empty_caches  those names in `left_out` that are key-value caches without a token
    """

    tensors: dict[str, Tensor]
    call_facts: dict[str, object]
    left_out: dict[str, str]
    empty_caches: set[str]

    def rename(self, names: Mapping[str, str]) -> "CallArguments":
        """Return the same arguments with new names, where `names` maps old ones to new ones."""

        def rename_keys(values: Mapping[str, ValueT]) -> dict[str, ValueT]:
            return {names.get(name, name): value for name, value in values.items()}

        return CallArguments(
            tensors=rename_keys(self.tensors),
            call_facts=rename_keys(self.call_facts),
            left_out=rename_keys(self.left_out),
            empty_caches={names.get(name, name) for name in self.empty_caches},
        )

    def depends_on_cache(self, *, trains: bool) -> bool:
        """Tell whether the result depends on keys and values that are not among the arguments.

        A training pass that is given an empty cache is like any other. With autograd off, an empty cache begins a
        generation, whose later passes depend on this one.
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
        if not any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
            return signature
        candidates = (getattr(module, name, None) for name in _WRAPPED_NAMES)
        module = next((candidate for candidate in candidates if isinstance(candidate, nn.Module)), None)
    return inspect.signature(model.forward)


def sort_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> CallArguments:
    """Sort the arguments of a call. Raises TypeError where positional arguments do not fit the signature."""
    arguments = CallArguments(tensors={}, call_facts={}, left_out={}, empty_caches=set())
    # Where every argument has a name already, leaving out the binding takes half the time.
    if not args:
        for name, value in kwargs.items():
            # Most arguments are such tensors or flags, and this costs a third of the call.
            if type(value) is Tensor and name not in _CACHE_NAMES and can_encode(value):
                arguments.tensors[name] = value
            elif value is None or (type(value) is bool and name not in _CACHE_NAMES):
                arguments.call_facts[name] = value
            else:
                _add_argument(arguments, name, value, MAX_DEPTH)
        return arguments
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            for keyword, keyword_value in value.items():
                _add_argument(arguments, keyword, keyword_value, MAX_DEPTH)
        else:
            _add_argument(arguments, name, value, MAX_DEPTH)
    return arguments


def _add_argument(arguments: CallArguments, name: str, value: Any, max_depth: int) -> None:
    """Add a value to the tensors, the facts or what is left out; of a list, tuple or dict with tensors, each member."""
    if name in _CACHE_NAMES and value is not None:
        arguments.left_out[name] = type_name(value)
        if _is_empty_cache(value):
            arguments.empty_caches.add(name)
        return
    if isinstance(value, Tensor) and can_encode(value):
        arguments.tensors[name] = value
        return
    if max_depth and type(value) in (list, tuple, dict) and _has_tensor(value, max_depth):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            _add_argument(arguments, f"{name}.{key}", member, max_depth - 1)
        return
    try:
        arguments.call_facts[name] = copy_plain(value)
    except TypeError:
        arguments.left_out[name] = type_name(value)


def _has_tensor(value: Any, max_depth: int) -> bool:
    if isinstance(value, Tensor):
        return True
    if not max_depth or type(value) not in (list, tuple, dict):
        return False
    members: Iterable[Any] = value.values() if isinstance(value, dict) else value
    return any(_has_tensor(member, max_depth - 1) for member in members)


def _is_empty_cache(cache: Any) -> bool:
    """Tell whether a cache says that it holds no token. A length that lies on a device is not waited for."""
    # Caches of other libraries, or of states without tokens, may lack the method or raise anything in it.
    try:
        length = cache.get_seq_length()
    except Exception:
        return False
    return type(length) is int and length == 0
