"""Describe a step of the job's optimizer as one rank saw it: the passes that went into it, and the gradient.

It is written as JSON into the file of the last pass before the step. The other passes have the step's number.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from capture.file_format.micro_batch import CaptureError

# Write and read samples of a model's parameters or of their gradients, and say which elements these are.
#
# A sample is a run of NUM_ELEMENTS neighbours of one parameter. The parameter's name and full shape alone decide where
# it lies, so it is the same place in any sharding, in the job and in a replay.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStep:
    """One rank's part of one optimizer step. What is not known is None.

    number            steps that this rank's recorder saw before
    passes            numbers of the forwards with autograd on since the last step, as in `Origin.step`, in order
    shares            for each of them the derivative of what was differentiated by the pass's own loss: 1 where the
                      loss itself was, 1 / 4 in a mean over four passes; fp16's loss scale is part of it
    gradients         samples of the gradients as the optimizer would get them without clipping, at the elements that
                      samples of the weights have; of parameters that have a gradient
    without_gradient  names of sampled parameters that are trained and have no gradient
    grad_norm         global norm before clipping, where the job computed one
    is_part_of_norm   `grad_norm` is that of this rank's shards: the squares of all ranks add up
    max_norm          norm that the job clipped to
    num_clipped       number of parameters that were clipped by that norm; None: all
    is_unclipped      False: some clipping was not seen or came before the last pass, so `gradients` may be shorter
    optimizer         name of its class
    settings          one mapping for each distinct group: `lr`, `betas`, `eps`, `weight_decay`, ... as numbers,
                      and `num_parameters` of the model, 0 where it is not known
    has_state         False: it was this optimizer's first step, so its moments began at 0
    """

    number: int
    passes: Sequence[int]
    shares: Sequence[float | None]
    gradients: ParameterSamples | None = None
    without_gradient: Sequence[str] = ()
    grad_norm: float | None = None
    is_part_of_norm: bool = False
    max_norm: float | None = None
    num_clipped: int | None = None
    is_unclipped: bool = True
    optimizer: str | None = None
    settings: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    has_state: bool | None = None

    def text(self) -> str:
        """Return the step as the text that is written."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}  # asdict would copy every sample
        return json.dumps({**plain, "gradients": None if self.gradients is None else self.gradients.text()})

    @classmethod
    def of_text(cls, text: str, source: str) -> "OptimizerStep":
        """Read what `text` wrote. Raises CaptureError for anything else."""
        try:
            written = json.loads(text)
            gradients = written.pop("gradients")
            plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in written.items()}
            step = cls(gradients=None if gradients is None else ParameterSamples.of_text(gradients, source), **plain)
            step.check()
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
            raise CaptureError(f"{source}: no record of an optimizer step: {text[:80]}") from None
        return step

    def check(self) -> None:
        """Check the kinds of all values. Raises ValueError."""
        numbers = [self.number, *self.passes]
        floats = [self.grad_norm, self.max_norm, *self.shares]
        is_right = (
            all(type(one) is int and one >= 0 for one in numbers)
            and len(self.shares) == len(self.passes)
            and all(one is None or type(one) in (int, float) for one in floats)
            and all(type(one) is str for one in self.without_gradient)
            and type(self.is_part_of_norm) is type(self.is_unclipped) is bool
            and (self.optimizer is None or type(self.optimizer) is str)
            and (self.num_clipped is None or type(self.num_clipped) is int)
            and (self.has_state is None or type(self.has_state) is bool)
            and all(isinstance(one, dict) for one in self.settings)
        )
        if not is_right:
            raise ValueError


def merged(one: OptimizerStep, other: OptimizerStep) -> OptimizerStep:
    """Merge two parts of one step, in their order."""
    samples: dict[str, Sample] = {}
    for part in (other.gradients, one.gradients):
        samples |= {} if part is None else {sample.name: sample for sample in part.samples}
    first = one.gradients or other.gradients
    has_norm = one if one.grad_norm is not None or one.max_norm is not None else other
    names = [one.optimizer] + ([other.optimizer] if other.optimizer not in str(one.optimizer).split(", ") else [])
    states = (one.has_state, other.has_state)
    return replace(
        one,
        shares=tuple(b if a is None else a for a, b in zip(one.shares, other.shares, strict=True)),
        gradients=None if first is None else replace(first, samples=tuple(samples.values())),
        without_gradient=tuple(dict.fromkeys([*one.without_gradient, *other.without_gradient])),
        grad_norm=has_norm.grad_norm,
        is_part_of_norm=has_norm.is_part_of_norm,
        max_norm=has_norm.max_norm,
        num_clipped=has_norm.num_clipped,
        is_unclipped=one.is_unclipped and other.is_unclipped,
        optimizer=", ".join(name for name in names if name is not None) or None,
        settings=distinct([*one.settings, *other.settings]),
        has_state=None if None in states else any(states),
    )


def distinct(settings: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Merge groups of the same settings, and add up their parameters."""
    kinds: list[dict[str, Any]] = []
    for group in settings:
        for other in kinds:
            if {**other, "num_parameters": 0} == {**group, "num_parameters": 0}:
                other["num_parameters"] += group["num_parameters"]
                break
        else:
            kinds.append(dict(group))
    return tuple(kinds)


NUM_TOKENS = 64


def sampled_tokens(num_rows: int, num_tokens: int) -> list[tuple[int, int]]:
    """Choose rows and columns of at most NUM_TOKENS tokens, evenly spaced over all but each row's first.

    The shape alone decides, so a job need not look at its masks; log-probs of padding among them say nothing.
    """
    total = num_rows * (num_tokens - 1)
    if total <= 0:
        return []
    count = min(NUM_TOKENS, total)
    flat = [math.floor((number + 0.5) * total / count) for number in range(count)]
    return [(place // (num_tokens - 1), place % (num_tokens - 1) + 1) for place in flat]
