"""Replace the modules of a model that have a fused form, among them attention's rotary embedding.

The function that turns queries and keys is a global name in the file of the model's class. The class's forward is made
again with another function under that name, for the modules of one model alone: other models in this process keep the
original.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from actor_init.fused.liger import (
    DTYPES,
    TRIAL_ERRORS,
    check_liger,
    choose_bound,
    computes_same,
    liger_rotary,
    make_random_numbers,
    read_liger_version,
)
from actor_init.fused.rms_norm import replace_norm
from actor_init.fused.swiglu import replace_swiglu
from actor_init.spec import Kernels

OWN = "the model's own"
NONE_FOUND = f"{OWN}: no module of it is shown to have a fused form"


def fuse_if_requested(model: nn.Module, kernels: Kernels, where: torch.device) -> str | None:
    """Call `fuse` under --kernels fused. Returns its description, or None under any other.

    Raises UsageError where Liger's kernels cannot run.
    """
    check_liger(kernels, where)
    return fuse(model, where) if kernels is Kernels.FUSED else None


def fuse(model: nn.Module, where: torch.device) -> str:
    """Give each module of `model` that is shown to have a fused form that form, and describe what was replaced.

    where  the device that the model will run on: the forms are tried there

    The model may be on the meta device. Call it before hooks, adapters and compilers are added.
    """
    num_replaced: Counter[str] = Counter()
    forms = {"RMSNorm": replace_norm, "SwiGLU": replace_swiglu, "rope": replace_rotary}
    for module in model.modules():
        if replaced := next((name for name, replace in forms.items() if replace(module, where)), None):
            num_replaced[replaced] += 1
    if not num_replaced:
        return NONE_FOUND
    counts = [name if name == "rope" else f"{num_replaced[name]} {name}" for name in forms if num_replaced[name]]
    return f"fused ({', '.join(counts)}; liger {read_liger_version()})"


# The first parameters of transformers' rotary functions, in this order.
ARGUMENTS = ["q", "k", "cos", "sin"]
Rotary = Callable[..., tuple[Tensor, Tensor]]


def _turn_fused(model_function: Rotary, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Turn q and k [B, heads, S, D], or their first numbers, by cos and sin [B or 1, S, up to D].

    All other calls are left to the model's function.
    """
    q, k, cos, sin = args[:4] if len(args) >= 4 else (None,) * 4
    is_plain = all(isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) for tensor in (q, k, cos, sin))
    if not is_plain or not _is_supported(q, k, cos, sin, args[4:], kwargs):
        return model_function(*args, **kwargs)
    width = cos.shape[-1]
    turned_q, turned_k = liger_rotary(q[..., :width], k[..., :width], cos, sin)
    if width == q.shape[-1]:
        return turned_q, turned_k
    return torch.cat((turned_q, q[..., width:]), dim=-1), torch.cat((turned_k, k[..., width:]), dim=-1)


def _is_supported(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, other_args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    return (
        not any(other_args)
        and all(name == "unsqueeze_dim" and value == 1 for name, value in kwargs.items())
        and q.ndim == k.ndim == 4
        and cos.ndim == 3
        and cos.shape == sin.shape
        and cos.shape[-1] <= q.shape[-1] == k.shape[-1]
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and not cos.requires_grad
    )


def replace_rotary(module: nn.Module, where: torch.device) -> bool:
    """Make an attention module turn queries and keys in the fused form if its function is shown to; return whether."""
    forward = module.forward
    if not isinstance(forward, MethodType) or not isinstance(forward.__func__, FunctionType):
        return False
    function = forward.__func__
    replacements = {
        name: partial(_turn_fused, rotary)
        for name, rotary in _find_rotary_functions(function)
        if _is_rotary(rotary, where)
    }
    if not replacements:
        return False
    fused_function = FunctionType(
        function.__code__,
        {**function.__globals__, **replacements},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    fused_function.__kwdefaults__ = function.__kwdefaults__

    def fused_forward(*args: Any, **kwargs: Any) -> Any:
        # In a compiled block the model's function runs: the compiler fuses it.
        return forward(*args, **kwargs) if torch.compiler.is_compiling() else fused_function(module, *args, **kwargs)

    module.forward = fused_forward
    return True


def _find_rotary_functions(function: FunctionType) -> Iterator[tuple[str, Rotary]]:
    for name in function.__code__.co_names:
        function_global = function.__globals__.get(name)
        if (
            isinstance(function_global, FunctionType)
            and [*inspect.signature(function_global).parameters][:4] == ARGUMENTS
        ):
            yield name, function_global


def _is_rotary(model_function: Rotary, where: torch.device) -> bool:
    q, k = make_random_numbers(2, 4, 5, 16, where=where, seed=4), make_random_numbers(2, 2, 5, 16, where=where, seed=5)
    # Liger's kernel reads the first half of cos and sin alone: both halves are alike, as Llama's embedding makes them.
    angles = make_random_numbers(1, 5, 8, where=where, seed=3)

    def bind(function: Rotary, width: int, dtype: torch.dtype) -> Rotary:
        cos, sin = (
            torch.cat((half, half), dim=-1).to(dtype) for half in _compute_cos_and_sin(angles[..., : width // 2])
        )
        # q and k are cloned since the kernel may write over them.
        return lambda q, k: function(q.clone(), k.clone(), cos, sin)

    return all(
        computes_same(
            bind(model_function, width, dtype),
            bind(partial(_turn_fused, model_function), width, dtype),
            (q.to(dtype), k.to(dtype)),
            choose_bound(dtype),
        )
        for dtype in DTYPES
        for width in (16, 8)
        if width == 16 or _can_run(bind(model_function, width, dtype), q.to(dtype), k.to(dtype))
    )


def _compute_cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles.cos(), angles.sin()


def _can_run(model_function: Rotary, q: Tensor, k: Tensor) -> bool:
    try:
        model_function(q, k)
    except TRIAL_ERRORS:
        return False
    return True
