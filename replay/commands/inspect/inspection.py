"""Summarise a folder of captures; damage is listed by name.

Files of one pass are read one by one. Of segments the indexes are read, and their passes are added by the column.
"""

import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actor_init.as_json import to_json
from actor_init.spec import UsageError
from capture.black_box.incidents import Incident, read_incidents
from capture.black_box.salvage import salvage_for_reading
from capture.file_format.actor_config import read_actor_config
from capture.file_format.capture_file import CapturedCall, find_non_finite, read_call
from capture.file_format.end_record import count_not_recorded
from capture.file_format.folder_recordings import list_recordings
from capture.file_format.listing import list_segment_files, list_single_pass_files
from capture.file_format.manifest import describe_damage
from capture.file_format.micro_batch import CaptureError, NotReplayableError
from capture.file_format.segment import Segment
from capture.file_format.segment_record import (
    COLUMN,
    HAS_TOKENS,
    NON_FINITE,
    TRAINS,
    Counts,
    as_table,
    from_microseconds,
)
from replay.commands.inspect.linting import Linting, lint_recording
from replay.commands.inspect.recordings import RecordingFacts, describe_recording
from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import check_folder
from replay.options.value_checks import check_value
from replay.output.text import Pairs
from replay.post_mortem.blocking_ranks import read_last_sightings
from replay.post_mortem.text import describe_hang
from replay.resolution.selection import choose_recording

# Of more odd passes only the number is told.
MAX_LISTED_ODD = 100
_ROWS_AT_ONCE = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSpread:
    """The least, the median and the most of a number of the passes."""

    least: int
    median: float
    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """Facts about all passes of one kind: train or rollout."""

    name: str
    num_passes: int
    ranks: list[int | None]
    rows: ValueSpread
    # Padding included.
    row_length: ValueSpread
    padded_tokens: int
    real_tokens: int
    action_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OddPass:
    """A pass that stands out, and the reason."""

    source: str
    reason: str


@contextmanager
def use_one_thread() -> Iterator[None]:
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
        """Add passes of one rank by their records, as `as_table` gives them."""
        if not len(table):
            return
        self.ranks.add(rank)
        self.num_passes += len(table)
        rows, lengths = table[:, COLUMN["rows"]], table[:, COLUMN["row_length"]]
        for counter, values in ((self._rows, rows), (self._lengths, lengths)):
            distinct, counts = values.unique(return_counts=True)
            counter.update(dict(zip(distinct.tolist(), counts.tolist(), strict=True)))
        actions = table[:, COLUMN["action_tokens"]].clamp(min=0)
        new = (rows * lengths, table[:, COLUMN["real_tokens"]], actions)
        self._tokens = [total + int(more.sum()) for total, more in zip(self._tokens, new, strict=True)]

    def summarize(self, name: str) -> KindFacts:
        padded, real, action = self._tokens
        return KindFacts(
            name=name,
            num_passes=self.num_passes,
            ranks=sorted(self.ranks, key=lambda rank: -1 if rank is None else rank),
            rows=compute_spread(self._rows),
            row_length=compute_spread(self._lengths),
            padded_tokens=padded,
            real_tokens=real,
            action_tokens=action,
        )


class FolderTotals:
    """Sums over a folder. What cannot be read goes into `damaged`."""

    def __init__(self, damaged: list[tuple[Path, str]]) -> None:
        self.kinds = {"train": KindTotals(), "rollout": KindTotals()}
        self.num_by_format: Counter[str] = Counter()
        self.versions: set[str] = set()
        self.first_time: str | None = None
        self.last_time: str | None = None
        self.odd: list[OddPass] = []
        # Numbers of the optimizer's steps that a pass has, by the id of its recording.
        self.steps_by_id: defaultdict[str | None, set[int]] = defaultdict(set)
        self.num_odd = 0
        self.unreplayable: list[tuple[Path, str]] = []
        # The largest world size that a capture names.
        self.world_size = 0
        self._damaged = damaged
        # The padded tokens, the name and the counts of the longest pass.
        self._longest: tuple[int, str, Counts] | None = None
        # Two numbers of padded tokens at most: whether there are several is all that is needed.
        self._sizes: set[int] = set()

    def add_file(self, path: Path) -> None:
        """Read a file of one pass."""
        try:
            call = read_call(path)
            counts = Counts.from_batch(call.micro_batch())
        except NotReplayableError as error:
            self.unreplayable.append((path, format_error_with_flags(error)))
            self.num_by_format["that cannot be replayed"] += 1
            return
        except CaptureError as error:
            self._damaged.append((path, format_error_with_flags(error)))
            return
        self.num_by_format["OpenRLHF dumps" if call.format is None else f"of format {call.format}"] += 1
        self._choose_totals(call.trains).add(call.origin.rank, counts)
        self.world_size = max(self.world_size, call.origin.world_size or 0)
        if call.origin.time is not None:
            self._note_times(call.origin.time, call.origin.time)
        self.versions.update(f"{name} {number}" for name, number in call.origin.versions.items())
        if call.step is not None:
            self.steps_by_id[call.recording].add(call.step.number)
        self._note_size(counts.rows * counts.row_length, path.name, counts)
        self._note_odd(path.name, counts, call)

    def add_segment(self, path: Path) -> None:
        """Add the passes of a segment by its index; what stands out is read."""
        try:
            segment = Segment.open(path)
        except CaptureError as error:
            self._damaged.append((path, format_error_with_flags(error)))
            return
        if reason := describe_damage(segment):
            self._damaged.append((path, reason))
        self.versions.update(f"{name} {number}" for name, number in segment.head.versions.items() if segment.num_passes)
        self.world_size = max(self.world_size, segment.head.world_size or 0)
        for begin, table in enumerate(as_table(segment.records).split(_ROWS_AT_ONCE)):
            self._add_columns(segment, begin * _ROWS_AT_ONCE, table)

    def _add_columns(self, segment: Segment, begin: int, table: Tensor) -> None:
        """Add the passes from number `begin` on, which have these records."""
        flags = table[:, COLUMN["flags"]]
        has_tokens = flags & HAS_TOKENS != 0
        # Calls with embeddings have no tokens. Reading them gives the reason why they cannot be replayed.
        for place in (~has_tokens).nonzero().flatten().tolist():
            self.add_file(segment.path_at(begin + place))
        if not bool(has_tokens.any()):
            return
        is_training = flags & TRAINS != 0
        for trains in (True, False):
            self._choose_totals(trains).add_columns(segment.head.rank, table[has_tokens & (is_training == trains)])
        self.num_by_format["of format 1 in segments"] += int(has_tokens.sum())
        times = table[has_tokens, COLUMN["time"]]
        first, last = (
            from_microseconds(int(time)).isoformat(timespec="microseconds") for time in (times.min(), times.max())
        )
        self._note_times(first, last)
        sizes = table[:, COLUMN["rows"]] * table[:, COLUMN["row_length"]]
        largest, least = sizes.where(has_tokens, -1).argmax(), sizes.where(has_tokens, 2**62).argmin()
        for place in (int(largest), int(least)):
            record = segment.record_at(begin + place)
            assert record.counts is not None
            self._note_size(int(sizes[place]), segment.name_at(begin + place), record.counts)
        ends_step = (table[:, COLUMN["window"]] >= 0) & (table[:, COLUMN["optimizer_step"]] >= 0)
        self.steps_by_id[segment.head.recording].update(table[ends_step, COLUMN["optimizer_step"]].tolist())
        real, actions = table[:, COLUMN["real_tokens"]], table[:, COLUMN["action_tokens"]]
        is_odd = (flags & NON_FINITE != 0) | (table[:, COLUMN["empty_rows"]] > 0) | (actions == 0) | (real * 5 < sizes)
        for place in (is_odd & has_tokens).nonzero().flatten().tolist():
            self._note_odd_in_segment(segment, begin + place)

    def _note_odd_in_segment(self, segment: Segment, place: int) -> None:
        if len(self.odd) >= MAX_LISTED_ODD:
            self.num_odd += 1
            return
        record, path = segment.record_at(place), segment.path_at(place)
        assert record.counts is not None
        try:
            self._note_odd(path.name, record.counts, read_call(path) if record.has_non_finite else None)
        except CaptureError as error:
            self._damaged.append((path, format_error_with_flags(error)))

    def list_missing_ranks(self) -> list[int]:
        """List the ranks of the job's world of which there is no pass; none where captures do not name their rank."""
        ranks = {rank for kind in self.kinds.values() for rank in kind.ranks}
        return [] if None in ranks or not ranks else [rank for rank in range(self.world_size) if rank not in ranks]

    def find_longest(self) -> list[OddPass]:
        """Return the pass with the most tokens, if there are several kinds or ranks."""
        if self._longest is None or len(self._sizes) < 2:
            return []
        _, name, counts = self._longest
        reason = f"{counts.rows} rows of {counts.row_length}, {counts.real_tokens:,} tokens real"
        return [OddPass(source=name, reason=reason)]

    def _choose_totals(self, trains: bool) -> KindTotals:
        return self.kinds["train" if trains else "rollout"]

    def _note_times(self, first: str, last: str) -> None:
        self.first_time = min(first, self.first_time or first)
        self.last_time = max(last, self.last_time or last)

    def _note_size(self, size: int, name: str, counts: Counts) -> None:
        if len(self._sizes) < 2:
            self._sizes.add(size)
        if self._longest is None or size > self._longest[0]:
            self._longest = size, name, counts

    def _note_odd(self, name: str, counts: Counts, call: CapturedCall | None) -> None:
        reasons = _find_oddities(counts, call)
        self.num_odd += len(reasons)
        self.odd += [OddPass(source=name, reason=reason) for reason in reasons[: MAX_LISTED_ODD - len(self.odd)]]


def _find_oddities(counts: Counts, call: CapturedCall | None) -> list[str]:
    non_finite = {} if call is None else find_non_finite(call.outputs)
    reasons = [f"{name} was {value}" for name, value in non_finite.items()]
    if counts.empty_rows:
        reasons.append(f"{counts.empty_rows} of {counts.rows} rows have no real token")
    if counts.action_tokens == 0:
        reasons.append("no token is an action")
    if counts.real_tokens * 5 < counts.rows * counts.row_length:
        reasons.append(f"{1 - counts.real_tokens / (counts.rows * counts.row_length):.0%} is padding")
    return reasons


def compute_spread(counter: Counter[int]) -> ValueSpread:
    """Return the least, median and most of values that are counted."""
    values, total = sorted(counter), counter.total()
    cumulated = list(accumulate(counter[value] for value in values))
    middle = [values[bisect_right(cumulated, place)] for place in ((total - 1) // 2, total // 2)]
    return ValueSpread(least=values[0], median=sum(middle) / 2, most=values[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class RankIncident:
    """An incident that made a rank write its passes. `num_others` came later; nothing was written for those."""

    rank: int
    incident: Incident
    num_others: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What a folder of captures holds."""

    folder: Path
    model: str
    num_by_format: Mapping[str, int]
    first_time: str | None
    last_time: str | None
    versions: list[str] = field(default_factory=list)
    kinds: list[KindFacts] = field(default_factory=list)
    recordings: list[RecordingFacts] = field(default_factory=list)
    # What the checks say of the latest recording; None without a capture.
    linting: Linting | None = None
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    unreplayable: list[tuple[Path, str]] = field(default_factory=list)
    # The ranks of the job's world of which there is no pass.
    missing_ranks: list[int] = field(default_factory=list)
    world_size: int = 0
    # How many training passes were not recorded, by the reason.
    not_recorded: Mapping[str, int] = field(default_factory=dict)
    incidents: list[RankIncident] = field(default_factory=list)
    # Which rank was behind, and a line for each rank.
    hang: Pairs = field(default_factory=list)
    # The passes of dead processes that could not be written from memory to the folder.
    in_memory: str | None = None
    longest: list[OddPass] = field(default_factory=list)
    # The first MAX_LISTED_ODD of them.
    odd: list[OddPass] = field(default_factory=list)
    num_odd: int = 0

    @property
    def exit_code(self) -> int:
        """1: a file is damaged."""
        return 1 if self.damaged else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as JSON has it."""
        files = {"damaged": self.damaged, "unreplayable": self.unreplayable}
        errors = {name: [{"path": str(path), "error": error} for path, error in pairs] for name, pairs in files.items()}
        return {**to_json(self), **errors, "hang": dict(self.hang)}


def inspect_folder(folder: str | os.PathLike[str], *, recording: int | None = None) -> Inspection:
    """Summarise the captures in `folder`, and the passes that dead processes of this host left in memory.

    Of a pass in a segment only what stands out is read, and the first passes of one recording, which are checked;
    whether the others are damaged is for `capture check`.

    recording  number of the recording that is checked; None: the latest

    Raises UsageError if there is no such folder or recording, or it holds no captures or incidents.
    """
    folder = check_value("folder", folder, Path)
    check_folder(folder, "Try: replay inspect inputs/sample")
    recording = None if recording is None else check_value("recording", recording, int, min=1)
    in_memory = salvage_for_reading(folder)
    damaged: list[tuple[Path, str]] = []
    incidents, hang, not_recorded = _read_recorder_files(folder, damaged)
    files, segments = list_single_pass_files(folder), list_segment_files(folder)
    if not (files or segments or incidents or not_recorded) and in_memory is None:
        raise UsageError(f"{folder} holds no captures (*.pkl, or segments, *.seg). Try: replay inspect inputs/sample")
    totals = FolderTotals(damaged)
    for path in files:
        totals.add_file(path)
    with use_one_thread():
        for path in segments:
            totals.add_segment(path)
    model = _read_model(folder, damaged)
    recordings = list_recordings(folder)
    checked = choose_recording(recordings, recording) if recordings else None
    return Inspection(
        folder=folder,
        model=model,
        num_by_format=totals.num_by_format | ({"damaged": len(damaged)} if damaged else {}),
        first_time=totals.first_time,
        last_time=totals.last_time,
        versions=sorted(totals.versions),
        recordings=[describe_recording(recording, totals.steps_by_id) for recording in recordings],
        linting=None
        if checked is None
        else lint_recording(
            folder, checked, not_recorded, has_failed=any(ending.incident.ends_job for ending in incidents)
        ),
        kinds=[kind.summarize(name) for name, kind in totals.kinds.items() if kind.num_passes],
        damaged=damaged,
        unreplayable=totals.unreplayable,
        missing_ranks=totals.list_missing_ranks(),
        world_size=totals.world_size,
        not_recorded=not_recorded,
        incidents=incidents,
        hang=hang,
        in_memory=in_memory,
        longest=totals.find_longest(),
        odd=totals.odd,
        num_odd=totals.num_odd,
    )


def _read_recorder_files(
    folder: Path, damaged: list[tuple[Path, str]]
) -> tuple[list[RankIncident], Pairs, Mapping[str, int]]:
    """Return the incidents, which rank was behind, and the training passes that are missing, by the reason.

    Where these cannot be read, return none, and say so in `damaged`.
    """
    try:
        records = read_incidents(folder)
        hang = describe_hang(read_last_sightings(folder))
        not_recorded = count_not_recorded(folder)
    except CaptureError as error:
        damaged.append((folder, format_error_with_flags(error)))
        return [], [], {}
    incidents = [
        RankIncident(rank=record.rank, incident=incident, num_others=record.num_others)
        for record in records
        for incident in record.incidents
    ]
    return incidents, hang, not_recorded


def _read_model(folder: Path, damaged: list[tuple[Path, str]]) -> str:
    """Describe the model of actor.json; where that cannot be read, say so in `damaged`."""
    try:
        config = read_actor_config(folder)
    except CaptureError as error:
        damaged.append((folder / "actor.json", format_error_with_flags(error)))
        return "actor.json cannot be read"
    return "no actor.json: replay needs --model" if config is None else describe_model(config)


def describe_model(config: Mapping[str, object]) -> str:
    """Describe a model's config in one line; missing fields are left out."""
    sizes = {"num_hidden_layers": "layers", "hidden_size": "hidden", "vocab_size": "vocabulary"}
    words = [f"{word} {config[key]}" for key, word in sizes.items() if key in config]
    return ", ".join([str(config.get("model_type", "unnamed")), *words])
