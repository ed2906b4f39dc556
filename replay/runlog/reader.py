"""Read a run from its log. An incomplete log, or one of another format, is refused in one line."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Self, TypeVar

from actor_init.spec import UsageError
from replay.options.option_parsing import in_flags, spec_from_dict
from replay.options.spec import EXAMPLE, Parts, check_log
from replay.output.text import join_lines, pluralise
from replay.runlog.records import PassRecord, parse_line
from replay.runlog.run_file import RUN_FILE, RunFile, RunStart, Values
from replay.runlog.summary import find_reason_to_leave_out
from replay.runlog.writer import INTERRUPTED


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun(Parts):
    """A run that finished, with every pass on every rank."""

    folder: Path
    command: str  # without the launcher
    facts: Mapping[str, object]
    weights: str  # digest
    config: Values  # of the model
    devices: Sequence[str]
    versions: Mapping[str, str | None]
    memory_kind: str
    records: list[PassRecord]  # by pass and rank

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the run in the folder `path`, or the only one below it. Raises UsageError if it cannot be compared."""
        folder = find_run_folder(path)
        run = RunFile.read(folder)
        start, num_passes = _check_finished(folder, run)
        spec = spec_from_dict(start.spec, source=f"{folder / RUN_FILE}, spec")
        past_run = cls(
            folder=folder,
            actor=spec.actor,
            inputs=spec.inputs,
            measure=spec.measure,
            state=spec.state,
            objective=spec.objective,
            command=start.command,
            facts=start.facts,
            weights=start.work.weights,
            config=start.work.config,
            devices=start.devices,
            versions=start.versions,
            memory_kind=start.memory_kind,
            records=_read_all_ranks(folder, len(start.devices), num_passes, spec.inputs.uneven, start.command),
        )
        if failed := [record for record in past_run.records if record.error is not None]:
            first = failed[0]
            raise UsageError(
                f"{folder}: pass {first.index + 1} failed on rank {first.rank} ({first.source}: {first.error_type}: "
                f"{first.error}). Runs are compared when every pass succeeded. Try: {run.command}, without that input"
            )
        if not past_run.records:
            raise UsageError(f"{folder}: no pass was replayed. Try: replay with other inputs")
        return past_run

    @property
    def num_data_ranks(self) -> int:
        return len(self.devices) // (self.actor.parallel.tp * self.actor.parallel.ring)


def find_run_folder(path: Path) -> Path:
    """Return the folder of a run: `path`, or the only one below it. Raises UsageError if there is none, or several."""
    check_log(path)
    if (path / RUN_FILE).is_file():
        return path
    runs = sorted(file.parent for file in path.glob(f"*/{RUN_FILE}"))
    inside = sorted(file.parent for file in path.glob(f"runs/**/{RUN_FILE}"))
    if not runs and inside:
        raise UsageError(f"{path} holds no run of its own (no {RUN_FILE}), but {inside[-1]} is one. Give that")
    if not runs:
        raise UsageError(f"{path} holds no run (no {RUN_FILE}). Give a folder that a run left, such as {EXAMPLE}")
    if len(runs) > 1:
        raise UsageError(f"{path} holds {len(runs)} runs. Name one of them, such as {runs[-1]}")
    return runs[0]


def _check_finished(folder: Path, run: RunFile) -> tuple[RunStart, int]:
    """Return the start of a run that finished, and the number of its passes.

    A run can fail with all its passes: damaged inputs and a failed save do that.
    """
    again = f"Try: {run.command}, again"
    if run.failure:
        where = run.where_it_broke_off()
        raise UsageError(f"{folder}: the run broke off{where}, see {folder / 'failure.txt'}. {again}")
    if run.exit_code is None:
        raise UsageError(f"{folder}: the log is cut short: it has no end, so the run goes on or was killed. {again}")
    if run.exit_code == INTERRUPTED:
        raise UsageError(f"{folder}: the log is cut short: the run was interrupted. {again}")
    if run.start is None or run.end is None:
        missing = "devices is" if run.start is None else "statistics is"
        raise UsageError(f"{folder / RUN_FILE} is damaged: {missing} missing. {again}")
    return run.start, run.end.statistics.num_passes


def read_run_below(folder: Path) -> tuple[Path | None, RunFile | None, list[PassRecord]]:
    """Read the only run below `folder`: its folder, run.json and records; nothing where it did not get that far."""
    logs = sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
    if not logs:
        return None, None, []
    return logs[0], RunFile.read(logs[0]), read_records(logs[0])


def read_records(folder: Path) -> list[PassRecord]:
    """Read all ranks' records, by pass and rank. An incomplete last line of a killed run is skipped."""
    records: list[PassRecord] = []
    for path in folder.glob("rank*.jsonl"):
        *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
        records += [parse_line(line, source=f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    return sorted(records, key=lambda record: (record.index, record.rank))


def _read_all_ranks(folder: Path, num_ranks: int, num_passes: int, may_differ: bool, command: str) -> list[PassRecord]:
    records: list[PassRecord] = []
    for rank in range(num_ranks):
        path = folder / f"rank{rank}.jsonl"
        own = read_lines(path, command)
        if [(record.index, record.rank) for record in own] != [(index, rank) for index in range(len(own))]:
            raise UsageError(f"{path} does not hold the passes of rank {rank} one by one. Try: {command}, again")
        if len(own) != num_passes and not (may_differ and len(own) < num_passes):
            raise UsageError(
                f"{path} is cut short: it has {len(own)} of {pluralise(num_passes, 'pass')}. Try: {command}, again"
            )
        records += own
    return sorted(records, key=lambda record: (record.index, record.rank))


def read_lines(path: Path, command: str) -> list[PassRecord]:
    """Read one rank's passes. Raises UsageError, which advises `command`, for a file that is damaged or cut short."""
    try:
        *lines, rest = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {join_lines(str(error))}. Try: {command}, again") from error
    if rest:
        raise UsageError(f"{path} is cut short in line {len(lines) + 1}. Try: {command}, again")
    records: list[PassRecord] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_line(line, source=f"{path} is damaged in line {number}"))
        except UsageError as error:
            raise UsageError(f"{error.text}. Try: {command}, again") from error
    return records


def read_lines_so_far(path: Path) -> tuple[list[PassRecord], str | None]:
    """Read one rank's passes up to the first line that is damaged or cut short; also return what is wrong with it."""
    records: list[PassRecord] = []
    try:
        *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        return records, f"{path.name} cannot be read: {error.strerror}"
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_line(line, source=f"{path.name} is damaged in line {number}"))
        except UsageError as error:
            return records, in_flags(error)
    return records, f"{path.name} is cut short in line {len(lines) + 1}" if rest else None


# Group a run's records into passes and accumulation windows identified by their inputs, and match those of two runs.
#
# Matching ignores order, data ranks, and tp or ring peers.

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPass:
    """One input through the model, as recorded by all ranks that shared it."""

    peers: Sequence[PassRecord]  # one per tp and ring rank
    is_counted: bool  # in the statistics of time and memory
    num_windows_before: int

    @property
    def source(self) -> str:
        return self.peers[0].source


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientWindow:
    """The passes that one gradient was averaged over: `grad_accumulation` passes on every data rank."""

    inputs: tuple[str, ...]  # sorted, because their order does not matter
    norms: Sequence[float]  # of every rank
    last_pass: int  # index of its last pass in the run
    index: int  # of its last pass, as each rank counts its own

    @property
    def name(self) -> str:
        return self.inputs[0] if len(self.inputs) == 1 else f"{self.inputs[0]} and {len(self.inputs) - 1} more"


def group_passes_and_windows(records: Sequence[PassRecord]) -> tuple[list[SharedPass], list[GradientWindow]]:
    """Return the passes and windows in all ranks' records, which are sorted by pass and rank."""
    passes: list[SharedPass] = []
    windows: list[GradientWindow] = []
    open_inputs: list[str] = []
    for _, group in groupby(records, key=lambda record: record.index):
        ranks = list(group)
        by_data_rank: dict[int, list[PassRecord]] = {}
        for record in ranks:
            by_data_rank.setdefault(record.data_rank, []).append(record)
        is_counted = find_reason_to_leave_out(ranks) is None
        for peers in by_data_rank.values():
            passes.append(SharedPass(peers=peers, is_counted=is_counted, num_windows_before=len(windows)))
            if peers[0].input.trains:
                open_inputs.append(peers[0].source)
        if norms := [record.result.grad_norm for record in ranks if record.result.grad_norm is not None]:
            inputs = tuple(sorted(open_inputs))
            windows.append(GradientWindow(inputs=inputs, norms=norms, last_pass=len(passes) - 1, index=ranks[0].index))
            open_inputs = []
    return passes, windows


def match_by_key(
    reference: Iterable[Item], others: Iterable[Item], key: Callable[[Item], Hashable]
) -> list[tuple[Item, Item]]:
    """Pair items with the same key, in the order of `reference`; equal keys pair up in order."""
    partners = _number_duplicates(others, key)
    return [(item, partners[name]) for name, item in _number_duplicates(reference, key).items() if name in partners]


def _number_duplicates(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[tuple[Hashable, int], Item]:
    seen: Counter[Hashable] = Counter()
    numbered: dict[tuple[Hashable, int], Item] = {}
    for item in items:
        numbered[key(item), seen[key(item)]] = item
        seen[key(item)] += 1
    return numbered
