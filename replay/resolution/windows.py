"""Group passes into gradient windows as in the job, and weigh each pass in its window.

A window is the set of passes behind one optimizer step: `grad_accumulation` passes of every data rank. A capture
records the number of its step; the last capture before a step also records which forwards of its rank are in it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from capture.file_format.listing import CaptureLocation
from capture.file_format.segment_record import digest_window


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """What selection needs to know about one readable capture."""

    capture: CaptureLocation
    trains: bool
    rank: int | None
    forward: int | None  # its number among its rank's forwards
    world_size: int | None
    num_tokens: int | None  # tokens that the loss averages over; None: the capture was not opened
    optimizer_step: int | None  # optimizer steps the job had taken; None if the capture does not record it
    window: int | None  # on the last pass before a step: `digest_window` of its rank's forwards in the window
    has_gradients: bool  # the capture holds samples of the gradient used in the step
    real_tokens: int = 0
    padded_tokens: int = 0
    num_after_padding: int = 0  # of `num_tokens`, those that padding predicts

    @property
    def path(self) -> Path:
        return self.capture.path


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """The inputs that all data ranks replay at the same time."""

    trains: bool
    num_tokens: Sequence[int]  # by data rank
    has_gradients: bool


def is_whole(passes: Sequence[Captured]) -> bool:
    """Are these all the passes, of all ranks, behind one step of the job's optimizer?"""
    by_rank: dict[int, list[Captured]] = {}
    for one in passes:
        by_rank.setdefault(one.rank or 0, []).append(one)
    if len(by_rank) != (passes[0].world_size or 1):
        return False
    return all(
        own[-1].window is not None and own[-1].window == digest_window([one.forward for one in own])
        for own in by_rank.values()
    )


class WindowOrder:
    """Sort captures by the job's steps; those in complete windows of one size come first.

    num_passes  passes in each complete window, over all ranks; None: no complete window seen yet
    """

    def __init__(self, num_passes: int | None = None) -> None:
        self.num_passes = num_passes

    def ordered(self, captures: Iterable[Captured]) -> Iterator[Captured]:
        """Yield `captures` by step, then rank; those outside such windows come last."""
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
    """Return the weight of pass `index` of a data rank in its window, by tokens; 1 means equal weights.

    The window is the next `size` training rounds from `begin` on. A backend averages over the window's passes and the
    data ranks, so a pass with n of a window's N tokens in P passes weighs n P / N.
    """
    window = [one for one in rounds[begin:] if one.trains][:size]
    total = sum(sum(one.num_tokens) for one in window)
    num_passes = sum(len(one.num_tokens) for one in window)
    return rounds[index].num_tokens[data_rank] * num_passes / total if total else 1.0
