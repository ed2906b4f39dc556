"""Mark where torch's random generators stand, so that two forwards can be told to have drawn the same random numbers.

A mark is short and stands for a whole state: two states with one mark are equal. Of the CPU's generator, whose state is
5 kB, it is a digest. A device's generator has a state of 16 bytes, its seed and its offset, which is the mark itself.
"""

import hashlib
import struct
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from capture.file_format.tensor_codec import RandomStates, view_bytes

# By the type of the generator's device, as in `RandomStates`.
GeneratorMarks = Mapping[str, bytes]
CPU, CUDA = "cpu", "cuda"
# So many numbers are drawn at most to count those of a forward; it takes a tenth of a second.
MAX_COUNTED = 20_000
_NUM_DIGEST_BYTES = 8
# The state of a CUDA device's generator, as torch.Generator.get_state has it: the seed and the offset.
CUDA_STATE = struct.Struct("<Qq")
# Beside the marks: how the CPU draws, as `describe_cpu_random` has it.
CPU_KIND = "cpu_kind"


class GeneratorSnapshot(NamedTuple):
    """The states of torch's generators where a forward begins or ends; `cuda` is None without a CUDA device."""

    cpu: Tensor
    cuda: bytes | None

    def to_marks(self) -> dict[str, bytes]:
        """Return a mark of each state, and how this CPU draws."""
        marks = {CPU: _mark_tensor(self.cpu), CPU_KIND: describe_cpu_random()}
        if self.cuda is not None:
            marks[CUDA] = mark_state(self.cuda)
        return marks


def take_generator_snapshot(cuda_device: torch.device | None = None) -> GeneratorSnapshot:
    """Take the states of the CPU's generator and a CUDA device's, without waiting for that."""
    return GeneratorSnapshot(cpu=torch.default_generator.get_state(), cuda=read_cuda_state(cuda_device))


def read_cuda_state(device: torch.device | None) -> bytes | None:
    """Read the state of a CUDA device's generator, which is on the host; None without a device.

    The functions of torch that do the same go through several others first. And torch.Generator.get_state makes a
    tensor, which takes 0.03 ms where the job's caches hold other things (H200); seed and offset take 0.01.
    """
    if device is None:
        return None
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return CUDA_STATE.pack(generator.initial_seed(), generator.get_offset())


def mark_state(state: bytes) -> bytes:
    if len(state) <= CUDA_STATE.size:
        return state
    return hashlib.blake2b(state, digest_size=_NUM_DIGEST_BYTES).digest()


def _mark_tensor(state: Tensor) -> bytes:
    """Mark a state. The tensor is held meanwhile: a view of its bytes does not hold it."""
    return mark_state(bytes(view_bytes(state)))


def mark_recorded_states(states: RandomStates) -> dict[str, bytes]:
    """Mark the recorded states before a forward; empty where none were recorded."""
    torch_states = states.get("torch", {})
    recorded = {CPU: torch_states.get("cpu"), CUDA: torch_states.get("cuda")}
    return {name: mark_state(state) for name, state in recorded.items() if state}


def count_drawn_numbers(states: RandomStates, after: GeneratorMarks) -> int | None:
    """Count the numbers that a forward on the CPU drew, from the states before it; None where that cannot be told."""
    state = states.get("torch", {}).get("cpu")
    if state is None or CPU not in after:
        return None
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    number = torch.empty(1, dtype=torch.int32)
    for num_drawn in range(MAX_COUNTED + 1):
        if _mark_tensor(generator.get_state()) == after[CPU]:
            return num_drawn
        number.random_(generator=generator)
    return None


@cache
def describe_cpu_random() -> bytes:
    """Name how this CPU makes random masks: a digest of one that a generator of its own draws.

    Torch draws a mask number by number, or, on Intel's processors, in one draw by MKL. So equal states of generators
    tell of equal masks only where this name is the same.
    """
    generator = torch.Generator().manual_seed(7)
    mask = torch.empty(256, device="cpu").bernoulli_(0.5, generator=generator)
    drawn = bytes(mask.to(torch.uint8).tolist())
    return mark_state(drawn + _mark_tensor(generator.get_state()))
