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
    """Sum the gradient of an input once for all layers of a module that are given it, such as query, key and value.

    What else the module does with its input is not touched, as only these layers compute from the returned tensor.
    """

    def __init__(self, module: nn.Module) -> None:
        self._last: tuple[Tensor, Tensor] | None = None
        # The hook before a forward is there because a forward that failed has not run the hook at its end.
        module.register_forward_pre_hook(self._forget)
        module.register_forward_hook(self._forget)

    def sum_gradient(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        if self._last is None or self._last[0] is not tensor:
            self._last = tensor, sum_gradient(tensor, group)
        return self._last[1]

    def _forget(self, *_: Any) -> None:
        self._last = None


class SplitColumns(ParallelStyle):
    """Compute, on each rank, its share of the output features from the whole input.

    shared_input  the input of other layers, too
    whole_shape   return the share as a DTensor, which knows the whole shape
    """

    def __init__(self, *, shared_input: SharedInput | None = None, whole_shape: bool = False) -> None:
        self.sum_gradient = sum_gradient if shared_input is None else shared_input.sum_gradient
        self.whole_shape = whole_shape

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))
        group = device_mesh.get_group()
        # Any, since mypy does not allow replacing methods.
        linear: Any = module

        def compute_columns(inputs: Tensor) -> Tensor:
            share = F.linear(self.sum_gradient(inputs, group), *read_local_parameters(linear))
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

        linear.forward = compute_columns
        return module


class SplitRows(ParallelStyle):
    """Compute, on each rank, from its share of the input features; sum the outputs, and add the bias once.

    writable  return a tensor that the model may change in place, as mixtures add to their shared expert's output
    """

    def __init__(self, *, writable: bool = False) -> None:
        self.writable = writable

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        distribute(module, device_mesh, weight=Shard(1), bias=Replicate())
        group = device_mesh.get_group()
        linear: Any = module

        def compute_rows(share: Tensor) -> Tensor:
            weight, bias = read_local_parameters(linear)
            summed = sum_over(F.linear(share, weight), group)
            if bias is None:
                return summed.clone() if self.writable else summed
            return summed + bias

        linear.forward = compute_rows
        return module


class GatheredColumns(ParallelStyle):
    """Compute, on each rank, its share of the output features from the whole input, and gather the others' shares.

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

        def gather_columns(call: Callable[..., Tensor], inputs: Tensor) -> Tensor:
            return gather_last(call(sum_gradient(inputs, group)), group)

        wrap_local_forward(module, gather_columns)
        return module


class SplitExperts(ParallelStyle):
    """Hold and compute, on each rank, its share of a mixture's experts, for all tokens; sum the outputs.

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
        num_local_experts = num_experts // device_mesh.size()
        experts.num_experts = num_local_experts
        rank, group = device_mesh.get_local_rank(), device_mesh.get_group()
        # Since 5.21 transformers' experts skip a route whose index is one behind the last expert.
        skips_last_index = find_spec("transformers.distributed.expert_parallel") is not None and not self.by_rows
        if skips_last_index:
            experts._is_expert_parallel = True

        def run_by_rows(call: Callable[..., Tensor], hidden: Tensor) -> Tensor:
            return gather_first(call(split_first(hidden, group)), group)

        def run_by_routes(call: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            hidden, weights = sum_gradient(hidden, group), sum_gradient(weights, group)
            is_local = index // num_local_experts == rank
            local_index = torch.where(
                is_local,
                index % num_local_experts,
                num_local_experts if skips_last_index else index % num_local_experts,
            )
            out = call(hidden, local_index, weights.masked_fill(~is_local, 0.0))
            # Where no token came to this rank's experts, the parameters still get a gradient, of zeros: other ranks
            # wait for it when gradients are reduced.
            if not out.requires_grad and torch.is_grad_enabled():
                out = out + sum(p.to_local().flatten()[:1].sum() for p in experts.parameters()) * 0.0
            return sum_over(out, group)

        wrap_local_forward(module, run_by_rows if self.by_rows else run_by_routes)
        return module


def wrap_local_forward(module: nn.Module, wrapper: Callable[..., Tensor]) -> None:
    """Replace the forward of `module` by `wrapper`.

    It is called with a function that runs the old forward with this rank's shares of the parameters, and then with the
    arguments of the forward.
    """
    # The cast is there since mypy does not allow replacing methods.
    forward, patched = module.forward, cast("Any", module)

    def call(*args: Any, **kwargs: Any) -> Any:
        patched.forward = forward
        try:
            shares = {name: _to_local(parameter) for name, parameter in module.named_parameters(recurse=False)}
            return functional_call(module, shares, args, kwargs)
        finally:
            patched.forward = partial(wrapper, call)

    patched.forward = partial(wrapper, call)


def _to_local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gather_last(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' shares of the last dim side by side; all ranks then compute the same, so backward takes this
    rank's share of the gradient.
    """
    return gather_first(share.transpose(0, -1), group).transpose(0, -1).contiguous()


def gather_first(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' shares of the first dim one after the other; backward takes this rank's share of
    the gradient.
    """
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


def all_reduce_copy(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over `group`, for an autograd.Function to return from its forward.

    What is returned is a view: if torch 2.11 compiles the function, a tensor that it wrote to and returns would get no
    gradient (pytorch issue #180642).
    """
    summed = tensor.clone()
    dist.all_reduce(summed, group=group)
    return summed.view_as(summed)


def distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Replace parameters, equal on all ranks, by the shards that `placements` give them; None stays None."""
    for name, placement in placements.items():
        parameter = getattr(module, name)
        if parameter is not None:
            # Without a source rank DTensor does not broadcast: the values are equal on all ranks.
            shard = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            setattr(module, name, nn.Parameter(shard, parameter.requires_grad))


def read_local_parameters(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Return this rank's part of the weight, and of the bias if there is one."""
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
        return all_reduce_copy(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _all_gather(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = share.new_empty(share.shape[0] * group.size(), *share.shape[1:])
    dist.all_gather_into_tensor(whole, share.contiguous(), group=group)
    # A view for the same reason as in `all_reduce_copy`.
    return whole.view_as(whole)


class _GatherFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(share, group)

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
        return _all_gather(gradient, ctx.group), None
