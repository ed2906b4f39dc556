"""Group the passes of a run by the gradient that they went into."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from replay.runlog.records import PassRecord


class HasRecord(Protocol):
    """Something of one pass of one rank."""

    @property
    def record(self) -> PassRecord:
        """The replay's record of the pass."""
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
