"""Take from what a replay's optimizer holds the elements that the job sampled of its own before the same step."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from capture.file_format.optimizer_state import StateSample
from replay.verdict.gradient_samples import batch_by_size, copy_elements, fetch_together, measure_norms


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRun:
    """Neighbouring elements of one state of a parameter, and the root mean square of all its elements."""

    values: tuple[float, ...]
    scale: float


# The replay's name of the parameter, the first element, and the name of the state, as `exp_avg`.
Place = tuple[str, int, str]
StateElements = Mapping[Place, StateRun]


@torch.no_grad()
def sample_states(
    states: Iterable[tuple[str, Mapping[str, Tensor]]], samples: Mapping[str, StateSample]
) -> dict[Place, StateRun]:
    """Take the elements that the job sampled. All ranks have to call it together, as iterating gathers each state.

    samples  of the job, by the name that the parameter has in the replay
    """
    runs: dict[Place, Tensor] = {}
    norms: dict[Place, Tensor] = {}
    sizes: dict[Place, int] = {}
    for batch in batch_by_size(_find_sampled(states, samples)):
        norms |= zip(batch, measure_norms(batch.values(), torch.float64), strict=True)
        for place, whole in batch.items():
            name, start, key = place
            runs[place] = copy_elements(whole, start, len(samples[name].values[key]))
            sizes[place] = max(whole.numel(), 1)
    fetched = iter(fetch_together([*runs.values(), *norms.values()]))
    values_by_place = {place: next(fetched) for place in runs}
    return {
        place: StateRun(values=values, scale=next(fetched)[0] / math.sqrt(sizes[place]))
        for place, values in values_by_place.items()
    }


def _find_sampled(
    states: Iterable[tuple[str, Mapping[str, Tensor]]], samples: Mapping[str, StateSample]
) -> Iterator[tuple[Place, Tensor]]:
    """Yield the states that the job sampled, each whole, by the place of the elements."""
    for name, whole_states in states:
        if (sample := samples.get(name)) is not None:
            for key in sample.values:
                whole = whole_states.get(key)
                if whole is not None and tuple(whole.shape) == sample.shape and whole.is_floating_point():
                    yield (name, sample.start, key), whole
