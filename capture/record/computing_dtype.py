"""Find the dtype that a model computes in by looking inside: a wrapper may turn autocast on, or cast its inputs."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from capture.record.job_facts import autocast_on


class ComputingDtype:
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
        autocast = autocast_on(given.device.type)
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
