"""Write and read samples of a model's parameters or of their gradients, and say which elements these are.

A sample is a run of NUM_ELEMENTS neighbours of one parameter. The parameter's name and full shape alone decide where
it lies, so it is the same place in any sharding, in the job and in a replay.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from capture.file_format.micro_batch import CaptureError

NUM_ELEMENTS = 4

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The values of neighbouring elements of a flattened parameter, from `start` on, as the job had them."""

    name: str  # without what wrappers put into it
    dtype: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSamples:
    """The samples that one rank took of its weights in one pass, or of its gradients at one step."""

    samples: tuple[Sample, ...]
    num_parameters: int  # parameters of the model, as the rank sees it
    num_frozen: int  # those among them that are not trained
    is_sharded: bool  # this rank holds a part of the samples, other ranks hold the rest
    left_out: Mapping[str, int] = field(default_factory=dict)  # reason: number of parameters

    def text(self) -> str:
        """Return them as JSON, which takes a job's background thread a tenth of the time of nested plain data."""
        samples = {s.name: [s.dtype, s.shape, s.start, s.values] for s in self.samples}
        counts = {"num_parameters": self.num_parameters, "num_frozen": self.num_frozen, "is_sharded": self.is_sharded}
        return json.dumps({"samples": samples, **counts, "left_out": dict(self.left_out)})

    @classmethod
    def of_text(cls, text: str, source: str) -> "ParameterSamples":
        """Read what `text` wrote. Raises CaptureError for anything else."""
        try:
            written = json.loads(text)
            samples = tuple(_sample(name, *parts) for name, parts in written["samples"].items())
            samples_read = cls(samples=samples, **{key: value for key, value in written.items() if key != "samples"})
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
            raise CaptureError(f"{source}: these are no samples of parameters: {text[:80]}") from None
        counts = (samples_read.num_parameters, samples_read.num_frozen, *samples_read.left_out.values())
        if type(samples_read.is_sharded) is not bool or not all(type(count) is int for count in counts):
            raise CaptureError(f"{source}: these are no samples of parameters: {text[:80]}")
        return samples_read


def _sample(name: Any, dtype: Any, shape: Any, start: Any, values: Any) -> Sample:
    """Check one sample as it was written. Raises TypeError or ValueError."""
    numbers = [*shape, start]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(name + dtype, str):
        raise TypeError
    if not all(type(value) is float for value in values) or start + len(values) > math.prod(shape):
        raise ValueError
    return Sample(name=name, dtype=dtype, shape=tuple(shape), start=start, values=tuple(values))


def run_of(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """Choose the elements to sample: the first one in the flattened parameter, and how many.

    All lie in one row of the last dimension.
    """
    width = shape[-1] if shape else 1
    count = min(NUM_ELEMENTS, width)
    digest = hashlib.blake2b(f"{name} {list(shape)}".encode(), digest_size=16).digest()
    row, column = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    return row % (math.prod(shape) // width) * width + column % (width - count + 1), count


def plain_name(name: str) -> str:
    """Remove from a name what DDP, DeepSpeed, torch.compile, FSDP, checkpoint wrappers and PEFT put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and (parts[0] == "module" or parts[:2] == ["base_model", "model"]):
        parts = parts[1 if parts[0] == "module" else 2 :]
    return ".".join(parts)
