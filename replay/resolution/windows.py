"""Group passes into gradient windows as in the job, and weigh each pass in its window.

A window is the set of passes whose gradients one optimizer step takes: `grad_accumulation` passes of every data rank. A
capture records the number of its step; the last capture before a step also records which forwards of its rank are in
it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Self

from capture.file_format.listing import CaptureLocation
from capture.file_format.optimizer_step import OptimizerStep
from capture.file_format.segment_record import digest_window


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedCapture:
    """What selection needs to know about one readable capture.

    rank               the job's rank that captured it
    forward_number     the number of its forward among those of its rank
    num_tokens         tokens that the loss averages over; None: the capture was not opened
    optimizer_step     steps that the job's optimizer had taken; None: the capture does not record it
    window_digest      of the numbers of its rank's forwards in the window, if it is the last capture before a step
    has_gradients      the capture holds samples of the gradient used in the step
    num_after_padding  of `num_tokens`, those that padding predicts
    job_pass           its place in the job's steps; None: the capture was not opened
    """

    capture: CaptureLocation
    trains: bool
    rank: int | None
    forward_number: int | None
    world_size: int | None
    num_tokens: int | None
    optimizer_step: int | None
    window_digest: int | None
    has_gradients: bool
    real_tokens: int = 0
    padded_tokens: int = 0
    num_after_padding: int = 0
    job_pass: "JobPass | None" = None

    @property
    def path(self) -> Path:
        return self.capture.path


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPass:
    """The place of a pass in the job's steps, as its capture tells.

    num_steps_before  steps that the job's optimizer had taken; None: not recorded
    step              of the last pass before a step: the step, without elements of gradients
    loss_per_mean     the job's loss of the pass, as a multiple of the mean over the pass's tokens: 1, or the number of
                      tokens divided by what the job divided the sum of their losses by
    objective         the objective that the pass shows (`name_shown_objective`); None: it shows none
    """

    rank: int
    forward: int | None
    world_size: int
    num_steps_before: int | None
    step: OptimizerStep | None
    loss_per_mean: float
    objective: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InputRound:
    """What is known of the inputs, one a data rank, that are replayed at the same time.

    num_tokens  tokens of the loss, by data rank
    job_passes  by data rank; empty where a capture could not be read
    most_real_tokens, most_padded_tokens  the most that a data rank has
    num_in_window  passes of a data rank in the window that a training pass is in; 0: as --grad-accumulation says
    is_incomplete  these are not all passes of that window, and passes of other windows come behind them
    num_steps_before  steps that the job's optimizer had taken, as the captures or their index tell; None: they do not
    """

    trains: bool
    num_tokens: Sequence[int]
    has_gradients: bool
    job_passes: Sequence[JobPass] = ()
    most_real_tokens: int = 0
    most_padded_tokens: int = 0
    num_in_window: int = 0
    is_incomplete: bool = False
    num_steps_before: int | None = None

    @classmethod
    def from_captures(cls, captures: Sequence[SelectedCapture]) -> Self:
        """Return what is known of a round, given the capture of each data rank, whose tokens are counted."""
        job_passes = [capture.job_pass for capture in captures if capture.job_pass is not None]
        step_numbers = {capture.optimizer_step for capture in captures}
        return cls(
            trains=captures[0].trains,
            num_tokens=[capture.num_tokens or 0 for capture in captures],
            has_gradients=any(capture.has_gradients for capture in captures),
            job_passes=job_passes if len(job_passes) == len(captures) else (),
            most_real_tokens=max(capture.real_tokens for capture in captures),
            most_padded_tokens=max(capture.padded_tokens for capture in captures),
            num_steps_before=step_numbers.pop() if len(step_numbers) == 1 else None,
        )


def find_whole_window(captures: Sequence[SelectedCapture]) -> list[SelectedCapture]:
    """Return the passes, of all ranks, whose gradients one step of the job took; none where some are missing.

    Passes before them whose gradients no step took, as where GradScaler found an overflow, are left out.

    captures  training passes with the same number of steps before them
    """
    by_rank: dict[int, list[SelectedCapture]] = {}
    for capture in captures:
        by_rank.setdefault(capture.rank or 0, []).append(capture)
    if not captures or len(by_rank) != (captures[0].world_size or 1):
        return []
    window: list[SelectedCapture] = []
    for rank_captures in by_rank.values():
        digest = rank_captures[-1].window_digest
        numbers = [capture.forward_number for capture in rank_captures]
        begins = (begin for begin in range(len(numbers)) if digest_window(numbers[begin:]) == digest)
        begin = None if digest is None else next(begins, None)
        if begin is None:
            return []
        window += rank_captures[begin:]
    return window


class WindowOrder:
    """Order captures by the job's windows: training passes outside complete windows come last.

    The data ranks share the passes of a window evenly, so one that cannot be shared so is no complete one either.

    num_passes  passes in each complete window, over all ranks, as typed, else in the first one; None: none seen yet
    """

    def __init__(self, num_passes: int | None = None, num_data_ranks: int = 1) -> None:
        self.num_passes = num_passes
        self._is_typed = num_passes is not None
        self._num_data_ranks = num_data_ranks

    def sort(self, captures: Iterable[SelectedCapture]) -> Iterator[SelectedCapture]:
        """Yield `captures`, which come by step; training passes outside such windows come last."""
        outside_windows: list[SelectedCapture] = []
        for _, group in groupby(captures, key=lambda capture: capture.optimizer_step):
            step_captures = list(group)
            training = [capture for capture in step_captures if capture.trains]
            window = find_whole_window(training)
            if window and self.num_passes is None:
                self.num_passes = len(window)
            is_complete = len(window) == self.num_passes if self._is_typed else not len(window) % self._num_data_ranks
            members = set(map(id, window if is_complete else []))
            yield from (capture for capture in step_captures if not capture.trains or id(capture) in members)
            outside_windows += [capture for capture in training if id(capture) not in members]
        yield from outside_windows

    def find_accumulation(self) -> int | None:
        """Return the passes of each data rank in the first window; None if the data ranks cannot share them evenly."""
        num_passes = self.num_passes or 0
        return None if num_passes == 0 or num_passes % self._num_data_ranks else num_passes // self._num_data_ranks


def find_training_rounds(rounds: Sequence[InputRound], first_index: int, size: int) -> list[InputRound]:
    """Return the accumulation window that begins at `first_index`: the next `size` rounds of training passes."""
    return [input_round for input_round in rounds[first_index:] if input_round.trains][:size]


def find_window_size(rounds: Sequence[InputRound], first_index: int, grad_accumulation: int) -> int:
    """Return how many passes of a data rank the window has that begins at `first_index`."""
    return (rounds[first_index].num_in_window if first_index < len(rounds) else 0) or grad_accumulation


def compute_token_weight(
    rounds: Sequence[InputRound], index: int, data_rank: int, first_index: int, size: int
) -> float:
    """Return the weight of pass `index` of a data rank in its window, by tokens; 1 means equal weights.

    A backend averages over the window's passes and the data ranks, so a pass with n of a window's N tokens in P passes
    weighs n P / N.
    """
    token_counts = [
        num_tokens
        for input_round in find_training_rounds(rounds, first_index, size)
        for num_tokens in input_round.num_tokens
    ]
    num_window_tokens = sum(token_counts)
    if not num_window_tokens:
        return 1.0
    return rounds[index].num_tokens[data_rank] * len(token_counts) / num_window_tokens
