"""Find the module to record by watching which modules a job calls, from the outermost in.

A search replaces `torch.nn.Module.__call__` and restores it once it has found a module: so it costs nothing from then
on, and the very call that was found is recorded. torch's global forward hooks could do neither: they get no keyword
arguments, a hook that they register misses the call under way, and torch.compile warns of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from capture.file_format.micro_batch import EMBEDDINGS_NAME, ID_NAMES
from capture.record.background_writer import warn
from capture.record.call_arguments import find_forward_signature, sort_arguments

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


@dataclass(frozen=True, kw_only=True, slots=True)
class AlikeModule:
    """A module that is trained on rows of integers, and whose forward gives them other names than a causal LM's.

    arguments   tensors of integers, by the forward's names: dtype and shape
    suggestion  what --arguments may say
    """

    name: str
    arguments: Mapping[str, str]
    suggestion: str

    def why_not(self) -> str:
        seen = ", ".join(f"{name} ({what})" for name, what in self.arguments.items())
        return (
            f"{self.name} was trained, and its forward has no argument input_ids; it was given {seen}. "
            f"Try, if these are what it says: capture run --arguments {self.suggestion} ..."
        )


class TrainedLanguageModel:
    """Tells whether a call is that of the outermost module that trains a causal language model.

    Such a module is called with token ids or embeddings and autograd on, has a parameter to train, and is or holds a
    module with a model's config and an output head. Reward models have no such head; reference models and rollouts run
    without autograd. Where `arguments` say which argument the token ids are, no config and head are asked for.

    arguments                the forward's names to those of a capture
    called_without_autograd  names the language models that were passed over for that
    alike                    the first module that was passed over for the names of its arguments
    """

    def __init__(self, arguments: Mapping[str, str] | None = None) -> None:
        self.called_without_autograd: set[str] = set()
        self.alike: AlikeModule | None = None
        self._arguments = dict(arguments or {})

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not _may_hold_tokens(args, kwargs):
            return False
        if not self._arguments and not any(is_language_model(inner) for inner in module.modules()):
            self._see_alike(module, args, kwargs)
            return False
        if not TOKEN_NAMES & {self._arguments.get(name, name) for name in _tensors(module, args, kwargs)}:
            return False
        if not torch.is_grad_enabled():
            self.called_without_autograd.add(type(module).__name__)
            return False
        return _is_trained(module)

    def _see_alike(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.alike is not None or not torch.is_grad_enabled() or type(module).__module__.startswith("torch."):
            return
        rows = {
            name: tensor
            for name, tensor in _tensors(module, args, kwargs).items()
            if tensor.ndim == 2 and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
        }
        if not rows or TOKEN_NAMES & rows.keys() or not _is_trained(module):
            return
        self.alike = AlikeModule(
            name=type(module).__name__,
            arguments={
                name: f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for name, one in rows.items()
            },
            suggestion=_suggestion(rows),
        )


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _suggestion(rows: Mapping[str, Tensor]) -> str:
    """Say which arguments may be token ids and labels: the first, and the next one of its shape."""
    (first, ids_BS), *others = rows.items()
    labels = next((pair for pair in others if pair[1].shape == ids_BS.shape), None)
    if labels is None:
        return f"{first}=input_ids"
    is_shifted = torch.equal(labels[1][:, :-1], ids_BS[:, 1:])
    return f"{first}=input_ids,{labels[0]}={'shift_labels' if is_shifted else 'labels'}"


def is_language_model(module: nn.Module) -> bool:
    """Tell whether it has a config of its own with a model's type, and an output head, if it can be asked for one."""
    if not isinstance(getattr(vars(module).get("config"), "model_type", None), str):
        return False
    head = getattr(module, "get_output_embeddings", None)
    return head is None or head() is not None


def is_called(name: str, module: nn.Module) -> bool:
    """Tell whether `name` is that of the module's class or of a base class, bare or with its package."""
    return any(name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}") for kind in type(module).__mro__)


def _tensors(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among the arguments, by the forward's names."""
    try:
        return sort_arguments(find_forward_signature(module), args, kwargs).tensors
    except TypeError:  # a call that the module's own forward will refuse
        return {}


def _may_hold_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell quickly whether a tensor of rows and tokens is among the arguments."""
    return any(isinstance(value, torch.Tensor) and value.ndim >= 2 for value in (*args, *kwargs.values()))
