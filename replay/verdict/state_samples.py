"""Take from what a replay's optimizer holds the elements that the job sampled of its own before the same step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from capture.file_format.optimizer_state import StateSample
from replay.verdict.gradient_samples import copy_elements, fetch_together


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRun:
    """Neighbouring elements of one state of a parameter, and the root mean square of all its elements."""

    values: tuple[float, ...]
    scale: float


# By the replay's name of the parameter, the first element, and the name of the state, as `exp_avg`.
StateElements = Mapping[tuple[str, int, str], StateRun]


@torch.no_grad()
def sample_states(
    states: Iterable[tuple[str, Mapping[str, Tensor]]], samples: Mapping[str, Sequence[StateSample]]
) -> dict[tuple[str, int, str], StateRun]:
    """Take the elements that the job sampled. All ranks have to call it together, as iterating gathers each state.

    samples  of the job, by the name that the parameter has in the replay
    """
    runs: dict[tuple[str, int, str], Tensor] = {}
    scales: dict[tuple[str, int, str], Tensor] = {}
    for name, whole_states in states:
        for sample in samples.get(name, ()):
            for key, values in sample.values.items():
                whole = whole_states.get(key)
                if whole is None or tuple(whole.shape) != sample.shape or not whole.is_floating_point():
                    continue
                norm = torch.linalg.vector_norm(whole, dtype=torch.float64)
                runs[name, sample.start, key] = copy_elements(whole, sample.start, len(values))
                scales[name, sample.start, key] = norm / math.sqrt(max(whole.numel(), 1))
    fetched = iter(fetch_together([*runs.values(), *scales.values()]))
    values_by_place = {place: next(fetched) for place in runs}
    return {place: StateRun(values=values, scale=next(fetched)[0]) for place, values in values_by_place.items()}
