"""Find whose given state the job's optimizer held of a parameter, where a state is loaded in another order."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from capture.file_format.optimizer_state import StateSample
from replay.verdict.recorded_pass import match_parameter_name

# Fewer values may be those of another parameter by chance.
_MIN_VALUES = 4
# Relative: the job's numbers are those of the file, but for a dtype that may lie between.
_SAME = 1e-5


def find_exchanged_states(
    samples: Iterable[StateSample], given: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """List the parameters of which the job held the state that is given of another one, each with that one.

    samples  what the job's optimizer held before the first step of the replay
    given    the given state by the replay's names; a value that a folder of DCP holds goes by names, and is not read
    """
    exchanged: list[tuple[str, str]] = []
    for sample in samples:
        name = match_parameter_name(sample.name, given)
        if name is None or _holds(given[name], sample):
            continue
        others = [other for other, values in given.items() if other != name and _holds(values, sample)]
        if len(others) == 1:
            exchanged.append((name, others[0]))
    return exchanged


def _holds(values: Mapping[str, Any], sample: StateSample) -> bool:
    """Tell whether a parameter's state has the sampled elements, which are not all zero."""
    elements = [element for run in sample.values.values() for element in run]
    return sum(map(bool, elements)) >= _MIN_VALUES and all(
        _has_run(values.get(key), sample, run) for key, run in sample.values.items()
    )


def _has_run(value: Any, sample: StateSample, run: Sequence[float]) -> bool:
    if not isinstance(value, Tensor) or tuple(value.shape) != sample.shape:
        return False
    own = value.detach().reshape(-1)[sample.start : sample.start + len(run)].to(torch.float64).tolist()
    return all(math.isclose(*pair, rel_tol=_SAME) for pair in zip(own, run, strict=True))
