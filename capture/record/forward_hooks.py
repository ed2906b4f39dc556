"""Hook a job's model, to see where each of its passes begins and ends."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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
