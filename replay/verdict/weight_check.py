"""Check whether a replay's weights are those that the job had, by the samples in a capture.

They are taken from the folder's files or computed from their names, never from the actor: so no sharding matters, and
nothing is gathered.
"""

import math
from collections.abc import Collection, Iterable
from functools import cached_property

from torch import Tensor

from actor_init.model import ModelSource, find_parameter_shapes
from capture.file_format.optimizer_step import ParameterSamples, Sample
from replay.output.text import pluralise
from replay.tolerances.job_bounds import is_equal_but_for_dtype
from replay.verdict.job_values import OtherValue, WeightComparison, inner_names, own_name


class SameWeights:
    """Compares fingerprints with one model's weights."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return find_parameter_shapes(self._source.config, self._source.adapter)

    def check(self, fingerprint: ParameterSamples | None) -> WeightComparison:
        if fingerprint is None:
            return WeightComparison(doubt="the capture holds no samples of the weights")
        compared: list[str] = []
        first: OtherValue | None = None
        differing: list[str] = []
        foreign: list[str] = []
        for sample in fingerprint.samples:
            name = self._own_name(sample)
            if name is None:
                foreign.append(sample.name)
                continue
            here = self._source.weights.sample(name, sample.shape, sample.start, len(sample.values))
            if here is None:
                continue
            compared.append(name)
            other = first_other(sample, here)
            differing += [] if other is None else [name]
            first = first or other
        return WeightComparison(
            compared=tuple(compared),
            differing=tuple(differing),
            num_parameters=fingerprint.num_parameters,
            first=first,
            is_sharded=fingerprint.is_sharded,
            doubt=self._doubt(fingerprint, foreign, bool(compared)),
        )

    @property
    def names(self) -> Collection[str]:
        """The names of this model's parameters."""
        return self._shapes.keys()

    def own_names(self, job_names: Iterable[str]) -> frozenset[str]:
        """Return this model's names of the job's parameters; those that it has none of are left out."""
        named = (own_name(job, self._shapes) for job in job_names)
        return frozenset(name for name in named if name is not None)

    def by_own_name(self, fingerprint: ParameterSamples) -> dict[str, Sample]:
        """Return the samples by the names of this model; those of other parameters are left out."""
        named = {self._own_name(sample): sample for sample in fingerprint.samples}
        return {name: sample for name, sample in named.items() if name is not None}

    def _own_name(self, sample: Sample) -> str | None:
        """Find this model's name of a parameter."""
        return next((name for name in inner_names(sample.name) if self._shapes.get(name) == sample.shape), None)

    def _doubt(self, fingerprint: ParameterSamples, foreign: list[str], has_compared: bool) -> str | None:
        if fingerprint.left_out:
            kinds = ", ".join(f"{number} {why}" for why, number in fingerprint.left_out.items())
            return f"{kinds} of {pluralise(fingerprint.num_parameters, 'parameter')} could not be sampled"
        if any(".lora_" in name for name in foreign):
            return (
                f"the job had an adapter ({pluralise(len(foreign), 'parameter')} of its modules), which is not built "
                "here. Try: --adapter FOLDER"
            )
        if foreign:
            shown = f"{foreign[0]} and {len(foreign) - 1} more" if foreign[1:] else foreign[0]
            return f"this model has no parameter of the name and shape of the job's {shown}"
        if not has_compared and not fingerprint.is_sharded:
            return f"weights {self._source.weights.describe()} cannot be sampled"
        return None


def first_other(sample: Sample, replayed: Tensor) -> OtherValue | None:
    """Find the first value that differs: in one dtype exactly, in two beyond the precision of bf16."""
    is_one_dtype = sample.dtype == str(replayed.dtype).removeprefix("torch.")
    pairs = zip(sample.values, replayed.double().tolist(), strict=True)
    for number, (recorded, here) in enumerate(pairs):
        if not (_equal(recorded, here) if is_one_dtype else is_equal_but_for_dtype(recorded, here)):
            return OtherValue(name=sample.name, index=sample.start + number, recorded=recorded, replayed=here)
    return None


def _equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
