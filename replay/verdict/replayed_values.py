"""Collect what a verdict needs of a replayed pass beside its record: single log-probs, and single gradients.

Shape letters: B rows, S tokens a row, A trailing tokens of a row that the action mask covers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from capture.file_format.parameter_samples import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientSamples:
    """The gradient at the end of a window, of every parameter that has one.

    norms   by parameter
    sizes   numbers of elements
    values  at the places that the job's samples have: by parameter and first element
    """

    norms: Mapping[str, float]
    sizes: Mapping[str, int]
    values: Mapping[tuple[str, int], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What a replay computed of one pass.

    token_log_probs   at `token_places` of the captured rows; None for tokens that have none in the replay
    action_log_probs  [B, A] in one list, None where the action mask is off; empty where the job kept none
    loss_gain         how far the loss moves if each log-prob moves by 1; 1 of a mean of log-probs
    gradient          None where the pass ends no window, or nobody asked
    """

    token_log_probs: Sequence[float | None] = ()
    action_log_probs: Sequence[float | None] = ()
    loss_gain: float = 1.0
    gradient: GradientSamples | None = field(default=None)


def action_log_probs(log_probs_BA: Tensor, has_BA: Tensor, *, is_reversed: bool) -> list[float | None]:
    """List the log-probs row by row; None where `has_BA` is False."""
    values, has = log_probs_BA.detach().double().cpu(), has_BA.cpu()
    if is_reversed:
        values, has = values.flip(0), has.flip(0)
    pairs = zip(values.flatten().tolist(), has.flatten().tolist(), strict=True)
    return [value if is_there else None for value, is_there in pairs]


def sampled_log_probs(
    log_probs_BA: Tensor, has_BA: Tensor, places: Sequence[tuple[int, int]], *, first: int, is_reversed: bool
) -> list[float | None]:
    """List the log-probs of the tokens at these rows and columns; None for those that have none.

    has_BA       where the log-prob is that of the row's own token
    first        the column of the first of A
    is_reversed  the rows are the captured ones from the last to the first
    """
    values, has = log_probs_BA.detach().double().cpu(), has_BA.cpu()
    if is_reversed:
        values, has = values.flip(0), has.flip(0)
    shifted = [(row, token - first) for row, token in places]
    return [float(values[row, column]) if column >= 0 and bool(has[row, column]) else None for row, column in shifted]


@torch.no_grad()
def gradient_samples(
    gradients: Iterable[tuple[str, Tensor]], wanted: Mapping[str, Sequence[Sample]]
) -> GradientSamples:
    """Take norms, sizes and the wanted samples of `gradients`, which are whole; `wanted` has the replay's names.

    For all ranks to call, since a backend gathers each gradient.
    """
    norms: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    values: dict[tuple[str, int], tuple[float, ...]] = {}
    for name, gradient in gradients:
        norms[name] = torch.linalg.vector_norm(gradient, dtype=torch.float64 if gradient.device.type == "cpu" else None)
        sizes[name] = gradient.numel()
        for sample in wanted.get(name, ()):
            run = gradient.reshape(-1)[sample.start : sample.start + len(sample.values)]
            values[name, sample.start] = tuple(run.double().tolist())
    return GradientSamples(norms={name: float(norm) for name, norm in norms.items()}, sizes=sizes, values=values)
