"""Hook torch's optimizers and the clipping of gradients, to see a job's steps without code in the job.

torch has global hooks for optimizers, but none for clipping (https://github.com/pytorch/pytorch/issues/309 asked for
clipping by the optimizer). So while somebody listens, attributes of modules that clip are wrapped, and restored after:

* functions of `torch.nn.utils.clip_grad` into which torch 2.6 split `clip_grad_norm_`
  (https://github.com/pytorch/pytorch/issues/139467). It looks them up there, so a job that imported it before is seen.
* before torch 2.6 `clip_grad_norm_` itself, which does all alone. A job that imported it before is not seen, and has
  to note its norm; until a clipping is seen, gradients there count as maybe clipped (`SEES_ALL_CLIPPING`).
* the function of its own that DeepSpeed's engine clips with, which says nothing of it to others before the step
  (https://github.com/deepspeedai/DeepSpeed/pull/1292 has the norm after it).
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

SEES_ALL_CLIPPING = hasattr(nn.utils.clip_grad, "_clip_grads_with_norm_")


class OptimizerCallbacks(Protocol):
    """Is told of clipping and steps. Its methods may not raise, wait for a device, or call a collective."""

    def clips(self, parameters: Sequence[Tensor], max_norm: Any, norm: Any) -> None:
        """Gradients of these parameters will be clipped. `norm` is their norm before, or None."""

    def clipped(self, norm: Any) -> None:
        """The clipping is done, and this was the norm, if `clips` was not told it."""

    def steps(self, optimizer: Optimizer) -> None:
        """The optimizer will step."""

    def stepped(self) -> None:
        """An optimizer has stepped."""


class OptimizerHooks:
    """Tells `listener` of clipping and steps from `attach` to `remove`; those of a forked child are not seen."""

    def __init__(self, listener: OptimizerCallbacks) -> None:
        self.listener = listener
        self._process = os.getpid()
        self._handle: Any = None
        self._handle_after: Any = None

    def attach(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self._before_step)
        self._handle_after = register_optimizer_step_post_hook(self._after_step)
        _listening.append(self)
        if len(_listening) == 1:
            _wrap_clipping()

    def remove(self) -> None:
        """Take the hooks off. A second call does nothing."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle_after.remove()
        self._handle = None
        _listening.remove(self)
        if not _listening:
            _unwrap_clipping()

    def hears(self) -> bool:
        return os.getpid() == self._process and not torch.compiler.is_compiling()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Tell of the step; if it is given a closure, which runs the pass, have the closure tell when it returns."""
        if not self.hears():
            return None
        if (given := _with_closure(args, kwargs, lambda: self._tell(optimizer))) is not None:
            return given
        self.listener.steps(optimizer)
        return None

    def _tell(self, optimizer: Optimizer) -> None:
        if self.hears():
            self.listener.steps(optimizer)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.hears():
            self.listener.stepped()


class RunningStepHook:
    """Tells those who attach inside a step's closure of that step, until `remove`.

    A closure is the pass, so a recording that is opened by the first pass has not seen that its step began.
    """

    def __init__(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Tell of no more steps, but for a closure that is running. A second call does nothing."""
        self._handle.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        before = tuple(_listening)

        def tell() -> None:
            for hooks in _listening:
                if hooks.hears() and not any(hooks is one for one in before):
                    hooks.listener.steps(optimizer)

        return None if torch.compiler.is_compiling() else _with_closure(args, kwargs, tell)


def _with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], tell: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return a step's arguments with a closure that calls `tell` after its first call: LBFGS makes several.

    Returns None where the step is given no closure.
    """

    def telling(closure: Callable[[], Any]) -> Callable[[], Any]:
        has_told = False

        @functools.wraps(closure)
        def called() -> Any:
            nonlocal has_told
            loss = closure()
            if not has_told:
                has_told = True
                tell()
            return loss

        return called

    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": telling(kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):
        return (args[0], telling(args[1]), *args[2:]), kwargs
    return None


_listening: list[OptimizerHooks] = []
_wrapped: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []  # module, name, original, wrapper
_norms_of_other_kinds: list[Tensor] = []  # the latest norm, if it is no root of a sum of squares


def _wrap_clipping() -> None:
    torchs = torch.nn.utils.clip_grad
    if SEES_ALL_CLIPPING:
        _wrap([torchs, nn.utils], torchs._clip_grads_with_norm_, _by_norm)
    else:
        _wrap([torchs, nn.utils], torchs.clip_grad_norm_, _whole)
    _wrap([torchs, nn.utils], getattr(torchs, "_get_total_norm", None), _measuring)
    _wrap([torchs, nn.utils], torchs.clip_grad_value_, _by_value)
    if (engine := sys.modules.get("deepspeed.runtime.engine")) is not None:
        _wrap([engine], vars(engine).get("clip_grad_norm_"), _whole)


def _wrap(modules: Sequence[Any], own: Callable[..., Any] | None, wrapper: Callable[..., Callable[..., Any]]) -> None:
    if own is None:  # another version of torch: gradients are sampled as the optimizer gets them
        return
    ours = wrapper(own)
    for module in modules:
        for name, value in list(vars(module).items()):
            if value is own:
                _wrapped.append((module, name, own, ours))
                setattr(module, name, ours)


def _unwrap_clipping() -> None:
    for module, name, own, ours in _wrapped:
        if getattr(module, name) is ours:  # else somebody has wrapped ours, which only passes on
            setattr(module, name, own)
    _wrapped.clear()
    _norms_of_other_kinds.clear()


def _open_listeners() -> list[OptimizerCallbacks]:
    return [] if torch.compiler.is_compiling() else [hooks.listener for hooks in _listening if hooks.hears()]


def _as_list(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _by_norm(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's clipping by a norm that is given, which tells listeners before it clips."""

    def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if listeners := _open_listeners():
            parameters = _as_list(parameters)
            is_of_other_kind = any(norm is total_norm for norm in _norms_of_other_kinds)
            for listener in listeners:
                if is_of_other_kind:
                    listener.clips(parameters, None, None)
                else:
                    listener.clips(parameters, max_norm, total_norm)
        return own(parameters, max_norm, total_norm, *args, **kwargs)

    return clip


def _measuring(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what computes a norm, to remember one of another order than 2."""

    def measure(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        total_norm = own(tensors, norm_type, *args, **kwargs)
        if _open_listeners():
            _norms_of_other_kinds[:] = [] if norm_type == 2 else [total_norm]
        return total_norm

    return measure


def _by_value(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's clipping by value, which tells listeners before it clips."""

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if listeners := _open_listeners():
            parameters = _as_list(parameters)
            for listener in listeners:
                listener.clips(parameters, None, None)
        return own(parameters, *args, **kwargs)

    return clip


def _whole(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's clipping that computes the norm itself, which tells listeners before and after."""
    signature = inspect.signature(own)

    def clip(*args: Any, **kwargs: Any) -> Any:
        listeners = _open_listeners()
        if not listeners:
            return own(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        given.arguments["parameters"] = _as_list(given.arguments["parameters"])
        is_of_squares = given.arguments.get("norm_type") == 2
        for listener in listeners:
            listener.clips(given.arguments["parameters"], given.arguments["max_norm"] if is_of_squares else None, None)
        norm = own(*given.args, **given.kwargs)
        for listener in listeners:
            if is_of_squares:
                listener.clipped(norm)
        return norm

    return clip
