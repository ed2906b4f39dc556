"""Check by the samples in a capture whether a replay starts from the weights that the job had.

The replay's weights are read from the model's files, or computed from their names, and never from the actor. So it does
not matter how the actor shards them, and nothing has to be gathered.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Self, TypeVar

from torch import Tensor

from actor_init.model import ModelSource, find_parameter_shapes
from capture.file_format.gradient_signature import GradientSignature
from capture.file_format.optimizer_state import StateSample
from capture.file_format.optimizer_step import ParameterSamples, Sample
from replay.output.text import name_some, pluralise
from replay.tolerances.job_bounds import is_equal_but_for_dtype
from replay.verdict.recorded_pass import DifferingElement, WeightComparison, list_inner_names, match_parameter_name

SampleT = TypeVar("SampleT", Sample, GradientSignature, StateSample)


class WeightElements(NamedTuple):
    """Neighbouring elements of a weight, and its dtype as captures name it."""

    dtype: str
    values: Sequence[float]

    @classmethod
    def from_tensor(cls, elements: Tensor) -> Self:
        return cls(str(elements.dtype).removeprefix("torch."), elements.double().tolist())


class WeightChecker:
    """Compares the job's samples of its weights with one model's weights."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        # The captures of a recording sample a parameter at one place, so each place is read once for all of them.
        self._elements: dict[tuple[str, int, int], WeightElements | None] = {}
        self._names: dict[tuple[str, tuple[int, ...]], str | None] = {}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return find_parameter_shapes(self._source.config, self._source.adapter)

    def check(self, recorded: ParameterSamples | None) -> WeightComparison:
        """Compare the samples that one capture has of the job's weights; None: it has none."""
        if recorded is None:
            return WeightComparison(doubt="the capture holds no samples of the weights")
        compared: list[str] = []
        first: DifferingElement | None = None
        differing: list[str] = []
        foreign: list[str] = []
        for sample in recorded.samples:
            name = self._match_name(sample)
            if name is None:
                foreign.append(sample.name)
                continue
            elements = self._read_elements(name, sample)
            if elements is None:
                continue
            compared.append(name)
            difference = find_first_differing_weight(sample, elements)
            differing += [] if difference is None else [name]
            first = first or difference
        return WeightComparison(
            compared=tuple(compared),
            differing=tuple(differing),
            num_parameters=recorded.num_parameters,
            first=first,
            is_sharded=recorded.is_sharded,
            doubt=self._explain_doubt(recorded, foreign, bool(compared)),
        )

    @property
    def names(self) -> Collection[str]:
        """The names of this model's parameters."""
        return self._shapes.keys()

    def translate_names(self, job_names: Iterable[str]) -> frozenset[str]:
        """Return this model's names of the job's parameters; parameters that it does not have are left out."""
        names = (match_parameter_name(job_name, self._shapes) for job_name in job_names)
        return frozenset(name for name in names if name is not None)

    def match_to_parameters(self, samples: Iterable[SampleT]) -> dict[str, SampleT]:
        """Return the samples by this model's names; those of parameters that it does not have are left out."""
        by_name = {self._match_name(sample): sample for sample in samples}
        return {name: sample for name, sample in by_name.items() if name is not None}

    def read_initial_values(self, samples: Mapping[str, Sample]) -> dict[str, list[float]]:
        """Read the elements of the samples from where this model's weights come from; those that can be read so."""
        by_name = {name: self._read_elements(name, sample) for name, sample in samples.items()}
        return {name: list(elements.values) for name, elements in by_name.items() if elements is not None}

    def _read_elements(self, name: str, sample: Sample) -> WeightElements | None:
        """Read the elements of a sample, which has the parameter's shape; None where they cannot be read alone."""
        place = name, sample.start, len(sample.values)
        if place not in self._elements:
            elements = self._source.weights.sample(name, sample.shape, *place[1:])
            self._elements[place] = None if elements is None else WeightElements.from_tensor(elements)
        return self._elements[place]

    def _match_name(self, sample: Sample | GradientSignature | StateSample) -> str | None:
        """Find this model's name of a sampled parameter, which has to have the same shape."""
        key = sample.name, sample.shape
        if key not in self._names:
            inner_names = list_inner_names(sample.name)
            self._names[key] = next((name for name in inner_names if self._shapes.get(name) == sample.shape), None)
        return self._names[key]

    def _explain_doubt(self, recorded: ParameterSamples, foreign: list[str], has_compared: bool) -> str | None:
        """Say why equal samples do not prove equal weights; None if they do.

        foreign  the job's parameters that this model does not have
        """
        if recorded.left_out:
            kinds = ", ".join(f"{number} {why}" for why, number in recorded.left_out.items())
            return f"{kinds} of {pluralise(recorded.num_parameters, 'parameter')} could not be sampled"
        if self._source.adapter is None and any(".lora_" in name for name in foreign):
            return (
                f"the job had an adapter ({pluralise(len(foreign), 'parameter')} of its modules), which is not built "
                "here. Try: --adapter FOLDER"
            )
        if foreign:
            return f"this model has no parameter of the name and shape of the job's {name_some(foreign, 1)}"
        if not has_compared and not recorded.is_sharded:
            return f"weights {self._source.weights.describe()} cannot be sampled"
        return None


def find_first_differing_weight(sample: Sample, replayed: WeightElements) -> DifferingElement | None:
    """Find the first value that differs at all, or, in two dtypes, by more than rounding to bf16 or fp16."""
    is_same = _is_equal if sample.dtype == replayed.dtype else is_equal_but_for_dtype
    for position, (job_value, replay_value) in enumerate(zip(sample.values, replayed.values, strict=True)):
        if not is_same(job_value, replay_value):
            index = sample.start + position
            return DifferingElement(name=sample.name, index=index, recorded=job_value, replayed=replay_value)
    return None


def _is_equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
