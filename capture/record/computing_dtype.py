"""What a model computes in, seen where it computes: a wrapper may turn autocast on inside, or cast what it is given."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from capture.record.job_facts import autocast_on


class ComputingDtype:
    """Looks at the first linear layer that runs in a pass, for one pass of each kind; its hooks go with the pass.

    Compiled layers are left alone: a hook in them would be compiled too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: dict[tuple[Any, ...], dict[str, str]] = {}
        self._kind: tuple[Any, ...] | None = None  # that is looked at in this pass
        self._found: dict[str, str] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, kind: tuple[Any, ...]) -> dict[str, str]:
        """What is known of such passes. If nothing is, `end` will say."""
        self.end()
        model = self._model()
        if kind not in self._known and model is not None:
            self._kind, self._found = kind, {}
            self._handles = [module.register_forward_pre_hook(self._look) for module in _linear_layers(model)]
        return self._known.get(kind, {})

    def end(self) -> dict[str, str]:
        """What was found in the pass that ends, if it was looked at."""
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
    """But `model` itself, whose hooks are being called."""
    for child in model.children():
        if is_compiled(child):
            continue
        if isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D":
            yield child
        yield from _linear_layers(child)
