"""Split linear layers over the tp axis, and sum over it, as in Megatron-LM's tensor parallelism.

Parameters are DTensors, so that FSDP2 can shard them further and checkpoints name them whole; computation uses plain
tensors. DTensor's own styles compute with DTensors: every operation is dispatched in Python, and its layout is derived
again for every new length, several milliseconds an operation.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from operator import mul
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D


class SharedInput:
    """Sums the gradient of an input once for all layers of a module that are given it, such as query, key and value.

    What else the module does with its input is not touched, as only these layers compute from the returned tensor.
    """

    def __init__(self, module: nn.Module) -> None:
        self._last: tuple[Tensor, Tensor] | None = None
        module.register_forward_pre_hook(self._forget)  # a forward that failed has not come to its end
        module.register_forward_hook(self._forget)

    def sum_gradient(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        if self._last is None or self._last[0] is not tensor:
            self._last = tensor, sum_gradient(tensor, group)
        return self._last[1]

    def _forget(self, *_: Any) -> None:
        self._last = None


class SplitColumns(ParallelStyle):
    """Each rank computes its share of the output features from the whole input.

    shared       the input of other layers, too
    whole_shape  return the share as a DTensor, which knows the whole shape
    """

    def __init__(self, *, shared: SharedInput | None = None, whole_shape: bool = False) -> None:
        self.sum_gradient = sum_gradient if shared is None else shared.sum_gradient
        self.whole_shape = whole_shape

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))
        group = device_mesh.get_group()
        linear: Any = module  # mypy does not allow replacing methods

        def columns(inputs: Tensor) -> Tensor:
            share = F.linear(self.sum_gradient(inputs, group), *_own(linear))
            if not self.whole_shape:
                return share
            shape = torch.Size((*share.shape[:-1], linear.weight.shape[0]))
            stride = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]
            return DTensor.from_local(
                share,
                device_mesh,
                [Shard(share.ndim - 1)],
                run_check=False,
                shape=shape,
                stride=stride,
            )

        linear.forward = columns
        return module


class SplitRows(ParallelStyle):
    """Each rank computes from its share of the input features; the outputs are summed, and the bias is added once.

    writable  return a tensor that the model may change in place, as mixtures add to their shared expert's output
    """

    def __init__(self, *, writable: bool = False) -> None:
        self.writable = writable

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        distribute(module, device_mesh, weight=Shard(1), bias=Replicate())
        group = device_mesh.get_group()
        linear: Any = module

        def rows(share: Tensor) -> Tensor:
            weight, bias = _own(linear)
            summed = sum_over(F.linear(share, weight), group)
            if bias is None:
                return summed.clone() if self.writable else summed
            return summed + bias

        linear.forward = rows
        return module


class GatheredColumns(ParallelStyle):
    """Each rank computes its share of the output features from the whole input, and gets the others' shares.

    Outside of the module everything is whole, and equal on all ranks, so it fits a Linear or Conv1D of any model. One
    whose output features do not divide among the ranks stays whole.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dim = 1 if isinstance(module, Conv1D) else 0
        weight = module.get_parameter("weight")
        if weight.shape[dim] % device_mesh.size():
            return module
        distribute(module, device_mesh, weight=Shard(dim), bias=Shard(0))
        if isinstance(module, Conv1D):
            module.nf //= device_mesh.size()
        group = device_mesh.get_group()

        def columns(call: Callable[..., Tensor], inputs: Tensor) -> Tensor:
            return gather_last(call(sum_gradient(inputs, group)), group)

        call_with_own_shares(module, columns)
        return module


class SplitExperts(ParallelStyle):
    """Each rank holds and computes its share of a mixture's experts, for all tokens; the outputs are summed.

    by_rows  the experts are given and return a row for each expert and token, and know no routes
    """

    def __init__(self, *, by_rows: bool = False) -> None:
        self.by_rows = by_rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts: Any = module
        names = [name for name, _ in module.named_parameters(recurse=False)]
        num_experts = module.get_parameter(names[0]).shape[0]
        if num_experts % device_mesh.size():
            return module
        distribute(module, device_mesh, **dict.fromkeys(names, Shard(0)))
        own = num_experts // device_mesh.size()
        experts.num_experts = own
        rank, group = device_mesh.get_local_rank(), device_mesh.get_group()
        # since 5.21 transformers' experts skip routes to the expert behind the last
        skips = find_spec("transformers.distributed.expert_parallel") is not None and not self.by_rows
        if skips:
            experts._is_expert_parallel = True

        def rows(call: Callable[..., Tensor], hidden: Tensor) -> Tensor:
            return gather_first(call(split_first(hidden, group)), group)

        def routed(call: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            hidden, weights = sum_gradient(hidden, group), sum_gradient(weights, group)
            is_own = index // own == rank
            local_index = torch.where(is_own, index % own, own if skips else index % own)
            out = call(hidden, local_index, weights.masked_fill(~is_own, 0.0))
            if not out.requires_grad and torch.is_grad_enabled():  # no token came; other ranks wait for gradients
                out = out + sum(p.to_local().flatten()[:1].sum() for p in experts.parameters()) * 0.0
            return sum_over(out, group)

        call_with_own_shares(module, rows if self.by_rows else routed)
        return module


def call_with_own_shares(module: nn.Module, around: Callable[..., Tensor]) -> None:
    """Replace the forward of `module` by `around`, which gets the forward with the own shares, and its arguments."""
    forward, own = module.forward, cast("Any", module)  # mypy does not allow replacing methods

    def call(*args: Any, **kwargs: Any) -> Any:
        own.forward = forward
        try:
            shares = {name: _local(parameter) for name, parameter in module.named_parameters(recurse=False)}
            return functional_call(module, shares, args, kwargs)
        finally:
            own.forward = partial(around, call)

    own.forward = partial(around, call)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gather_last(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' shares of the last dim side by side; all ranks then compute the same, so backward takes the own
    share of the gradient.
    """
    return gather_first(share.transpose(0, -1), group).transpose(0, -1).contiguous()


def gather_first(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' shares of the first dim one after the other; backward takes the own share of the gradient."""
    whole: Tensor = _GatherFirst.apply(share, group)
    return whole


def split_first(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's share of the first dim; backward gathers the ranks' gradients."""
    share: Tensor = _SplitFirst.apply(whole, group)
    return share


def sum_gradient(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `tensor` unchanged; backward sums its gradient over `group`."""
    summed: Tensor = _SumGradient.apply(tensor, group)
    return summed


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over `group` on each rank; all ranks then compute the same, so the gradient is passed on
    unchanged.
    """
    summed: Tensor = _SumOver.apply(tensor, group)
    return summed


def summed_copy(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over `group`, for an autograd.Function to return from its forward.

    A view: compiled by torch 2.11, the written tensor itself would get no gradient (pytorch issue #180642).
    """
    summed = tensor.clone()
    dist.all_reduce(summed, group=group)
    return summed.view_as(summed)


def distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Replace parameters, equal on all ranks, by the shards that `placements` give them; None stays None."""
    for name, placement in placements.items():
        parameter = getattr(module, name)
        if parameter is not None:
            shard = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)  # equal on all ranks
            setattr(module, name, nn.Parameter(shard, parameter.requires_grad))


def _own(linear: Any) -> tuple[Tensor, Tensor | None]:
    return linear.weight.to_local(), None if linear.bias is None else linear.bias.to_local()


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed_copy(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _gathered(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = share.new_empty(share.shape[0] * group.size(), *share.shape[1:])
    dist.all_gather_into_tensor(whole, share.contiguous(), group=group)
    return whole.view_as(whole)  # as in `summed_copy`


class _GatherFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(share, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class _SplitFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.group), None
