"""Take from what a replay's optimizer holds the elements that the job sampled of its own before the same step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from capture.file_format.optimizer_state import StateSample


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
    elements: dict[tuple[str, int, str], StateRun] = {}
    for name, whole_states in states:
        for sample in samples.get(name, ()):
            for key, values in sample.values.items():
                whole = whole_states.get(key)
                if whole is None or tuple(whole.shape) != sample.shape:
                    continue
                run = whole.reshape(-1)[sample.start : sample.start + len(values)].double().tolist()
                norm = float(torch.linalg.vector_norm(whole.double()))
                scale = norm / math.sqrt(max(whole.numel(), 1))
                elements[name, sample.start, key] = StateRun(values=tuple(run), scale=scale)
    return elements
