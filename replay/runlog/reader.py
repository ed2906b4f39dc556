"""Read a run from its log. An incomplete log, or one of another format, is refused in one line."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Self, TypeVar

from actor_init.spec import UsageError
from replay.options.option_parsing import format_error_with_flags, spec_from_dict
from replay.options.resolved import LOSS
from replay.options.spec import EXAMPLE, LossName, ReplayParts, StepMode, check_log
from replay.output.text import join_lines, pluralise
from replay.runlog.records import PassRecord, parse_line
from replay.runlog.run_file import RUN_FILE, RunFile, RunStart, Values
from replay.runlog.summary import find_reason_to_leave_out
from replay.runlog.writer import INTERRUPTED


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun(ReplayParts):
    """A run that finished, with every pass on every rank.

    command  without the launcher
    weights  their digest
    config   of the model
    devices  by rank
    records  in the order of pass and rank
    """

    folder: Path
    command: str
    facts: Mapping[str, object]
    weights: str
    config: Values
    devices: Sequence[str]
    versions: Mapping[str, str | None]
    memory_kind: str
    records: list[PassRecord]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the run in the folder `path`, or the only one below it. Raises UsageError if it cannot be compared."""
        folder = find_run_folder(path)
        run = RunFile.read(folder)
        start = _check_finished(folder, run)
        spec = spec_from_dict(start.spec, source=f"{folder / RUN_FILE}, spec")
        records = _read_all_ranks(folder, run, len(start.devices), start.command)
        # Of `--step auto` the records tell whether it stepped.
        has_stepped = spec.measure.steps or any(record.result.has_stepped for record in records)
        past_run = cls(
            folder=folder,
            actor=spec.actor,
            inputs=spec.inputs,
            measure=replace(
                spec.measure,
                loss=_find_loss(spec.measure.loss, start),
                step=StepMode.ON if has_stepped else StepMode.OFF,
            ),
            state=spec.state,
            objective=spec.objective,
            command=start.command,
            facts=start.facts,
            weights=start.work.weights,
            config=start.work.config,
            devices=start.devices,
            versions=start.versions,
            memory_kind=start.memory_kind,
            records=records,
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


def _find_loss(typed: str, start: RunStart) -> str:
    """Return the loss of a run's passes: the typed word, or of `auto` what the run chose."""
    if typed != LossName.AUTO:
        return typed
    return next((str(choice["value"]) for choice in start.resolved if choice["setting"] == LOSS), typed)


def find_run_folder(path: Path) -> Path:
    """Return the folder of a run: `path`, or the only one below it. Raises UsageError if there is none, or several."""
    check_log(path)
    if (path / RUN_FILE).is_file():
        return path
    runs = sorted(file.parent for file in path.glob(f"*/{RUN_FILE}"))
    # A command of many runs keeps them below `runs`.
    deeper_runs = sorted(file.parent for file in path.glob(f"runs/**/{RUN_FILE}"))
    if not runs and deeper_runs:
        raise UsageError(f"{path} holds no run of its own (no {RUN_FILE}), but {deeper_runs[-1]} is one. Give that")
    if not runs:
        raise UsageError(f"{path} holds no run (no {RUN_FILE}). Give a folder that a run left, such as {EXAMPLE}")
    if len(runs) > 1:
        raise UsageError(f"{path} holds {len(runs)} runs. Name one of them, such as {runs[-1]}")
    return runs[0]


def _check_finished(folder: Path, run: RunFile) -> RunStart:
    """Return the start of a run that finished. Raises UsageError if it did not finish.

    The exit code does not tell: a run with damaged inputs or a failed save fails, and has all its passes.
    """
    advice = f"Try: {run.command}, again"
    if run.failure:
        where = run.describe_failed_rank()
        raise UsageError(f"{folder}: the run broke off{where}, see {folder / 'failure.txt'}. {advice}")
    if run.exit_code is None:
        raise UsageError(f"{folder}: the log is cut short: it has no end, so the run goes on or was killed. {advice}")
    if run.exit_code == INTERRUPTED:
        raise UsageError(f"{folder}: the log is cut short: the run was interrupted. {advice}")
    if run.start is None or run.end is None:
        missing = "devices is" if run.start is None else "statistics is"
        raise UsageError(f"{folder / RUN_FILE} is damaged: {missing} missing. {advice}")
    return run.start


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


def describe_missing_passes(run: RunFile, num_lines: int) -> str | None:
    """Return what the log of a rank lacks, in words, if the run went through all its passes; None if nothing."""
    if run.start is None or run.end is None or run.failure is not None or run.exit_code in (None, INTERRUPTED):
        return None
    num_passes = run.end.statistics.num_passes
    if num_lines == num_passes:
        return None
    # With --uneven some ranks have fewer passes than others. Of one rank there is no other.
    if num_lines < num_passes and len(run.start.devices) > 1:
        spec = spec_from_dict(run.start.spec, source=f"{RUN_FILE}, spec")
        if spec.inputs.uneven:
            return None
    return f"is cut short: it has {num_lines} of {pluralise(num_passes, 'pass')}"


def _read_all_ranks(folder: Path, run: RunFile, num_ranks: int, command: str) -> list[PassRecord]:
    """Read the records of all ranks, by pass and rank."""
    records: list[PassRecord] = []
    for rank in range(num_ranks):
        path = folder / f"rank{rank}.jsonl"
        lines = read_lines(path, command)
        if [(record.index, record.rank) for record in lines] != [(index, rank) for index in range(len(lines))]:
            raise UsageError(f"{path} does not hold the passes of rank {rank} one by one. Try: {command}, again")
        if lack := describe_missing_passes(run, len(lines)):
            raise UsageError(f"{path} {lack}. Try: {command}, again")
        records += lines
    return sorted(records, key=lambda record: (record.index, record.rank))


def read_lines(path: Path, command: str) -> list[PassRecord]:
    """Read one rank's passes. Raises UsageError, which advises `command`, for a file that is damaged or cut short."""
    try:
        *lines, unfinished = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {join_lines(str(error))}. Try: {command}, again") from error
    if unfinished:
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
        *lines, unfinished = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        return records, f"{path.name} cannot be read: {error.strerror}"
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_line(line, source=f"{path.name} is damaged in line {number}"))
        except UsageError as error:
            return records, format_error_with_flags(error)
    return records, f"{path.name} is cut short in line {len(lines) + 1}" if unfinished else None


# The records of two runs are matched by the inputs of their passes and windows. So their order, data ranks, and tp or
# ring peers do not matter.

Matched = TypeVar("Matched")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPass:
    """One input through the model, as recorded by all ranks that shared it.

    peers       the records of the tp and ring ranks
    is_counted  the pass counts in the statistics of time and memory
    """

    peers: Sequence[PassRecord]
    is_counted: bool
    num_windows_before: int

    @property
    def source(self) -> str:
        return self.peers[0].source


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientWindow:
    """The passes that one gradient was averaged over: `grad_accumulation` passes on every data rank.

    inputs     sorted, because their order does not matter
    norms      of the gradient, by rank
    last_pass  the number of its last pass among all passes of the run
    index      of its last pass, as each rank counts its passes
    """

    inputs: tuple[str, ...]
    norms: Sequence[float]
    last_pass: int
    index: int

    @property
    def name(self) -> str:
        return self.inputs[0] if len(self.inputs) == 1 else f"{self.inputs[0]} and {len(self.inputs) - 1} more"


def group_passes_and_windows(records: Sequence[PassRecord]) -> tuple[list[SharedPass], list[GradientWindow]]:
    """Return the passes and windows in all ranks' records, which are sorted by pass and rank."""
    passes: list[SharedPass] = []
    windows: list[GradientWindow] = []
    open_inputs: list[str] = []
    open_window: int | None = None
    for _, group in groupby(records, key=lambda record: record.index):
        ranks = list(group)
        by_data_rank: dict[int, list[PassRecord]] = {}
        for record in ranks:
            by_data_rank.setdefault(record.data_rank, []).append(record)
        is_counted = find_reason_to_leave_out(ranks) is None
        if ranks[0].window is not None and ranks[0].window != open_window:
            # A window that lacks a pass ended without a norm.
            open_inputs, open_window = [], ranks[0].window
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
    references: Iterable[Matched], others: Iterable[Matched], key: Callable[[Matched], Hashable]
) -> list[tuple[Matched, Matched]]:
    """Pair values with the same key, in the order of `references`; several values with one key pair up in order."""
    partners = _index_by_key(others, key)
    pairs = _index_by_key(references, key).items()
    return [(reference, partners[numbered_key]) for numbered_key, reference in pairs if numbered_key in partners]


def _index_by_key(values: Iterable[Matched], key: Callable[[Matched], Hashable]) -> dict[tuple[Hashable, int], Matched]:
    """Index values by their key and by how many values before have the same key."""
    counts: Counter[Hashable] = Counter()
    by_key: dict[tuple[Hashable, int], Matched] = {}
    for value in values:
        by_key[key(value), counts[key(value)]] = value
        counts[key(value)] += 1
    return by_key
