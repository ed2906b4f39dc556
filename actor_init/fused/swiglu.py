"""Replace the product in SwiGLU layers, silu(gate) * up, by one that keeps gate and up alone for backward.

Written plainly it keeps silu(gate) too, and takes several kernels each way.
"""

from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from actor_init.fused.liger import is_equal, liger_product, random_numbers

IN_FEATURES, HIDDEN = 8, 12  # of the small copy that is tried
BOUND = 1e-5  # in fp32: sums in another order


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The names of a layer's Linears. `up` is None where one Linear gives gate and up, joined."""

    gate: str
    up: str | None
    down: str

    def halves(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up of `x`."""
        first: Tensor = getattr(module, self.gate)(x)
        if self.up is None:
            gate, up = first.chunk(2, dim=-1)
            return gate, up
        return first, getattr(module, self.up)(x)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, all of one shape. Inside a compiled block it is plain: the compiler fuses it there."""
    if torch.compiler.is_compiling() or isinstance(gate, DTensor):
        return F.silu(gate) * up
    return liger_product(gate, up)


def replace_swiglu(module: nn.Module, where: torch.device) -> bool:
    """Make `module` compute the fused product if it is shown to be down(silu(gate(x)) * up(x)); return whether."""
    roles = next((roles for roles in _candidates(module) if _is_swiglu(module, roles, where)), None)
    if roles is None:
        return False
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return own(*args, **kwargs)
        return getattr(module, roles.down)(silu_times(*roles.halves(module, args[0])))

    module.forward = forward
    return True


def _candidates(module: nn.Module) -> Iterator[Roles]:
    linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    if any(True for _ in module.parameters(recurse=False)) or len(linears) not in (2, 3):
        return
    for names in permutations(linears):
        gate, *up, down = names
        sizes = {(linears[name].in_features, linears[name].out_features) for name in (gate, *up)}
        inner = linears[gate].out_features // (1 if up else 2)
        if len(sizes) == 1 and (linears[down].in_features, linears[down].out_features) == (
            inner,
            linears[gate].in_features,
        ):
            yield Roles(gate=gate, up=up[0] if up else None, down=down)


def _is_swiglu(module: nn.Module, roles: Roles, where: torch.device) -> bool:
    """Try the module's own forward with small Linears in the place of its own."""
    small = copy(module)
    small._modules = {
        name: deepcopy(child)
        for name, child in module._modules.items()
        if child is not None and not isinstance(child, nn.Linear)
    }
    joined = 1 if roles.up else 2
    shapes = {roles.gate: (IN_FEATURES, joined * HIDDEN), roles.up: (IN_FEATURES, HIDDEN), roles.down: (HIDDEN, 8)}
    for seed, (name, (num_in, num_out)) in enumerate(shapes.items()):
        if name is not None:
            small._modules[name] = _linear(num_in, num_out, getattr(module, name).bias is not None, seed, where)

    def fused(x: Tensor) -> Tensor:
        return getattr(small, roles.down)(silu_times(*roles.halves(small, x)))  # type: ignore[no-any-return]

    x = random_numbers(2, 3, IN_FEATURES, where=where, seed=7)
    return all(is_equal(small.train(trains).forward, fused, (x,), BOUND) for trains in (False, True))


def _linear(num_in: int, num_out: int, has_bias: bool, seed: int, where: torch.device) -> nn.Linear:
    linear = nn.Linear(num_in, num_out, bias=has_bias, device="meta").to_empty(device=where)
    with torch.no_grad():
        linear.weight.copy_(random_numbers(num_out, num_in, where=where, seed=seed))
        if has_bias:
            linear.bias.copy_(random_numbers(num_out, where=where, seed=seed + 10))
    return linear
