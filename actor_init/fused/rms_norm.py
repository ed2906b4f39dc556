"""Replace RMSNorms by torch's fused one, or by Liger's, which multiplies by 1 + weight.

For backward they keep their input and a number a token, where modules keep fp32 copies.

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

from actor_init.fused.liger import DTYPES, choose_bound, computes_same, liger_norm, make_random_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class NormForm:
    """Compute x / sqrt(mean(x**2) + eps), times the weight, or times 1 + weight."""

    eps: float
    adds_one: bool

    def compute(self, values: Tensor, weight: Tensor) -> Tensor:
        if not self.adds_one:
            return F.rms_norm(values, weight.shape, weight, self.eps)
        return liger_norm(values, weight, self.eps)


def replace_norm(module: nn.Module, where: torch.device) -> bool:
    """Make `module` compute the fused form if it is shown to be an RMSNorm over its last dimension; return whether."""
    parameters = dict(module.named_parameters(recurse=False))
    if len(parameters) != 1 or next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return False
    (name,) = parameters
    if parameters[name].ndim != 1:
        return False
    form = _find_form(module, name, where)
    if form is None:
        return False
    _replace_forward(module, name, form)
    return True


def _replace_forward(module: nn.Module, name: str, form: NormForm) -> None:
    module_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        weight = getattr(module, name)
        is_plain = len(args) == 1 and not kwargs and args[0].dtype == weight.dtype
        if not is_plain or isinstance(args[0], DTensor) != isinstance(weight, DTensor):
            return module_forward(*args, **kwargs)
        # In a compiled block the module's forward runs: the compiler fuses it.
        if form.adds_one and (isinstance(weight, DTensor) or torch.compiler.is_compiling()):
            return module_forward(*args)
        return form.compute(args[0], weight)

    module.forward = forward


def _find_form(module: nn.Module, name: str, where: torch.device) -> NormForm | None:
    """Find the form that gives the module's numbers for random ones; None if none does."""
    width = getattr(module, name).shape[0]
    weight_D = 0.75 + 0.5 * make_random_numbers(width, where=where, seed=1).sigmoid()
    values_RD = make_random_numbers(3, width, where=where, seed=2) * torch.tensor([[1.0], [1e-3], [0.0]], device=where)
    values_RD[2, 0] = 1e-2
    for form in _list_candidates(module):
        if all(_is_form(module, name, form, values_RD.to(dtype), weight_D.to(dtype)) for dtype in DTYPES):
            return form
    return None


def _is_form(module: nn.Module, name: str, form: NormForm, values_RD: Tensor, weight_D: Tensor) -> bool:
    copy = deepcopy(module)
    setattr(copy, name, nn.Parameter(weight_D))
    return computes_same(_make_function(copy, name), form.compute, (values_RD, weight_D), choose_bound(values_RD.dtype))


def _make_function(copy: nn.Module, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def call_module(values: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = torch.func.functional_call(copy, {name: weight}, (values,))
        return normed

    return call_module


def _list_candidates(module: nn.Module) -> Iterator[NormForm]:
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1}
    for eps in sorted(numbers):
        for adds_one in (False, True):
            yield NormForm(eps=eps, adds_one=adds_one)
