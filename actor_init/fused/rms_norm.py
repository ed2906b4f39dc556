"""Replace RMSNorms by torch's fused one, or by Liger's, which multiplies by 1 + weight.

They keep their input and a number a token where modules keep fp32 copies.

Shape letters: D width, R tokens.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from actor_init.fused.liger import DTYPES, bound_in, is_equal, liger_norm, random_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """x / sqrt(mean(x**2) + eps), times the weight, or times 1 + weight."""

    eps: float
    adds_one: bool

    def of(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.adds_one:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return liger_norm(x, weight, self.eps)


def replace_norm(module: nn.Module, where: torch.device) -> bool:
    """Make `module` compute the fused form if it is shown to be an RMSNorm over its last dimension; return whether."""
    parameters = dict(module.named_parameters(recurse=False))
    if len(parameters) != 1 or next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return False
    (name,) = parameters
    if parameters[name].ndim != 1:
        return False
    form = _form_of(module, name, where)
    if form is None:
        return False
    _compute(module, name, form)
    return True


def _compute(module: nn.Module, name: str, form: Form) -> None:
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        weight = getattr(module, name)
        is_plain = len(args) == 1 and not kwargs and args[0].dtype == weight.dtype
        if not is_plain or isinstance(args[0], DTensor) != isinstance(weight, DTensor):
            return own(*args, **kwargs)
        # inside a compiled block the module's own: the compiler fuses it there
        if form.adds_one and (isinstance(weight, DTensor) or torch.compiler.is_compiling()):
            return own(*args)
        return form.of(args[0], weight)

    module.forward = forward


def _form_of(module: nn.Module, name: str, where: torch.device) -> Form | None:
    """Return the form that gives the module's own numbers on random ones, None if none does."""
    width = getattr(module, name).shape[0]
    weight_D = 0.75 + 0.5 * random_numbers(width, where=where, seed=1).sigmoid()
    x_RD = random_numbers(3, width, where=where, seed=2) * torch.tensor([[1.0], [1e-3], [0.0]], device=where)
    x_RD[2, 0] = 1e-2
    for form in _candidates(module):
        if all(_is_form(module, name, form, x_RD.to(dtype), weight_D.to(dtype)) for dtype in DTYPES):
            return form
    return None


def _is_form(module: nn.Module, name: str, form: Form, x_RD: Tensor, weight_D: Tensor) -> bool:
    copy = deepcopy(module)
    setattr(copy, name, nn.Parameter(weight_D))
    own = _with_weight(copy, name)
    return is_equal(own, form.of, (x_RD, weight_D), bound_in(x_RD.dtype))


def _with_weight(copy: nn.Module, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def own(x: Tensor, weight: Tensor) -> Tensor:
        called: Tensor = torch.func.functional_call(copy, {name: weight}, (x,))
        return called

    return own


def _candidates(module: nn.Module) -> Iterator[Form]:
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1}
    for eps in sorted(numbers):
        for adds_one in (False, True):
            yield Form(eps=eps, adds_one=adds_one)
