"""Find the modules of a model that choose experts for tokens.

They are found by what their code does, not by the names of families: a router calls `topk`, and it or its parts are
named after experts. In most families that is a module of its own, which returns the numbers of the chosen experts; in
others the block that holds the experts, or a module that returns a score for each expert, 0 for those not chosen.

Shape letters: T tokens, E experts, K experts a token.
"""

import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

from torch import Tensor, nn

# Where transformers samples from a model's output, which also calls `topk`.
_GENERATION = "transformers.generation"


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of `model` by name, in the model's order; empty for a dense model.

    The innermost modules count: a model that holds a router is none. A module that is called a router and chooses
    without `topk` counts where nothing around it or in it does.
    """
    candidates = {name: module for name, module in model.named_modules() if _chooses_by_topk(module)}
    routers = {name: module for name, module in candidates.items() if not _holds_any(name, candidates)}
    for name, module in model.named_modules():
        is_called_router = "router" in type(module).__name__.lower() and not isinstance(module, nn.ModuleList)
        if is_called_router and not any(_is_inside(name, other) or _is_inside(other, name) for other in routers):
            routers[name] = module
    order = [name for name, _ in model.named_modules() if name in routers]
    return {name: routers[name] for name in order}


def calls_topk(module: nn.Module) -> bool:
    """Tell whether a method of the module's class calls `topk`."""
    module_class: Any = type(module)
    return _class_calls_topk(module_class)


def find_choice(value: Any) -> Tensor | None:
    """Find the chosen experts [T, K] in what a module took or returned: the first tensor of integers with two axes."""
    values = value if isinstance(value, tuple | list) else (value,)
    tensors = (tensor for tensor in values if isinstance(tensor, Tensor) and tensor.ndim == 2)
    return next((tensor for tensor in tensors if not tensor.is_floating_point() and not tensor.is_complex()), None)


def _chooses_by_topk(module: nn.Module) -> bool:
    if not calls_topk(module):
        return False
    names = {*vars(module), *module._modules, *module._parameters, type(module).__name__}
    return any("expert" in name.lower() for name in names)


@cache
def _class_calls_topk(module_class: Any) -> bool:
    bases = module_class.__mro__[: module_class.__mro__.index(nn.Module)]
    own_bases = [base for base in bases if not base.__module__.startswith(_GENERATION)]
    return any("topk" in code.co_names for base in own_bases for code in _list_codes(base))


def _list_codes(base: type) -> Iterator[CodeType]:
    for value in vars(base).values():
        function = inspect.unwrap(value) if callable(value) else None
        if inspect.isfunction(function):
            yield function.__code__


def _holds_any(name: str, others: dict[str, nn.Module]) -> bool:
    return any(_is_inside(other, name) for other in others)


def _is_inside(inner: str, outer: str) -> bool:
    """Tell whether the module called `inner` is inside the one called `outer`."""
    return inner != outer and (outer == "" or inner.startswith(f"{outer}."))
