"""Group the passes of a run by the gradient that they went into, and add up what a window's losses weigh."""

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from replay.runlog.records import PassRecord
from replay.verdict.recorded_pass import RecordedPass, ReplayedPass


class HasRecord(Protocol):
    """Something of one pass of one rank."""

    @property
    def record(self) -> PassRecord:
        """The replay's record of the pass."""
        ...


class HasWeights(Protocol):
    """Something of one pass of one rank that knows which rank of the job it is of, and what its log-probs weigh."""

    @property
    def recorded(self) -> RecordedPass | None:
        """What the job recorded of the pass."""
        ...

    @property
    def replayed(self) -> ReplayedPass:
        """What the replay computed of it."""
        ...


HasRecordT = TypeVar("HasRecordT", bound=HasRecord)


def group_into_windows(passes: Sequence[HasRecordT]) -> list[list[HasRecordT]]:
    """Group the training passes by the gradient that they went into.

    Tp and ring peers computed one micro-batch together, so one pass stands for each index and data rank. A window ends
    with the passes whose records have the gradient's norm; one that lacks a pass has none, and ends where a record is
    of another window.
    """
    windows: list[list[HasRecordT]] = []
    window: list[HasRecordT] = []
    seen: set[tuple[int, int]] = set()
    for member in passes:
        record = member.record
        micro_batch = record.index, record.data_rank
        if micro_batch in seen or not record.input.trains:
            continue
        seen.add(micro_batch)
        if window and record.index > window[-1].record.index and _is_of_next_window(record, window[-1].record):
            windows.append(window)
            window = []
        window.append(member)
    return windows + ([window] if window else [])


def _is_of_next_window(record: PassRecord, latest: PassRecord) -> bool:
    has_other_begin = record.window is not None and latest.window not in (None, record.window)
    return latest.result.grad_norm is not None or has_other_begin


def count_job_ranks(window: Sequence[HasWeights]) -> int:
    """Count the ranks of the job that a window's passes are of; 1 where no pass tells its rank."""
    return len({member.recorded.rank for member in window if member.recorded is not None}) or 1


def sum_loss_weights(window: Sequence[HasWeights]) -> float:
    """Add up what the log-probs weigh in the loss of a window: 1 for a mean over its tokens.

    Each rank differentiates a loss of its own, and the gradients of the ranks are averaged.
    """
    return math.fsum(member.replayed.log_prob_weights.total for member in window) / count_job_ranks(window)
