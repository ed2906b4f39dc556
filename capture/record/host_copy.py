"""Copy the job's tensors to host memory without waiting for a device."""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# The largest tensor that is packed with others. Packing a larger one on the device costs more than a copy of its own.
_MAX_PACKED_BYTES = 2**20
# Memory for arguments: so many pieces are kept between passes, each of at least and at most so many bytes. Each tensor
# begins where a line of the processor's cache may begin.
_MAX_KEPT, _MAX_PLACES = 4, 256
_MIN_BYTES, _MAX_BYTES, _ALIGNMENT = 2**16, 2**24, 64
# Streams by their device and number.
_known_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
_MAX_STREAMS = 64


def copy_to_host(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[torch.cuda.Event]]:
    """Begin copies that later changes of the tensors do not reach. Those from CUDA are complete after the events.

    Small tensors of one device go in one copy: a device stops its other work for each.
    """
    copies: dict[str, Tensor] = {}
    small_packs: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if tensor.nbytes <= _MAX_PACKED_BYTES and tensor.is_contiguous():
            small_packs.setdefault(tensor.device, {})[name] = tensor
        else:
            copies[name] = _copy_to_host(tensor)
    for pack in small_packs.values():
        copies |= copy_packed(pack)
    events = []
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return copies, events


class HostMemory:
    """Memory on the host for the arguments of one pass at a time, and events to go with it.

    is_pinned  a copy from CUDA leaves the host free to go on
    events     by number of the device
    places     contiguous tensors in the memory, by dtype, shape and their first byte: a pass often has the shapes of an
               earlier one
    """

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        self.num_bytes = num_bytes
        self.is_pinned = is_pinned
        self.events: dict[int, torch.cuda.Event] = {}
        # What is made in inference mode can only be written to in inference mode.
        with torch.inference_mode(False):
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        self.places: dict[tuple[torch.dtype, torch.Size, int], Tensor] = {}

    def make_place(self, tensor: Tensor, begin: int) -> Tensor:
        """Make the place of a tensor like this one at the byte `begin`."""
        if len(self.places) >= _MAX_PLACES:
            self.places.clear()
        with torch.inference_mode(False):
            place = self._bytes[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.places[tensor.dtype, tensor.shape, begin] = place
        return place


class ArgumentCopies(NamedTuple):
    """Copies of a pass's arguments on the host, complete once every event has happened.

    memory  of the copies, if a later pass may have it
    kept    memory for later passes
    """

    tensors: dict[str, Tensor]
    events: list[torch.cuda.Event]
    num_bytes: int
    memory: HostMemory | None
    kept: deque[HostMemory]

    def give_back(self) -> None:
        """Let a later pass have the memory. By now the copies are complete, and nobody looks at them any more."""
        if self.memory is not None:
            self.kept.append(self.memory)


class ArgumentCopier:
    """Copies the arguments of a pass as it begins, when a device may stand idle until it gets its first work.

    So it uses memory and events again, which take longer to get than the copies. And each tensor is copied by itself:
    to pack three of them takes 0.2 ms longer where the job's caches hold other things (H200).
    """

    def __init__(self) -> None:
        # The writer's thread gives back at the end at which the job's thread takes: the latest may still be in a cache.
        self._kept: deque[HostMemory] = deque(maxlen=_MAX_KEPT)

    def copy(self, tensors: Mapping[str, Tensor]) -> ArgumentCopies:
        """Begin copies that later changes of the tensors do not reach."""
        num_bytes, begins, devices = 0, {}, set()
        for name, tensor in tensors.items():
            begins[name] = num_bytes
            num_bytes += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
            if tensor.is_cuda:
                devices.add(tensor.get_device())
        memory = self._take(num_bytes, is_pinned=bool(devices))
        copies = {}
        for name, tensor in tensors.items():
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if memory is not None and tensor.is_contiguous():
                # Looked up without a function of its own, which would be called for each tensor.
                place = memory.places.get((tensor.dtype, tensor.shape, begins[name]))
                if place is None:
                    place = memory.make_place(tensor, begins[name])
                copies[name] = place.copy_(tensor, non_blocking=memory.is_pinned)
            else:
                copies[name] = _copy_to_host(tensor)
        events = []
        for device in devices:
            event = None if memory is None else memory.events.get(device)
            if event is None:
                event = torch.cuda.Event(blocking=True)
                if memory is not None:
                    memory.events[device] = event
            event.record(_find_stream(device))
            events.append(event)
        return ArgumentCopies(tensors=copies, events=events, num_bytes=num_bytes, memory=memory, kept=self._kept)

    def _take(self, num_bytes: int, *, is_pinned: bool) -> HostMemory | None:
        """Take memory for so many bytes; None for more than are kept."""
        if num_bytes > _MAX_BYTES:
            return None
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = None
        if memory is None or memory.num_bytes < num_bytes or memory.is_pinned != is_pinned:
            # The next passes may be somewhat longer, and torch pins powers of two.
            memory = HostMemory(max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length()), is_pinned=is_pinned)
        return memory


def copy_packed(pack: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Begin to copy contiguous tensors of one device, in one copy to the host."""
    if len(pack) == 1:
        [(name, tensor)] = pack.items()
        return {name: _copy_to_host(tensor)}
    groups: dict[torch.dtype, dict[str, Tensor]] = {}
    # The larger a dtype, the earlier it comes: so each group begins where its dtype may begin.
    for name, tensor in sorted(pack.items(), key=lambda pair: -pair[1].itemsize):
        groups.setdefault(tensor.dtype, {})[name] = tensor
    parts = [tensor.view(-1) for group in groups.values() for tensor in group.values()]
    # Tensors of several dtypes would be joined by a kernel each, bytes are by one for all.
    joined = torch.cat(parts if len(groups) == 1 else [part.view(torch.uint8) for part in parts])
    flat = joined if joined.device.type == "cpu" else _copy_to_host(joined)
    copies, begin = {}, 0
    for dtype, group in groups.items():
        end = begin + sum(tensor.nbytes for tensor in group.values())
        values = flat if len(groups) == 1 else flat[begin:end].view(dtype)
        begin, offset = end, values.storage_offset()
        for name, tensor in group.items():
            copies[name] = values.as_strided(tensor.shape, tensor.stride(), offset)
            offset += tensor.numel()
    return copies


def _copy_to_host(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        # Only a copy into pinned memory leaves the host free to go on.
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)
    return tensor.to("cpu", copy=True)


def is_capturing_graph(tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether a CUDA graph is being recorded: then the tensors hold nothing yet that could be copied."""
    for tensor in tensors.values():
        if tensor.is_cuda:
            # CUDA records no graph on its default stream, where nearly all jobs run.
            is_default = torch._C._cuda_getCurrentRawStream(tensor.get_device()) == 0
            return not is_default and torch.cuda.is_current_stream_capturing()
    return False


def _find_stream(device: int) -> torch.cuda.Stream:
    """Return the current stream of a device.

    torch.cuda.current_stream takes 0.06 ms where the job's caches hold other things (H200): it goes through six
    functions and makes an object. A stream's number, which torch's compiled code asks for in the same way, takes 0.01.
    """
    key = device, torch._C._cuda_getCurrentRawStream(device)
    stream = _known_streams.get(key)
    if stream is None:
        if len(_known_streams) >= _MAX_STREAMS:
            _known_streams.clear()
        stream = _known_streams[key] = torch.cuda.current_stream(device)
    return stream
