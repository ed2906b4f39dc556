"""Add up the passes of a folder, one by one from files, and by the column from the indexes of segments."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from capture.file_format.capture_file import Call, odd_numbers, read_call
from capture.file_format.manifest import damage_in
from capture.file_format.micro_batch import CaptureError, NotReplayableError
from capture.file_format.pass_record import COLUMN, HAS_TOKENS, IS_ODD, TRAINS, Counts, columns, time_of
from capture.file_format.segment import Segment
from replay.options.wording import in_flags

MOST_ODD = 100  # that are listed; the others are counted
_ROWS_AT_ONCE = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    least: int
    median: float
    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """Facts about all passes of one kind: train or rollout."""

    name: str
    num_passes: int
    ranks: list[int | None]
    rows: Spread
    row_length: Spread  # S, padding included
    padded_tokens: int
    real_tokens: int
    action_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Odd:
    """A pass that stands out, and the reason."""

    source: str
    reason: str


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute in one thread: on a busy machine, several wait for each other longer than these sums take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class KindTotals:
    """Sums over the passes of one kind; what a spread needs is counted by value, not kept by pass."""

    def __init__(self) -> None:
        self.num_passes = 0
        self.ranks: set[int | None] = set()
        self._rows: Counter[int] = Counter()
        self._lengths: Counter[int] = Counter()
        self._tokens = [0, 0, 0]  # padded, real, action

    def add(self, rank: int | None, counts: Counts) -> None:
        self.ranks.add(rank)
        self.num_passes += 1
        self._rows[counts.rows] += 1
        self._lengths[counts.row_length] += 1
        new = counts.rows * counts.row_length, counts.real_tokens, counts.action_tokens or 0
        self._tokens = [total + more for total, more in zip(self._tokens, new, strict=True)]

    def add_columns(self, rank: int | None, table: Tensor) -> None:
        """Add passes of one rank by their records, as `columns` gives them."""
        if not len(table):
            return
        self.ranks.add(rank)
        self.num_passes += len(table)
        rows, lengths = table[:, COLUMN["rows"]], table[:, COLUMN["row_length"]]
        for counter, values in ((self._rows, rows), (self._lengths, lengths)):
            found, times = values.unique(return_counts=True)
            counter.update(dict(zip(found.tolist(), times.tolist(), strict=True)))
        actions = table[:, COLUMN["action_tokens"]].clamp(min=0)
        new = (rows * lengths, table[:, COLUMN["real_tokens"]], actions)
        self._tokens = [total + int(more.sum()) for total, more in zip(self._tokens, new, strict=True)]

    def facts(self, name: str) -> KindFacts:
        padded, real, action = self._tokens
        return KindFacts(
            name=name,
            num_passes=self.num_passes,
            ranks=sorted(self.ranks, key=lambda rank: -1 if rank is None else rank),
            rows=spread(self._rows),
            row_length=spread(self._lengths),
            padded_tokens=padded,
            real_tokens=real,
            action_tokens=action,
        )


class Totals:
    """Sums over a folder. What cannot be read goes into `damaged`."""

    def __init__(self, damaged: list[tuple[Path, str]]) -> None:
        self.kinds = {"train": KindTotals(), "rollout": KindTotals()}
        self.num_by_format: Counter[str] = Counter()
        self.versions: set[str] = set()
        self.first_time: str | None = None
        self.last_time: str | None = None
        self.odd: list[Odd] = []
        self.num_odd = 0
        self.unreplayable: list[tuple[Path, str]] = []
        self.world_size = 0  # the largest that a capture names
        self._damaged = damaged
        self._most: tuple[int, str, Counts] | None = None  # padded tokens, name, counts
        self._sizes: set[int] = set()  # of padded tokens, two at most

    def add_file(self, path: Path) -> None:
        """Read a file of one pass."""
        try:
            call = read_call(path)
            counts = Counts.of(call.micro_batch())
        except NotReplayableError as error:
            self.unreplayable.append((path, in_flags(error)))
            self.num_by_format["that cannot be replayed"] += 1
            return
        except CaptureError as error:
            self._damaged.append((path, in_flags(error)))
            return
        self.num_by_format["OpenRLHF dumps" if call.format is None else f"of format {call.format}"] += 1
        self._kind(call.trains).add(call.origin.rank, counts)
        self.world_size = max(self.world_size, call.origin.world_size or 0)
        if call.origin.time is not None:
            self._see_times(call.origin.time, call.origin.time)
        self.versions.update(f"{name} {number}" for name, number in call.origin.versions.items())
        self._see_size(counts.rows * counts.row_length, path.name, counts)
        self._see_odd(path.name, counts, call)

    def add_segment(self, path: Path) -> None:
        """Add the passes of a segment by its index; what stands out is read."""
        try:
            segment = Segment.open(path)
        except CaptureError as error:
            self._damaged.append((path, in_flags(error)))
            return
        if reason := damage_in(segment):
            self._damaged.append((path, reason))
        self.versions.update(f"{name} {number}" for name, number in segment.head.versions.items() if segment.num_passes)
        self.world_size = max(self.world_size, segment.head.world_size or 0)
        for begin, table in enumerate(columns(segment.records).split(_ROWS_AT_ONCE)):
            self._add_columns(segment, begin * _ROWS_AT_ONCE, table)

    def _add_columns(self, segment: Segment, begin: int, table: Tensor) -> None:
        """Add the passes from number `begin` on, which have these records."""
        flags = table[:, COLUMN["flags"]]
        has_tokens = flags & HAS_TOKENS != 0
        for place in (~has_tokens).nonzero().flatten().tolist():  # calls with embeddings, which say so when read
            self.add_file(segment.pass_path(begin + place))
        if not bool(has_tokens.any()):
            return
        is_training = flags & TRAINS != 0
        for trains in (True, False):
            self._kind(trains).add_columns(segment.head.rank, table[has_tokens & (is_training == trains)])
        self.num_by_format["of format 1 in segments"] += int(has_tokens.sum())
        times = table[has_tokens, COLUMN["time"]]
        first, last = (time_of(int(one)).isoformat(timespec="microseconds") for one in (times.min(), times.max()))
        self._see_times(first, last)
        sizes = table[:, COLUMN["rows"]] * table[:, COLUMN["row_length"]]
        largest, least = sizes.where(has_tokens, -1).argmax(), sizes.where(has_tokens, 2**62).argmin()
        for place in (int(largest), int(least)):
            record = segment.record(begin + place)
            assert record.counts is not None
            self._see_size(int(sizes[place]), segment.name(begin + place), record.counts)
        real, actions = table[:, COLUMN["real_tokens"]], table[:, COLUMN["action_tokens"]]
        is_odd = (flags & IS_ODD != 0) | (table[:, COLUMN["empty_rows"]] > 0) | (actions == 0) | (real * 5 < sizes)
        for place in (is_odd & has_tokens).nonzero().flatten().tolist():
            self._see_odd_in(segment, begin + place)

    def _see_odd_in(self, segment: Segment, place: int) -> None:
        if len(self.odd) >= MOST_ODD:
            self.num_odd += 1
            return
        record, path = segment.record(place), segment.pass_path(place)
        assert record.counts is not None
        try:
            self._see_odd(path.name, record.counts, read_call(path) if record.has_odd_number else None)
        except CaptureError as error:
            self._damaged.append((path, in_flags(error)))

    def missing_ranks(self) -> list[int]:
        """List the ranks of the job's world of which there is no pass; none where captures do not name their rank."""
        ranks = {rank for kind in self.kinds.values() for rank in kind.ranks}
        return [] if None in ranks or not ranks else [rank for rank in range(self.world_size) if rank not in ranks]

    def longest(self) -> list[Odd]:
        """Return the pass with the most tokens, if there are several kinds or ranks."""
        if self._most is None or len(self._sizes) < 2:
            return []
        _, name, counts = self._most
        reason = f"{counts.rows} rows of {counts.row_length}, {counts.real_tokens:,} tokens real"
        return [Odd(source=name, reason=reason)]

    def _kind(self, trains: bool) -> KindTotals:
        return self.kinds["train" if trains else "rollout"]

    def _see_times(self, first: str, last: str) -> None:
        self.first_time = min(first, self.first_time or first)
        self.last_time = max(last, self.last_time or last)

    def _see_size(self, size: int, name: str, counts: Counts) -> None:
        if len(self._sizes) < 2:
            self._sizes.add(size)
        if self._most is None or size > self._most[0]:
            self._most = size, name, counts

    def _see_odd(self, name: str, counts: Counts, call: Call | None) -> None:
        reasons = _oddities(counts, call)
        self.num_odd += len(reasons)
        self.odd += [Odd(source=name, reason=reason) for reason in reasons[: MOST_ODD - len(self.odd)]]


def _oddities(counts: Counts, call: Call | None) -> list[str]:
    odd = {} if call is None else odd_numbers(call.outputs)
    reasons = [f"{name} was {value}" for name, value in odd.items()]
    if counts.empty_rows:
        reasons.append(f"{counts.empty_rows} of {counts.rows} rows have no real token")
    if counts.action_tokens == 0:
        reasons.append("no token is an action")
    if counts.real_tokens * 5 < counts.rows * counts.row_length:
        reasons.append(f"{1 - counts.real_tokens / (counts.rows * counts.row_length):.0%} is padding")
    return reasons


def spread(counter: Counter[int]) -> Spread:
    """Return the least, median and most of values that are counted."""
    values, total = sorted(counter), counter.total()
    up_to = list(accumulate(counter[value] for value in values))
    middle = [values[bisect_right(up_to, place)] for place in ((total - 1) // 2, total // 2)]
    return Spread(least=values[0], median=sum(middle) / 2, most=values[-1])
