"""Take from a replay's gradient what the job recorded of its own: norms, sampled elements and signatures."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from capture.file_format.gradient_signature import GradientSignature
from capture.file_format.optimizer_step import Sample
from replay.tolerances.job_bounds import LEAST_RMS

# So much of the gradients, or of the optimizer's states, is held whole on each rank at a time.
BATCH_BYTES = 128 * 2**20
KeyT = TypeVar("KeyT")


# Without slots, for the property that is computed once.
@dataclass(frozen=True, kw_only=True)
class GradientSamples:
    """The gradient at the end of a window, of every parameter that has one.

    norms       by parameter
    sizes       numbers of elements, by parameter
    values      the elements that the job sampled, by parameter and index of the first element
    signatures  the elements of the job's signatures, by parameter and index of the first element
    """

    norms: Mapping[str, float]
    sizes: Mapping[str, int]
    values: Mapping[tuple[str, int], tuple[float, ...]]
    signatures: Mapping[tuple[str, int], tuple[float, ...]] = field(default_factory=dict)

    @cached_property
    def whole_rms(self) -> float:
        """The root mean square of all parameters' gradients together."""
        return math.sqrt(sum(norm * norm for norm in self.norms.values()) / max(sum(self.sizes.values()), 1))

    def compute_rms(self, name: str) -> float:
        """Compute the root mean square of one parameter's gradient."""
        return self.norms[name] / math.sqrt(max(self.sizes[name], 1))


@torch.no_grad()
def sample_gradients(
    gradients: Iterable[tuple[str, Tensor]],
    samples: Mapping[str, Sequence[Sample]],
    signatures: Mapping[str, Sequence[GradientSignature]],
    *,
    batch_bytes: int = BATCH_BYTES,
) -> GradientSamples:
    """Take the norms and sizes of whole gradients, and the elements that the job sampled.

    All ranks have to call it together, since iterating over a backend's `gradients` gathers each of them.

    samples, signatures  of the job, by the name that the parameter has in the replay
    batch_bytes          how much of the gradients is held whole at a time
    """
    norms: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    values: dict[tuple[str, int], Tensor] = {}
    signed: dict[tuple[str, int], Tensor] = {}
    for batch in batch_by_size(gradients, batch_bytes=batch_bytes):
        norms |= zip(batch, measure_norms(batch.values()), strict=True)
        for name, gradient in batch.items():
            sizes[name] = gradient.numel()
            for sample in samples.get(name, ()):
                values[name, sample.start] = copy_elements(gradient, sample.start, len(sample.values))
            for signature in signatures.get(name, ()):
                signed[name, signature.start] = copy_elements(
                    gradient, signature.start, len(signature.values), stride=signature.stride
                )
    fetched = iter(fetch_together([*norms.values(), *values.values(), *signed.values()]))
    return GradientSamples(
        norms={name: next(fetched)[0] for name in norms},
        sizes=sizes,
        values={place: next(fetched) for place in values},
        signatures={place: next(fetched) for place in signed},
    )


def batch_by_size(
    tensors: Iterable[tuple[KeyT, Tensor]], *, batch_bytes: int = BATCH_BYTES
) -> Iterator[dict[KeyT, Tensor]]:
    """Put tensors together, by key, until they have `batch_bytes`: each may have been gathered from all ranks."""
    batch: dict[KeyT, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        batch[name] = tensor
        num_bytes += tensor.numel() * tensor.element_size()
        if num_bytes >= batch_bytes:
            yield batch
            batch, num_bytes = {}, 0
    if batch:
        yield batch


def measure_norms(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Measure the norm of each tensor: in a few operations for all of them, since each one costs a GPU a launch.

    dtype  to add up the squares in; None: fp64 on a CPU, which adds them up naively, and elsewhere the tensors' own
    """
    whole = list(tensors)
    if dtype is None and whole[0].device.type == "cpu":
        dtype = torch.float64
    return torch._foreach_norm(whole, dtype=dtype)


def copy_elements(whole: Tensor, start: int, count: int, *, stride: int = 1) -> Tensor:
    """Copy elements of the flattened tensor, as fp64, so that they do not keep all of it."""
    return whole.reshape(-1)[start::stride][:count].to(torch.float64, copy=True)


def fetch_together(tensors: Sequence[Tensor]) -> list[tuple[float, ...]]:
    """Return the elements of small tensors, those of each device by one copy, since each copy waits for the device."""
    fetched: list[tuple[float, ...]] = [()] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        sizes = [tensors[number].numel() for number in numbers]
        elements = iter(torch.cat([tensors[number].reshape(-1) for number in numbers]).tolist())
        for number, size in zip(numbers, sizes, strict=True):
            fetched[number] = tuple(islice(elements, size))
    return fetched


def compute_scale(gradient: GradientSamples, name: str) -> float:
    """Compute the root mean square of a parameter's gradient, or LEAST_RMS of all parameters' if that is more.

    inf where the parameter's is not finite.
    """
    rms = gradient.compute_rms(name)
    if not math.isfinite(rms):
        return math.inf
    whole = LEAST_RMS * gradient.whole_rms
    return max(rms, whole) if math.isfinite(whole) else rms
