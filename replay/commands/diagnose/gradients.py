"""Compare the losses and gradients of passes that do the same work in different ways.

Gradients are compared parameter by parameter, because a total norm hides an error in a small parameter.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from actor_init.inputs.packing import actor_inputs
from capture.file_format.micro_batch import MicroBatch
from replay.commands.diagnose.row_batches import rows_of
from replay.commands.diagnose.untimed_actor import Trial
from replay.tolerances.difference import relative_difference
from replay.tolerances.runs import SMALLEST_SHARE, TINY

Gradients = Mapping[str, Tensor]  # fp32 on the host, unsharded, by parameter name


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The parameter whose gradients differ most; inf if one of the two is missing or not a number."""

    relative: float
    parameter: str

    @classmethod
    def worst(cls, relative: Mapping[str, float]) -> "Difference":
        numbers = {name: error if error == error else torch.inf for name, error in relative.items()}
        parameter = max(numbers, key=numbers.__getitem__)
        return cls(relative=numbers[parameter], parameter=parameter)

    def said(self, bound: float) -> str:
        if self.relative == torch.inf:
            return f"the gradient of {self.parameter} is missing, or not a number"
        return f"gradient by {self.relative:.2g} at most, bound {bound:g}, {self.parameter}"


def difference(gradients: Iterable[tuple[str, Tensor]], expected: Gradients) -> Difference:
    """Return the largest difference, relative to its expected norm or to a thousandth of the total norm, if larger."""
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    least = SMALLEST_SHARE * float(torch.tensor(list(norms.values())).norm())
    apart = dict.fromkeys(expected, torch.inf)
    for name, gradient in gradients:
        if name in expected:
            apart[name] = float((gradient.cpu() - expected[name]).norm()) / max(norms[name], least, TINY)
        else:
            apart[name] = torch.inf
    return Difference.worst(apart)


def whole_gradients(gradients: Iterable[tuple[str, Tensor]], num_ranks: int) -> tuple[dict[str, Tensor], Difference]:
    """Return a backend's gradients on the host, and the largest difference between ranks, relative to the norm."""
    kept, apart = {}, {}
    for name, gradient in gradients:
        kept[name], apart[name] = gradient.cpu(), 0.0
        if num_ranks > 1:
            highest, lowest = gradient.clone(), gradient.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
            apart[name] = float((highest - lowest).norm() / gradient.norm().clamp(min=TINY))
    return kept, Difference.worst(apart)


def relative(value: float, expected: float) -> float:
    """Return the relative difference; inf if either is not a number."""
    are_numbers = math.isfinite(value) and math.isfinite(expected)
    return relative_difference(value, expected, least_size=TINY) if are_numbers else math.inf


def of_peers(losses: Sequence[tuple[int, float]]) -> float:
    """Return the largest relative difference between ranks of one data rank, given every rank's (data rank, loss)."""
    firsts = dict(reversed(losses))
    return max(relative(loss, firsts[data_rank]) for data_rank, loss in losses)


def twice(batch: MicroBatch) -> MicroBatch:
    """Return the batch with every row repeated."""
    rows = range(batch.num_rows)
    return rows_of(batch, [*rows, *rows])


def halves(batch: MicroBatch) -> list[MicroBatch]:
    """Split the rows into two micro-batches; a single row is used for both."""
    middle = batch.num_rows // 2
    if not middle:
        return [batch, batch]
    return [rows_of(batch, range(middle)), rows_of(batch, range(middle, batch.num_rows))]


def shares_of(parts: Sequence[MicroBatch], trial: Trial) -> list[float]:
    """Return the weight of each of `parts` in one accumulation window, by its action tokens.

    The backend averages over the window, so each weight is multiplied by the number of parts.
    """
    counts = [
        int(actor_inputs(part, packing=trial.source.layout_under(trial.spec).joins).action_mask_BA.sum())
        for part in parts
    ]
    return [count / max(1, sum(counts)) * len(parts) for count in counts]
