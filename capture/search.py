"""Find the module to record by watching which modules a job calls, from the outermost in.

A search replaces `torch.nn.Module.__call__` and restores it once it has found a module: so it costs nothing from then
on, and the very call that was found is recorded. torch's global forward hooks could do neither: they get no keyword
arguments, a hook that they register misses the call under way, and torch.compile warns of them.
"""

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn

from capture.file_format.micro_batch import EMBEDDINGS_NAME, ID_NAMES
from capture.record.background_writer import warn
from capture.record.call_arguments import forward_signature, take_apart

TOKEN_NAMES = frozenset({*ID_NAMES, EMBEDDINGS_NAME})

_searches: list["Search"] = []
_call_module: Callable[..., Any] = nn.Module.__call__


class Search:
    """Watches calls until `is_wanted` agrees to one, and gives its module to `found` before the call is made.

    is_wanted  is asked at each call of a module outside compiled code, with module, arguments and keyword arguments
    found      is given the module

    An exception of either is one warning, and the end of the search.
    """

    def __init__(
        self,
        is_wanted: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], bool],
        found: Callable[[nn.Module], object],
    ) -> None:
        self._is_wanted = is_wanted
        self._found = found
        _searches.append(self)
        nn.Module.__call__ = _call_and_look  # type: ignore[method-assign]

    def end(self) -> None:
        """Stop watching. A second call does nothing."""
        if self in _searches:
            _searches.remove(self)
        if (
            not _searches and nn.Module.__call__ is _call_and_look
        ):  # else somebody has wrapped ours, which only passes on
            nn.Module.__call__ = _call_module  # type: ignore[method-assign]

    def look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if self._is_wanted(module, args, kwargs):
                self.end()
                self._found(module)
        except Exception as error:  # the job is worth more than its record
            self.end()
            warn(f"capture stops, the job goes on: {type(error).__name__}: {error}")


def _call_and_look(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        for search in tuple(_searches):
            search.look(module, args, kwargs)
    return _call_module(module, *args, **kwargs)


class TrainedLanguageModel:
    """Tells whether a call is that of the outermost module that trains a causal language model.

    Such a module is called with token ids or embeddings and autograd on, has a parameter to train, and is or holds a
    module with a model's config and an output head. Reward models have no such head; reference models and rollouts run
    without autograd. `called_without_autograd` names the language models that were passed over for that.
    """

    def __init__(self) -> None:
        self.called_without_autograd: set[str] = set()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not _may_hold_tokens(args, kwargs) or not any(is_language_model(inner) for inner in module.modules()):
            return False
        if not TOKEN_NAMES & _names_of_tensors(module, args, kwargs):
            return False
        if not torch.is_grad_enabled():
            self.called_without_autograd.add(type(module).__name__)
            return False
        return any(parameter.requires_grad for parameter in module.parameters())


def is_language_model(module: nn.Module) -> bool:
    """Tell whether it has a config of its own with a model's type, and an output head, if it can be asked for one."""
    if not isinstance(getattr(vars(module).get("config"), "model_type", None), str):
        return False
    head = getattr(module, "get_output_embeddings", None)
    return head is None or head() is not None


def is_called(name: str, module: nn.Module) -> bool:
    """Tell whether `name` is that of the module's class or of a base class, bare or with its package."""
    return any(name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}") for kind in type(module).__mro__)


def _names_of_tensors(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Set[str]:
    try:
        return take_apart(forward_signature(module), args, kwargs).tensors.keys()
    except TypeError:  # a call that the module's own forward will refuse
        return set()


def _may_hold_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell quickly whether a tensor of rows and tokens is among the arguments."""
    return any(isinstance(value, torch.Tensor) and value.ndim >= 2 for value in (*args, *kwargs.values()))
