"""Replace the rotary embedding of queries and keys in attention modules, in fewer kernels.

The function is a name in the file of the model's class. The class's own forward is made again with another function
under that name, for the modules of one model alone: what else runs in this process keeps its own.
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
    TRIED,
    bound_in,
    check_liger,
    is_equal,
    liger_rotary,
    liger_version,
    random_numbers,
)
from actor_init.fused.rms_norm import replace_norm
from actor_init.fused.swiglu import replace_swiglu
from actor_init.spec import Kernels

# Replace the modules of a built model that have a fused form, and say which.

OWN = "the model's own"
NONE_FOUND = f"{OWN}: no module of it is shown to have a fused form"


def fuse_as_asked(model: nn.Module, asked: Kernels, where: torch.device) -> str | None:
    """Call `fuse` under --kernels fused. Returns its description, or None under any other.

    Raises UsageError where Liger's kernels cannot run.
    """
    check_liger(asked, where)
    return fuse(model, where) if asked is Kernels.FUSED else None


def fuse(model: nn.Module, where: torch.device) -> str:
    """Give each module of `model` that is shown to have a fused form that form, and describe what was replaced.

    where  the device that the model will run on: the forms are tried there

    The model may be on the meta device. Call it before hooks, adapters and compilers are added.
    """
    found: Counter[str] = Counter()
    forms = {"RMSNorm": replace_norm, "SwiGLU": replace_swiglu, "rope": replace_rotary}
    for module in model.modules():
        if done := next((name for name, replace in forms.items() if replace(module, where)), None):
            found[done] += 1
    if not found:
        return NONE_FOUND
    counts = [name if name == "rope" else f"{found[name]} {name}" for name in forms if found[name]]
    return f"fused ({', '.join(counts)}; liger {liger_version()})"


ARGUMENTS = ["q", "k", "cos", "sin"]  # of transformers' functions of this kind, in this order
Rotary = Callable[..., tuple[Tensor, Tensor]]


def _fused(own: Rotary, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Turn q and k [B, heads, S, D], or their first numbers, by cos and sin [B or 1, S, up to D].

    All else is left to the model's own function.
    """
    q, k, cos, sin = args[:4] if len(args) >= 4 else (None,) * 4
    is_plain = all(isinstance(one, Tensor) and not isinstance(one, DTensor) for one in (q, k, cos, sin))
    if not is_plain or not _fits(q, k, cos, sin, args[4:], kwargs):
        return own(*args, **kwargs)
    width = cos.shape[-1]
    turned_q, turned_k = liger_rotary(q[..., :width], k[..., :width], cos, sin)
    if width == q.shape[-1]:
        return turned_q, turned_k
    return torch.cat((turned_q, q[..., width:]), dim=-1), torch.cat((turned_k, k[..., width:]), dim=-1)


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, more: tuple[Any, ...], named: dict[str, Any]) -> bool:
    return (
        not any(more)
        and all(name == "unsqueeze_dim" and value == 1 for name, value in named.items())
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
    replaced = {name: partial(_fused, own) for name, own in _functions_of(function) if _is_rotary(own, where)}
    if not replaced:
        return False
    again = FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    again.__kwdefaults__ = function.__kwdefaults__

    def fused(*args: Any, **kwargs: Any) -> Any:
        # inside a compiled block the model's own: the compiler fuses it there
        return forward(*args, **kwargs) if torch.compiler.is_compiling() else again(module, *args, **kwargs)

    module.forward = fused
    return True


def _functions_of(function: FunctionType) -> Iterator[tuple[str, Rotary]]:
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        if isinstance(used, FunctionType) and [*inspect.signature(used).parameters][:4] == ARGUMENTS:
            yield name, used


def _is_rotary(own: Rotary, where: torch.device) -> bool:
    q, k = random_numbers(2, 4, 5, 16, where=where, seed=4), random_numbers(2, 2, 5, 16, where=where, seed=5)
    # halves of cos and sin are alike, as rotary embeddings make them, and as Liger's kernel takes them
    angles = random_numbers(1, 5, 8, where=where, seed=3)

    def turned(function: Rotary, width: int, dtype: torch.dtype) -> Rotary:
        cos, sin = (torch.cat((half, half), dim=-1).to(dtype) for half in _cos_and_sin(angles[..., : width // 2]))
        # copies of q and k, as the kernel may write where they are
        return lambda q, k: function(q.clone(), k.clone(), cos, sin)

    return all(
        is_equal(
            turned(own, width, dtype),
            turned(partial(_fused, own), width, dtype),
            (q.to(dtype), k.to(dtype)),
            bound_in(dtype),
        )
        for dtype in DTYPES
        for width in (16, 8)
        if width == 16 or _runs_on(turned(own, width, dtype), q.to(dtype), k.to(dtype))
    )


def _cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles.cos(), angles.sin()


def _runs_on(own: Rotary, q: Tensor, k: Tensor) -> bool:
    try:
        own(q, k)
    except TRIED:
        return False
    return True
