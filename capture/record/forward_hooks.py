"""Hook a job's model, to see where the forward of each of its passes begins and ends.

A pass begins with a forward that the job itself calls. torch calls a module's hooks in other forwards too, which are no
passes:

* a forward inside another forward of the same model
* a forward inside a backward: activation checkpointing runs a part of the model again there
* a forward that a compiler traces
* a forward in a forked child process, such as a data loader: the recording belongs to the parent
"""

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

BeginCallback = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
EndCallback = Callable[[Any, BaseException | None], None]


def _do_nothing(*_: Any) -> None:
    pass


class ForwardHooks:
    """Calls `on_begin` before each forward that the job itself calls, and `on_end` after that forward.

    If a KeyboardInterrupt, or something else that is no `Exception`, ends a forward, torch calls no hook after it, and
    so `on_end` is not called.

    on_begin  is given the module, its positional arguments and its keyword arguments
    on_end    is given an output and an error. The output is None if the forward raised. The error was raised by the
              forward, or by a hook of the job's that ran before `on_end`; None if nothing was raised
    """

    def __init__(self, on_begin: BeginCallback = _do_nothing, on_end: EndCallback = _do_nothing) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._process_id = os.getpid()
        # How many forwards of the model are running, one inside the other, and the frame from which torch called
        # `before_forward` for the outermost one (`Module._call_impl`, or its inner function `inner`).
        self._depth = 0
        self._outermost_frame: FrameType | None = None
        # The exception that the job was handling when the pass began, if it called the model in an `except` block.
        self._earlier_error: BaseException | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __reduce__(self) -> tuple[type["ForwardHooks"], tuple[()]]:
        """Copy hooks without their callbacks.

        deepcopy and pickle copy a model's hooks with it, and the copy is another model, which nobody records.
        """
        return type(self), ()

    def attach(self, model: nn.Module) -> None:
        """Hook `model`: `on_begin` is called before the hooks that `model` already has, and `on_end` after them.

        Such hooks, like FSDP's, change arguments and outputs. So `on_begin` gets the arguments as the job gave them,
        and `on_end` the output as the job gets it.
        """
        self._handles = [
            model.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
            model.register_forward_hook(self.after_forward, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._may_be_call_of_job():
            return
        # torch does not call `after_forward` where a forward raised KeyboardInterrupt, and in a notebook the process
        # goes on after that. Then `_depth` was never counted down, but the frame of the outermost forward is no longer
        # on the stack.
        if self._depth > 0 and not _is_running(self._outermost_frame):
            self._depth = 0
        self._depth += 1
        if self._depth == 1:
            self._outermost_frame = sys._getframe(1)
            self._earlier_error = sys.exc_info()[1]
            self._on_begin(module, args, kwargs)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # The depth is 0 if the hooks were attached while this forward was running: its beginning was not seen.
        if not self._may_be_call_of_job() or self._depth == 0:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        # torch gives a hook no exception. If the forward raised, torch calls this hook inside its `except` block, where
        # sys.exc_info() has the exception. If not, sys.exc_info() has what the job was handling before, or nothing.
        error, earlier_error = sys.exc_info()[1], self._earlier_error
        self._earlier_error = self._outermost_frame = None
        self._on_end(output, None if error is earlier_error else error)

    def _may_be_call_of_job(self) -> bool:
        """Tell whether this forward runs in the recording's process, outside a backward and outside a compiler.

        Then the job itself has called it, unless it is nested in another forward, which `_depth` tells.
        """
        return not (torch.compiler.is_compiling() or is_in_backward() or os.getpid() != self._process_id)


def _is_running(frame: FrameType | None) -> bool:
    """Tell whether `frame` is one of those that have called this function."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def is_in_backward() -> bool:
    """Tell whether a backward is running in this thread, by the same test as torch.utils.checkpoint."""
    return bool(torch._C._current_graph_task_id() != -1)
