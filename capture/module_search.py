"""Find the module to record by watching which modules a job calls, from the outermost in.

A search replaces `torch.nn.Module.__call__` and restores it once it has found a module: so it costs nothing from then
on, and the very call by which it found the module is recorded. torch's global forward hooks could do neither: they get
no keyword arguments, a hook that they register misses the call under way, and torch.compile warns of them.
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

_searches: list["ModuleSearch"] = []
_call_module: Callable[..., Any] = nn.Module.__call__


class ModuleSearch:
    """Watches calls until `accepts` is true of one, and gives its module to `on_found` before the call is made.

    accepts   is called at each call of a module outside compiled code, with module, arguments and keyword arguments
    on_found  is called with the module

    An exception of either is one warning, and the end of the search.
    """

    def __init__(
        self,
        accepts: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], bool],
        on_found: Callable[[nn.Module], object],
    ) -> None:
        self._accepts = accepts
        self._on_found = on_found
        _searches.append(self)
        nn.Module.__call__ = _call_and_look  # type: ignore[method-assign]

    def end(self) -> None:
        """Stop watching. A second call does nothing."""
        if self in _searches:
            _searches.remove(self)
        # Where somebody has wrapped `_call_and_look` meanwhile, it stays: to restore torch's would remove the wrapper.
        # Without searches it only passes calls on.
        if not _searches and nn.Module.__call__ is _call_and_look:
            nn.Module.__call__ = _call_module  # type: ignore[method-assign]

    def look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The job is worth more than its record: whatever fails here ends the search and not the job.
        try:
            if self._accepts(module, args, kwargs):
                self.end()
                self._on_found(module)
        except Exception as error:
            self.end()
            warn(f"capture stops, the job goes on: {type(error).__name__}: {error}")


def _call_and_look(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        for search in tuple(_searches):
            search.look(module, args, kwargs)
    return _call_module(module, *args, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnnamedTokensModule:
    """A module that is trained on rows of integers, and whose forward gives them other names than a causal LM's.

    arguments   dtype and shape of its tensors of integers, by the forward's names
    suggestion  a value for --arguments
    """

    name: str
    arguments: Mapping[str, str]
    suggestion: str

    def explain(self) -> str:
        """Say why the module was passed over, and what may be typed."""
        arguments = ", ".join(f"{name} ({description})" for name, description in self.arguments.items())
        return (
            f"{self.name} was trained, and its forward has no argument input_ids; it was given {arguments}. "
            f"Try, if these are what it says: capture run --arguments {self.suggestion} ..."
        )


class TrainedLanguageModel:
    """Tells whether a call is that of the outermost module that trains a causal language model.

    Such a module is called with token ids or embeddings and autograd on, has a parameter to train, and is or holds a
    module with a model's config and an output head. Reward models have no such head; reference models and rollouts run
    without autograd. Where `arguments` say which argument the token ids are, neither config nor head is needed.

    arguments                names that a capture has for arguments, by the forward's names
    called_without_autograd  class names of the language models that were passed over since autograd was off
    unnamed_tokens           the first module that was passed over for the names of its arguments
    """

    def __init__(self, arguments: Mapping[str, str] | None = None) -> None:
        self.called_without_autograd: set[str] = set()
        self.unnamed_tokens: UnnamedTokensModule | None = None
        self._arguments = dict(arguments or {})

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not _may_hold_tokens(args, kwargs):
            return False
        if not self._arguments and not any(is_language_model(inner) for inner in module.modules()):
            self._remember_unnamed_tokens(module, args, kwargs)
            return False
        if not TOKEN_NAMES & {self._arguments.get(name, name) for name in _select_tensors(module, args, kwargs)}:
            return False
        if not torch.is_grad_enabled():
            self.called_without_autograd.add(type(module).__name__)
            return False
        return _is_trained(module)

    def _remember_unnamed_tokens(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_of_torch = type(module).__module__.startswith("torch.")
        if self.unnamed_tokens is not None or not torch.is_grad_enabled() or is_of_torch:
            return
        rows = {
            name: tensor
            for name, tensor in _select_tensors(module, args, kwargs).items()
            if tensor.ndim == 2 and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
        }
        if not rows or TOKEN_NAMES & rows.keys() or not _is_trained(module):
            return
        self.unnamed_tokens = UnnamedTokensModule(
            name=type(module).__name__,
            arguments={
                name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                for name, tensor in rows.items()
            },
            suggestion=_suggest_arguments(rows),
        )


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _suggest_arguments(rows: Mapping[str, Tensor]) -> str:
    """Say which arguments may be token ids and labels: the first, and the next one of its shape."""
    (ids_name, ids_BS), *others = rows.items()
    labels = [(name, tensor) for name, tensor in others if tensor.shape == ids_BS.shape]
    if not labels:
        return f"{ids_name}=input_ids"
    labels_name, labels_BS = labels[0]
    is_shifted = torch.equal(labels_BS[:, :-1], ids_BS[:, 1:])
    return f"{ids_name}=input_ids,{labels_name}={'shift_labels' if is_shifted else 'labels'}"


def is_language_model(module: nn.Module) -> bool:
    """Tell whether a module has a config of its own with a model's type, and an output head.

    A module without a method that returns the head, as transformers' models have one, needs none.
    """
    if not isinstance(getattr(vars(module).get("config"), "model_type", None), str):
        return False
    head = getattr(module, "get_output_embeddings", None)
    return head is None or head() is not None


def has_class_name(module: nn.Module, name: str) -> bool:
    """Tell whether `name` is that of the module's class or of a base class, bare or with its package."""
    return any(
        name in (class_.__name__, f"{class_.__module__}.{class_.__qualname__}") for class_ in type(module).__mro__
    )


def _select_tensors(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among the arguments, by the forward's names."""
    try:
        return sort_arguments(find_forward_signature(module), args, kwargs).tensors
    except TypeError:
        # The module's own forward will refuse such a call.
        return {}


def _may_hold_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell quickly whether a tensor of rows and tokens is among the arguments."""
    return any(isinstance(value, torch.Tensor) and value.ndim >= 2 for value in (*args, *kwargs.values()))
