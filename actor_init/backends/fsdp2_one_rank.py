"""Spare FSDP2 on one rank two costs of its gradients that a job of several ranks does not have.

FSDP2 joins the gradients of a module into one tensor, reduces that over the ranks, and writes the result to another:

* to join them, torch lists on the host, in pinned memory, the tensor of each 2,048 bytes of a rank's share. A share of
  one rank is the whole: the list of a block of 620 M parameters takes 17 ms of a processor, longer than the block's
  backward takes a Hopper GPU, and the GPU waits (`get_chunk_cat_metadata` in pytorch's
  aten/src/ATen/native/cuda/TensorShape.cu, torch 2.11). In a job of 8 ranks it is an eighth of that
* nothing is reduced, and the result is a copy
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def spare_one_rank(model: nn.Module, device: torch.device) -> None:
    """Have the modules of a model, which one rank holds whole, join gradients without a list, and not copy them.

    torch lets a program choose both from 2.9 on. Under an earlier one nothing is spared.
    """
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        return
    _join_without_list(device.type)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            comm: Any = OneRankReduceScatter()
            module.set_custom_reduce_scatter(comm)


class OneRankReduceScatter:
    """Implements torch's `ReduceScatter` for one rank: the result is the tensor that was to be reduced.

    FSDP2 asks for a tensor to join the gradients of a module in, then for one of the same size for the result. The
    second is the first, and torch leaves out a copy from a tensor to itself.
    """

    def __init__(self) -> None:
        self._joined: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        joined, self._joined = self._joined, None
        # A module whose backward failed in between has left a tensor that was not asked for again.
        if joined is not None and (joined.shape, joined.dtype) == (torch.Size(size), dtype):
            return joined
        self._joined = torch.empty(size, dtype=dtype, device=device)
        return self._joined

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce, where torch calls this for one rank too."""
        output_tensor.copy_(input_tensor)


@cache
def _join_without_list(device_type: str) -> torch.library.Library:
    """Replace, in this process, the operation of FSDP2 that joins gradients. For several ranks it stays torch's own.

    FSDP2 has no setting for it. torch keeps a registration as long as its library, which the cache holds.
    """
    library = torch.library.Library("fsdp", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        library.impl("chunk_cat", join_gradients, device_type.upper(), allow_override=True)
    return library


def join_gradients(tensors: Sequence[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """Write tensors into `out` [num_chunks, elements], as torch's `_chunk_cat` does, in the dtype of `out`."""
    if num_chunks == 1 and dim == 0:
        pieces = out.view(-1).split([tensor.numel() for tensor in tensors])
        views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        torch._foreach_copy_(views, list(tensors))
    else:
        torch._chunk_cat(list(tensors), dim, num_chunks, out=out)
