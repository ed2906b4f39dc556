"""Pair the elements of a gradient that the job sampled with the replay's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from capture.file_format.optimizer_step import OptimizerStep, Sample
from replay.tolerances.difference import absolute_difference, as_share
from replay.tolerances.job_bounds import HIDING_BOUND
from replay.verdict.gradient_samples import GradientSamples, compute_scale
from replay.verdict.recorded_pass import match_parameter_name

_ROUTED_PARAMETERS = ("expert", "router", ".gate.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePair:
    """A sample of the job's gradient, and the same elements of the replay's gradient.

    scale  the root mean square of the parameter's gradient; inf where that is not finite, so that nothing is judged
    worst  the position of the farthest element in the sample
    """

    name: str
    sample: Sample
    replayed: Sequence[float]
    scale: float
    worst: int

    def shows_vanishing(self, bound: float) -> bool:
        """Tell whether this bound would show that the job's or the replay's gradient of the parameter had vanished."""
        return max(map(abs, (*self.sample.values, *self.replayed))) > bound * self.scale

    @property
    def job_value(self) -> float:
        return self.sample.values[self.worst]

    @property
    def replay_value(self) -> float:
        return self.replayed[self.worst]

    @property
    def difference(self) -> float:
        return as_share(absolute_difference(self.replay_value, self.job_value), self.scale) if self.scale else 0.0


def find_least_floor(name: str) -> float:
    """Return the noise floor to assume at least of a gradient whose parameter, or kind of parameters, has this name.

    An expert's or a router's gradient may change by its whole size where one token at a tie takes another expert, and
    the runs that measured the floor may have had no such token.
    """
    return HIDING_BOUND if any(word in name for word in _ROUTED_PARAMETERS) else 0.0


def pair_samples(step: OptimizerStep, gradient: GradientSamples) -> Iterator[SamplePair]:
    """Pair the job's samples with the replay's elements; samples that the replay has no elements of are left out."""
    for sample in step.gradients.samples if step.gradients is not None else ():
        name = match_parameter_name(sample.name, gradient.norms)
        replayed = gradient.values.get((name, sample.start)) if name is not None else None
        if name is None or replayed is None or len(replayed) != len(sample.values) or not replayed:
            continue
        differences = [absolute_difference(*values) for values in zip(replayed, sample.values, strict=True)]
        worst = max(range(len(differences)), key=differences.__getitem__)
        yield SamplePair(name=name, sample=sample, replayed=replayed, scale=compute_scale(gradient, name), worst=worst)


def do_some_samples_agree(steps: Sequence[OptimizerStep], gradient: GradientSamples, bound: float) -> bool:
    """Tell whether a sampled gradient agrees that would not if the job had differentiated another loss.

    It has to be so far from zero that a gradient that vanished, or changed its sign, would not agree.
    """
    return any(
        pair.difference <= bound <= HIDING_BOUND and max(map(abs, pair.replayed)) > 2 * bound * pair.scale
        for step in steps
        for pair in pair_samples(step, gradient)
    )
