"""Describe a step of the job's optimizer as one rank saw it: the passes that went into it, and the gradient.

It is written as JSON into the file of the last pass before the step. The other passes have the step's number.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from capture.file_format.micro_batch import CaptureError
from capture.file_format.parameter_samples import ParameterSamples, Sample


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
