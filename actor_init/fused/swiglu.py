"""Replace the product in SwiGLU layers, silu(gate) * up, by one that keeps gate and up alone for backward.

The plain product also keeps silu(gate), and takes several kernels in forward and in backward.
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

from actor_init.fused.liger import computes_same, liger_product, make_random_numbers

# Sizes of the small copy of a layer that the trial runs.
IN_FEATURES, HIDDEN = 8, 12
# Relative, in fp32: the two sums are taken in another order.
BOUND = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRoles:
    """The names of a layer's Linears. `up` is None where one Linear gives gate and up, joined."""

    gate: str
    up: str | None
    down: str

    def compute_halves(self, module: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Compute gate and up of `hidden`."""
        gate_or_both: Tensor = getattr(module, self.gate)(hidden)
        if self.up is None:
            gate, up = gate_or_both.chunk(2, dim=-1)
            return gate, up
        return gate_or_both, getattr(module, self.up)(hidden)


def multiply_by_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, all of one shape. Inside a compiled block it is plain: the compiler fuses it there."""
    if torch.compiler.is_compiling() or isinstance(gate, DTensor):
        return F.silu(gate) * up
    return liger_product(gate, up)


def replace_swiglu(module: nn.Module, where: torch.device) -> bool:
    """Make `module` compute the fused product if it is shown to be down(silu(gate(x)) * up(x)); return whether."""
    roles = next((roles for roles in _list_candidates(module) if _is_swiglu(module, roles, where)), None)
    if roles is None:
        return False
    module_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return module_forward(*args, **kwargs)
        return getattr(module, roles.down)(multiply_by_silu(*roles.compute_halves(module, args[0])))

    module.forward = forward
    return True


def _list_candidates(module: nn.Module) -> Iterator[LinearRoles]:
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
            yield LinearRoles(gate=gate, up=up[0] if up else None, down=down)


def _is_swiglu(module: nn.Module, roles: LinearRoles, where: torch.device) -> bool:
    """Try the module's forward with small Linears in the place of its Linears."""
    small = copy(module)
    small._modules = {
        name: deepcopy(child)
        for name, child in module._modules.items()
        if child is not None and not isinstance(child, nn.Linear)
    }
    num_joined = 1 if roles.up else 2
    shapes = {roles.gate: (IN_FEATURES, num_joined * HIDDEN), roles.up: (IN_FEATURES, HIDDEN), roles.down: (HIDDEN, 8)}
    for seed, (name, (num_in, num_out)) in enumerate(shapes.items()):
        if name is not None:
            small._modules[name] = _make_linear(num_in, num_out, getattr(module, name).bias is not None, seed, where)

    def run_fused(hidden: Tensor) -> Tensor:
        return getattr(small, roles.down)(multiply_by_silu(*roles.compute_halves(small, hidden)))  # type: ignore[no-any-return]

    hidden = make_random_numbers(2, 3, IN_FEATURES, where=where, seed=7)
    return all(computes_same(small.train(trains).forward, run_fused, (hidden,), BOUND) for trains in (False, True))


def _make_linear(num_in: int, num_out: int, has_bias: bool, seed: int, where: torch.device) -> nn.Linear:
    linear = nn.Linear(num_in, num_out, bias=has_bias, device="meta").to_empty(device=where)
    with torch.no_grad():
        linear.weight.copy_(make_random_numbers(num_out, num_in, where=where, seed=seed))
        if has_bias:
            linear.bias.copy_(make_random_numbers(num_out, where=where, seed=seed + 10))
    return linear
