"""Split linear layers over the tp axis, and sum over it, as in Megatron-LM's tensor parallelism.

Parameters are DTensors, so that FSDP2 can shard them further and checkpoints name them whole; computation uses plain
tensors. DTensor's own styles compute with DTensors: every operation is dispatched in Python, and its layout is derived
again for every new length, several milliseconds an operation.
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

    whole_shape  return the share as a DTensor, which knows the whole shape
    """

    def __init__(self, *, whole_shape: bool = False) -> None:
        self.whole_shape = whole_shape

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        _distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))
        group = device_mesh.get_group()
        linear: Any = module  # mypy does not allow replacing methods

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
    """Each rank computes from its share of the input features; the outputs are summed, and the bias is added once."""

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


def _distribute(module: nn.Linear, mesh: DeviceMesh, **placements: Placement) -> None:
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
