"""Which passes go into one gradient, as the job's optimizer had them, and what each of them weighs.

A window is what one optimizer step gets its gradient from: `grad_accumulation` passes of every data rank. A capture
knows the number of its step, and the last one before a step which forwards its rank put into it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """What dealing needs to know about one readable capture."""

    path: Path
    trains: bool
    rank: int | None
    forward: int | None  # its number among the forwards of its rank
    world_size: int | None
    num_tokens: int  # that the loss is the mean over
    optimizer_step: int | None  # steps that the job's optimizer had taken; None where the capture does not say
    window: Sequence[int] | None  # of the last pass before a step: the forwards that its rank put into it
    has_gradients: bool  # the capture holds samples of the gradient that the step was given


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """The inputs that all data ranks replay at the same time."""

    trains: bool
    num_tokens: Sequence[int]  # by data rank
    has_gradients: bool


def is_whole(passes: Sequence[Captured]) -> bool:
    """Are these all the passes that one step of the job's optimizer got its gradient from, of all ranks?"""
    by_rank: dict[int, list[Captured]] = {}
    for one in passes:
        by_rank.setdefault(one.rank or 0, []).append(one)
    if len(by_rank) != (passes[0].world_size or 1):
        return False
    return all(
        own[-1].window is not None and list(own[-1].window) == [one.forward for one in own] for own in by_rank.values()
    )


class WindowOrder:
    """Brings captures into the order of the job's steps, those of whole windows of one size first.

    num_passes  of each whole window, over all ranks; None: there is none, or not yet
    """

    def __init__(self, num_passes: int | None = None) -> None:
        self.num_passes = num_passes

    def ordered(self, captures: Iterable[Captured]) -> Iterator[Captured]:
        """`captures` by step, then rank; what belongs to no such window comes last."""
        held: list[Captured] = []
        for _, group in groupby(captures, key=lambda one: one.optimizer_step):
            members = list(group)
            training = [one for one in members if one.trains]
            whole = bool(training) and is_whole(training)
            if whole and self.num_passes is None:
                self.num_passes = len(training)
            if whole and len(training) == self.num_passes:
                yield from members
            else:
                yield from (one for one in members if not one.trains)
                held += training
        yield from held


def weight_of(rounds: Sequence[Round], index: int, data_rank: int, begin: int, size: int) -> float:
    """What the pass `index` of a data rank weighs, by tokens, in its window: 1 is as much as every other pass.

    The window is the next `size` training rounds from `begin` on. A backend takes the mean over the window's passes and
    the data ranks, so that of n of a window's N tokens in P passes weighs n P / N.
    """
    window = [one for one in rounds[begin:] if one.trains][:size]
    total = sum(sum(one.num_tokens) for one in window)
    num_passes = sum(len(one.num_tokens) for one in window)
    return rounds[index].num_tokens[data_rank] * num_passes / total if total else 1.0
