"""Linear layers split over the tp axis, and the sums over it, as Megatron-LM's tensor parallelism has them.

Their parameters are DTensors, for FSDP2 to shard further and for checkpoints to name whole; what they compute are plain
tensors. DTensor's own styles compute with DTensors: every operation is dispatched in Python, and for every new length
its layout is worked out anew, several milliseconds an operation.
"""

from itertools import accumulate
from operator import mul
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class SplitColumns(ParallelStyle):
    """Each rank computes its share of the output features from the whole input.

    whole_shape  the share comes as a DTensor, which knows what it is a share of
    """

    def __init__(self, *, whole_shape: bool = False) -> None:
        self.whole_shape = whole_shape

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        _distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))
        group = device_mesh.get_group()
        linear: Any = module  # mypy keeps methods from being replaced

        def columns(inputs: Tensor) -> Tensor:
            share = F.linear(sum_gradient(inputs, group), *_own(linear))
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
    """Each rank computes from its share of the input features; the outputs are summed, and the bias added once."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        _distribute(module, device_mesh, weight=Shard(1), bias=Replicate())
        group = device_mesh.get_group()
        linear: Any = module

        def rows(share: Tensor) -> Tensor:
            weight, bias = _own(linear)
            summed = sum_over(F.linear(share, weight), group)
            return summed if bias is None else summed + bias

        linear.forward = rows
        return module


def sum_gradient(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`tensor` itself, whose gradient is summed over `group`."""
    summed: Tensor = _SumGradient.apply(tensor, group)
    return summed


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over `group`, on each of its ranks, which all go on to compute the same: its gradient is theirs."""
    summed: Tensor = _SumOver.apply(tensor, group)
    return summed


def summed_copy(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over `group`, for an autograd.Function to return from its forward.

    A view: compiled by torch 2.11, the written tensor itself would get no gradient (pytorch issue #180642).
    """
    summed = tensor.clone()
    dist.all_reduce(summed, group=group)
    return summed.view_as(summed)


def _distribute(module: nn.Linear, mesh: DeviceMesh, **placements: Placement) -> None:
    for name, placement in placements.items():
        parameter = getattr(module, name)
        if parameter is not None:
            shard = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)  # all ranks hold the same
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
