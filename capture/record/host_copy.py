"""Copy the job's tensors to host memory without waiting for a device."""

from collections.abc import Mapping

import torch
from torch import Tensor


def copy_to_host(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[torch.cuda.Event]]:
    """Begin copies that the job's later changes do not reach. Those from CUDA are complete after the events."""
    copies = {
        name: _copy_to_host(tensor.detach() if tensor.requires_grad else tensor) for name, tensor in tensors.items()
    }
    events = []
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return copies, events


def _copy_to_host(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)
    return tensor.to("cpu", copy=True)


def is_capturing_graph(tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether a CUDA graph is being recorded: then the tensors hold nothing yet that could be copied."""
    return any(tensor.is_cuda for tensor in tensors.values()) and torch.cuda.is_current_stream_capturing()
