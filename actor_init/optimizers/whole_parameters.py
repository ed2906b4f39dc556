"""Step on sharded parameters with a class that needs whole ones: gather each, step on it alone, and cut it again."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


class WholeParameterOptimizer(Optimizer):
    """An optimizer over DTensors, each of which `engine` steps on as a whole.

    Muon's step of a matrix, Adafactor's of its rows and an 8-bit state's blocks are not those of a shard. State of a
    parameter's own shape is sharded as the parameter is, other state is whole on each rank. One parameter after the
    other is whole, so this takes room for one.
    """

    def __init__(self, engine: Callable[..., Optimizer], groups: Iterable[dict[str, Any]]) -> None:
        self._engine = engine
        self._accepted = frozenset(inspect.signature(engine).parameters) - {"params"}
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = {name: value for name, value in group.items() if name in self._accepted}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_on(parameter, settings)
        return loss

    def _step_on(self, parameter: Any, settings: dict[str, Any]) -> None:
        whole = nn.Parameter(_gather(parameter.detach()))
        whole.grad = _gather(parameter.grad)
        optimizer = self._engine([{"params": [whole], **settings}])
        if state := self.state.get(parameter):
            optimizer.state[whole] = {name: _gather(value) for name, value in state.items()}
        optimizer.step()
        parameter.copy_(_cut(whole.detach(), parameter))
        self.state[parameter] = {name: _cut(value, parameter) for name, value in optimizer.state[whole].items()}


def _gather(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _cut(value: Any, parameter: DTensor) -> Any:
    """Shard a whole tensor as the parameter is; return what has another shape as it is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    # Every rank has the same whole tensor, so nothing is sent.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
