"""Hook torch's optimizers, the clipping of gradients and schedules, to see a job's steps without code in the job.

torch has global hooks for optimizers, but none for clipping (https://github.com/pytorch/pytorch/issues/309 asked for
clipping by the optimizer). So while hooks are attached, attributes of modules and classes are replaced by wrappers:

* functions of `torch.nn.utils.clip_grad` into which torch 2.6 split `clip_grad_norm_`
  (https://github.com/pytorch/pytorch/issues/139467). `clip_grad_norm_` looks them up there at each call, so a job that
  imported it before is seen.
* before torch 2.6 `clip_grad_norm_` itself, which does everything in one function. A job that imported it before is not
  seen, and has to note its norm; until a clipping is seen, gradients there count as maybe clipped
  (`sees_all_clipping`).
* the step of torch's schedules of the learning rate, which has no hook either.
* `GradScaler.step`: where gradients overflowed, it returns without a step, of which nothing else tells.
* `GradScaler.scale`: the gradient of the logits has its factor, and that of the parameters no longer has it.
* the function of its own that DeepSpeed's engine clips with. Others get nothing from it before the step
  (https://github.com/deepspeedai/DeepSpeed/pull/1292 has the norm after it).
"""

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
# The order of the norm that gradients are clipped by, or None for the value of each element, and the limit.
OtherRule = tuple[float | None, Any]


def sees_all_clipping() -> bool:
    """Tell whether a clipping by torch is seen wherever the job has imported it: torch 2.6 or later."""
    return hasattr(nn.utils.clip_grad, "_clip_grads_with_norm_")


class OptimizerCallbacks(Protocol):
    """What the hooks call. These methods must not raise, wait for a device, or call a collective."""

    @property
    def wants_norms(self) -> bool:
        """Tell whether norms of single gradients are of use at the next clipping. To keep those takes a while."""

    def before_clipping(
        self, parameters: Sequence[Tensor], max_norm: Any, norm: Any, other_rule: OtherRule | None = None
    ) -> None:
        """Gradients of these parameters will be clipped. `norm` is theirs before it; None if it is not known yet.

        other_rule  what they are clipped by in place of a 2-norm
        """

    def after_clipping(self, norm: Any) -> None:
        """Gradients were clipped by a norm that was not known before. `norm` is theirs before it."""

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer will step."""

    def after_step(self) -> None:
        """An optimizer has stepped."""

    def after_schedule_step(self, optimizer: Any, count: int | None, *, is_of_job: bool) -> None:
        """A schedule has set the learning rate of this optimizer anew.

        count      the steps that it has counted, as its last one; None: it counts none
        is_of_job  False: a library took the step besides the one that the job's loop takes
        """

    def after_scaled_step(self, optimizer: Optimizer) -> None:
        """A GradScaler has let the optimizer step, or has left the step out."""


class OptimizerHooks:
    """Calls `callbacks` at each clipping and step in this process, from `attach` to `remove`."""

    def __init__(self, callbacks: OptimizerCallbacks) -> None:
        self.callbacks = callbacks
        self._process_id = os.getpid()
        self._pre_handle: Any = None
        self._post_handle: Any = None

    def attach(self) -> None:
        self._pre_handle = register_optimizer_step_pre_hook(self._before_step)
        self._post_handle = register_optimizer_step_post_hook(self._after_step)
        _attached_hooks.append(self)
        if len(_attached_hooks) == 1:
            _wrap_functions()

    def remove(self) -> None:
        """Take the hooks off. A second call does nothing."""
        if self._pre_handle is None:
            return
        self._pre_handle.remove()
        self._post_handle.remove()
        self._pre_handle = None
        _attached_hooks.remove(self)
        if not _attached_hooks:
            _unwrap_functions()

    def is_active(self) -> bool:
        """Tell whether a call counts now: not in a forked child, nor while a compiler traces."""
        return os.getpid() == self._process_id and not torch.compiler.is_compiling()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        """Call `before_step`, now, or after the closure if the step is given one, which runs the pass."""
        if not self.is_active():
            return None

        def call_before_step() -> None:
            if self.is_active():
                self.callbacks.before_step(optimizer)

        if (new_arguments := _wrap_closure(args, kwargs, call_before_step)) is not None:
            return new_arguments
        self.callbacks.before_step(optimizer)
        return None

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_active():
            self.callbacks.after_step()


class RunningStepHook:
    """Calls `before_step` for hooks that are attached inside a step's closure, until `remove`.

    A closure runs the pass. A recording that is opened by the first pass is therefore opened while a step runs, and its
    own hooks have missed the beginning of that step.
    """

    def __init__(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """See no more steps, except one whose closure is running. A second call does nothing."""
        self._handle.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        earlier_hooks = tuple(_attached_hooks)

        def call_new_hooks() -> None:
            for hooks in _attached_hooks:
                if hooks.is_active() and not any(hooks is earlier for earlier in earlier_hooks):
                    hooks.callbacks.before_step(optimizer)

        return None if torch.compiler.is_compiling() else _wrap_closure(args, kwargs, call_new_hooks)


def _wrap_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], after_first_call: Callable[[], None]
) -> StepArguments | None:
    """Return a step's arguments with a closure that calls `after_first_call` when it has run once: LBFGS runs it often.

    Returns None where the step is given no closure.
    """

    def wrap(closure: Callable[[], Any]) -> Callable[[], Any]:
        has_run = False

        @functools.wraps(closure)
        def run_closure() -> Any:
            nonlocal has_run
            loss = closure()
            if not has_run:
                has_run = True
                after_first_call()
            return loss

        return run_closure

    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    # The first positional argument is the optimizer itself.
    if len(args) > 1 and callable(args[1]):
        return (args[0], wrap(args[1]), *args[2:]), kwargs
    return None


class _WrappedFunction(NamedTuple):
    """A function that a wrapper replaces as an attribute of a module."""

    module: Any
    name: str
    original: Callable[..., Any]
    wrapper: Callable[..., Any]


_attached_hooks: list[OptimizerHooks] = []
_wrapped_functions: list[_WrappedFunction] = []
# The latest norm that torch computed, if it is of another order than 2, and that order. Gradients that it clips
# count as clipped by another rule: the norms of ranks could not be added up.
_latest_other_norm: tuple[Tensor, float] | None = None
# The latest norm of order 2 that torch computed, and those of single gradients that it computed for it.
_latest_norms: "tuple[Tensor, GradientNorms] | None" = None
# What a GradScaler multiplied the loss by whose backward began last, until its step.
_loss_scale: Tensor | None = None


class GradientNorms:
    """Norms of single gradients, as torch computed them. It keeps no gradient alive."""

    def __init__(self) -> None:
        # By the gradient's id: the gradient, its version then, and the norm.
        self._norms: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def add(self, gradients: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        for gradient, norm in zip(gradients, norms, strict=True):
            self._norms[id(gradient)] = weakref.ref(gradient), gradient._version, norm

    @property
    def are_in_fp32(self) -> bool:
        return all(norm.dtype == torch.float32 for _, _, norm in self._norms.values()) and bool(self._norms)

    def find(self, gradient: Any) -> Tensor | None:
        """Return the norm of a gradient; None where it is not known, or the gradient has changed since."""
        reference, version, norm = self._norms.get(id(gradient), (None, 0, None))
        latest = None if reference is None else reference()
        return norm if latest is not None and latest is gradient and latest._version == version else None


class NormKeeper(TorchFunctionMode):
    """Keeps the norms of single tensors that torch computes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = GradientNorms()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch._foreach_norm:
            # The recorder must not end the job: tensors of inference mode have no version.
            with suppress(Exception):
                self.norms.add(args[0], result)
        return result


def find_gradient_norms(total_norm: Any) -> GradientNorms | None:
    """Return the norms of single gradients of which `total_norm` was computed, if it is the latest one."""
    return _latest_norms[1] if _latest_norms is not None and _latest_norms[0] is total_norm else None


def find_loss_scale() -> Tensor | None:
    """Return what a GradScaler has multiplied the loss of this backward by, fp32 []; None without one."""
    return _loss_scale


def _wrap_functions() -> None:
    clip_grad = torch.nn.utils.clip_grad
    # torch.nn.utils re-exports the functions, so both modules get the wrapper.
    modules = [clip_grad, nn.utils]
    if sees_all_clipping():
        _replace(modules, clip_grad._clip_grads_with_norm_, _wrap_clip_by_known_norm)
    else:
        _replace(modules, clip_grad.clip_grad_norm_, _wrap_clip_grad_norm)
    _replace(modules, getattr(clip_grad, "_get_total_norm", None), _wrap_get_total_norm)
    _replace(modules, clip_grad.clip_grad_value_, _wrap_clip_by_value)
    _replace([torch.amp.GradScaler], torch.amp.GradScaler.step, _wrap_scaled_step)
    _replace([torch.amp.GradScaler], torch.amp.GradScaler.scale, _wrap_scale)
    if (sharded := sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")) is not None:
        _replace([sharded.ShardedGradScaler], vars(sharded.ShardedGradScaler).get("scale"), _wrap_scale)
    if (engine := sys.modules.get("deepspeed.runtime.engine")) is not None:
        _replace([engine], vars(engine).get("clip_grad_norm_"), _wrap_clip_grad_norm)
    _replace([LRScheduler], vars(LRScheduler).get("step"), _wrap_schedule_step)


def _replace(
    modules: Sequence[Any], original: Callable[..., Any] | None, make_wrapper: Callable[..., Callable[..., Any]]
) -> None:
    """Put a wrapper in the place of `original` wherever these modules have it.

    Other versions of torch may lack the function. Gradients are then sampled as the optimizer gets them.
    """
    if original is None:
        return
    wrapper = make_wrapper(original)
    for module in modules:
        for name, value in list(vars(module).items()):
            if value is original:
                _wrapped_functions.append(_WrappedFunction(module, name, original, wrapper))
                setattr(module, name, wrapper)


def _unwrap_functions() -> None:
    global _latest_other_norm, _latest_norms, _loss_scale
    for module, name, original, wrapper in _wrapped_functions:
        # Somebody may have wrapped our wrapper meanwhile. Then it stays, and only passes calls on.
        if getattr(module, name) is wrapper:
            setattr(module, name, original)
    _wrapped_functions.clear()
    _latest_other_norm = _latest_norms = _loss_scale = None


def _find_active_callbacks() -> list[OptimizerCallbacks]:
    return [] if torch.compiler.is_compiling() else [hooks.callbacks for hooks in _attached_hooks if hooks.is_active()]


def _list_parameters(parameters: Any) -> list[Tensor]:
    """List what a clipping function was given: a tensor, or an iterable that may be read only once."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _wrap_clip_by_known_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's function that clips by a norm computed before."""

    def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        global _latest_norms
        if active_callbacks := _find_active_callbacks():
            parameters = _list_parameters(parameters)
            other_norm = _latest_other_norm
            for callbacks in active_callbacks:
                if other_norm is not None and total_norm is other_norm[0]:
                    callbacks.before_clipping(parameters, None, None, (other_norm[1], max_norm))
                else:
                    callbacks.before_clipping(parameters, max_norm, total_norm)
            _latest_norms = None
        return original(parameters, max_norm, total_norm, *args, **kwargs)

    return clip


def _wrap_get_total_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's function that computes a norm, to remember its parts, and one of another order than 2."""

    def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        global _latest_other_norm, _latest_norms
        if not (active_callbacks := _find_active_callbacks()):
            return original(tensors, norm_type, *args, **kwargs)
        keeps_norms = norm_type == 2 and any(callbacks.wants_norms for callbacks in active_callbacks)
        with NormKeeper() if keeps_norms else nullcontext() as keeper:
            total_norm = original(tensors, norm_type, *args, **kwargs)
        _latest_other_norm = None if norm_type == 2 else (total_norm, float(norm_type))
        _latest_norms = None if keeper is None else (total_norm, keeper.norms)
        return total_norm

    return get_total_norm


def _wrap_scaled_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap GradScaler's step, which calls the optimizer's unless gradients overflowed."""

    @functools.wraps(original)
    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        global _loss_scale
        result = original(scaler, optimizer, *args, **kwargs)
        _loss_scale = None
        for callbacks in _find_active_callbacks():
            callbacks.after_scaled_step(optimizer)
        return result

    return step


def _wrap_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap GradScaler's multiplication of a loss, to know the factor in the backward of what it returns."""

    @functools.wraps(original)
    def scale(scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if isinstance(scaled, Tensor) and scaled.requires_grad and _find_active_callbacks():
            # Its number is on the device, and to read it would wait for that.
            factor = original(scaler, torch.ones((), device=scaled.device))

            def remember(gradient: Tensor) -> None:
                global _loss_scale
                _loss_scale = factor

            scaled.register_hook(remember)
        return scaled

    return scale


def _wrap_clip_by_value(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's function that clips each element of the gradients."""

    def clip(parameters: Any, clip_value: Any, *args: Any, **kwargs: Any) -> Any:
        if active_callbacks := _find_active_callbacks():
            parameters = _list_parameters(parameters)
            for callbacks in active_callbacks:
                callbacks.before_clipping(parameters, None, None, (None, clip_value))
        return original(parameters, clip_value, *args, **kwargs)

    return clip


def _wrap_schedule_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that steps a schedule. Its constructor calls it once, which is no step of the job.

    Accelerate's AcceleratedScheduler steps a schedule once for each rank, on purpose, so that is no step of the job. A
    schedule that is made of others steps them: SequentialLR one of them, which may have counted fewer steps than it,
    and ChainedScheduler all of them.
    """

    @functools.wraps(original)
    def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(schedule, *args, **kwargs)
        caller = sys._getframe(1)
        outer = caller.f_locals.get("self")
        is_followed = isinstance(outer, ChainedScheduler) and outer._schedulers[-1] is not schedule
        if getattr(schedule, "_step_count", 0) > 1 and not is_followed:
            count = getattr(outer if isinstance(outer, SequentialLR) else schedule, "last_epoch", None)
            is_of_job = caller.f_globals.get("__name__") != "accelerate.scheduler"
            for callbacks in _find_active_callbacks():
                callbacks.after_schedule_step(
                    schedule.optimizer, count if type(count) is int else None, is_of_job=is_of_job
                )
        return result

    return step


def _wrap_clip_grad_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that computes the norm and clips by it, in one."""
    signature = inspect.signature(original)

    def clip_grad_norm(*args: Any, **kwargs: Any) -> Any:
        active_callbacks = _find_active_callbacks()
        if not active_callbacks:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        parameters = bound.arguments["parameters"] = _list_parameters(bound.arguments["parameters"])
        order, max_norm = float(bound.arguments.get("norm_type", 2.0)), bound.arguments["max_norm"]
        has_order_2 = order == 2
        for callbacks in active_callbacks:
            if has_order_2:
                callbacks.before_clipping(parameters, max_norm, None)
            else:
                callbacks.before_clipping(parameters, None, None, (order, max_norm))
        norm = original(*bound.args, **bound.kwargs)
        if has_order_2:
            for callbacks in active_callbacks:
                callbacks.after_clipping(norm)
        return norm

    return clip_grad_norm
