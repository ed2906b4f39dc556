"""Tell what failed in a replay that ran in processes of its own, and whether two failures are the same one.

exception    by type, and by message with numbers, paths and file names masked
not finite   a loss, log-probs or a gradient norm is nan or infinite
differs      the verdict is DIFFERS, by quantity; unsettled likewise
hang         no end within the limit, or no progress within --timeout
died         a process was ended by a signal, such as the system's for memory
"""

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from replay.output.text import join_lines
from replay.processes.pool import ProcessResult
from replay.runlog.reader import read_run_below
from replay.runlog.records import PassRecord
from replay.runlog.run_file import RunFailure, RunFile, RunStart, read_section
from replay.tolerances.job_bounds import LOG_PROBS
from replay.verdict.findings import FindingStatus
from replay.verdict.outcomes import Outcome, Verdict

_PLACE = re.compile(r"row (\d+), token (\d+)")
_ROW = re.compile(r"row (\d+)")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)
_FILE = re.compile(r"[^\s:,;'\"()\[\]]*(?:/[^\s:,;'\"()\[\]]*|\.pkl)")
_TYPED = re.compile(r"(?:rank \d+: )?(\w*(?:Error|Exception|Interrupt|Exit|Warning)\w*): (.*)")
ADVICE = ". --traceback shows where"


class FailureKind(StrEnum):
    EXCEPTION = "exception"
    NOT_FINITE = "not finite"
    DIFFERS = "differs"
    UNSETTLED = "unsettled"
    HANG = "hang"
    DIED = "died"
    PARITY = "parity"


# Failures that are a difference from what the job recorded.
JOB_DIFFERENCES = (FailureKind.DIFFERS, FailureKind.UNSETTLED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayFailure:
    """What failed. The fields above `said` tell one failure from another.

    error_type  of an exception, or the name of the signal that ended a process
    message     of an exception, masked; empty of out of memory, whose numbers and words vary
    quantities  that are not finite, or that differ
    said        what was printed or recorded
    index       the pass, from 0; None: not known
    source      its capture
    row, token  place in that capture, where the replay named one
    bound       of sums of log-probs that differ; None of other quantities
    """

    kind: FailureKind
    error_type: str = ""
    message: str = ""
    quantities: tuple[str, ...] = ()
    said: str = ""
    index: int | None = None
    source: str | None = None
    row: int | None = None
    token: int | None = None
    bound: float | None = None

    def is_same_as(self, other: "ReplayFailure") -> bool:
        """Is it the same failure? Of quantities one in common is enough."""
        if (self.kind, self.error_type, self.message) != (other.kind, other.error_type, other.message):
            return False
        return not self.quantities or bool({*self.quantities} & {*other.quantities})

    @property
    def text(self) -> str:
        """Say the failure in one line."""
        place = f" in pass {self.index + 1}, {self.source}" if self.index is not None and self.source else ""
        if self.kind is FailureKind.EXCEPTION:
            return f"{self.error_type}{place}: {self.said}"
        quantities = " and ".join(self.quantities)
        return f"{self.kind}{f' ({quantities})' if quantities else ''}{place}: {self.said}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayLog:
    """The log of a replay that has ended; empty if it did not get that far."""

    run: RunFile | None = None
    records: Sequence[PassRecord] = ()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the only log below `folder`."""
        _, run, records = read_run_below(folder)
        return cls(run=run, records=records)

    @property
    def start(self) -> RunStart | None:
        return None if self.run is None else self.run.start

    @property
    def failure(self) -> RunFailure:
        """What ended the run; without a kind if nothing did."""
        return self.run.failure if self.run is not None and self.run.failure is not None else RunFailure()

    @property
    def verdict(self) -> Verdict | None:
        values = None if self.run is None or self.run.end is None else self.run.end.verdict
        return read_section(Verdict, values, source="run.json: verdict")


def find_failure(child: ProcessResult) -> ReplayFailure | None:
    """Return what failed first in a replay; None if nothing did, or if it refused its options."""
    if child.is_refusal:
        return None
    log = ReplayLog.read(child.logs)
    finders = (
        _find_hang,
        _find_failed_rank,
        _find_failed_pass,
        _find_death,
        _find_not_finite,
        _find_difference,
        _find_early_error,
    )
    return next((failure for find in finders if (failure := find(child, log)) is not None), None)


def mask(message: str) -> str:
    """Return a message without what differs between inputs: numbers, paths and file names."""
    return _NUMBER.sub("N", _FILE.sub("FILE", join_lines(message)))


def _describe_exception(
    error_type: str, message: str, *, index: int | None = None, source: str | None = None
) -> ReplayFailure:
    is_memory = "OutOfMemory" in error_type
    return ReplayFailure(
        kind=FailureKind.EXCEPTION,
        error_type=error_type,
        message="" if is_memory else mask(message),
        said=join_lines(message),
        index=index,
        source=source,
    )


def _find_hang(child: ProcessResult, log: ReplayLog) -> ReplayFailure | None:
    failure = log.failure
    if child.exit_code is not None and failure.kind != "hung":
        return None
    message = failure.error or f"not finished within {child.seconds:.0f} s"
    index = len({record.index for record in log.records}) if failure.kind is None else _read_index(failure)
    return ReplayFailure(kind=FailureKind.HANG, said=message, index=index, source=failure.source)


def _read_index(failure: RunFailure) -> int | None:
    return failure.index if failure.index is not None and failure.index >= 0 else None


def _find_failed_rank(child: ProcessResult, log: ReplayLog) -> ReplayFailure | None:
    """Return the failure that ended all ranks, by the rank that failed first."""
    failure, error = log.failure, str(log.failure.error)
    index, source = _read_index(failure), failure.source
    if failure.kind == "died":
        return ReplayFailure(kind=FailureKind.DIED, said=error, index=index, source=source)
    if failure.kind != "failed":
        return None
    own_record = next(
        (record for record in log.records if record.rank == failure.rank and record.error is not None), None
    )
    if own_record is not None:
        return _describe_exception(str(own_record.error_type), str(own_record.error), index=index, source=source)
    match = _TYPED.match(error)
    return _describe_exception(*(match.groups() if match else ("error", error)), index=index, source=source)


def _find_failed_pass(child: ProcessResult, log: ReplayLog) -> ReplayFailure | None:
    failed = next((record for record in log.records if record.error is not None), None)
    if failed is None:
        return None
    return _describe_exception(str(failed.error_type), str(failed.error), index=failed.index, source=failed.source)


def _find_death(child: ProcessResult, log: ReplayLog) -> ReplayFailure | None:
    if child.exit_code is None or child.exit_code >= 0:
        return None
    name = signal.Signals(-child.exit_code).name
    index = len({record.index for record in log.records})
    return ReplayFailure(kind=FailureKind.DIED, error_type=name, said=f"a process was ended by {name}", index=index)


def _find_not_finite(child: ProcessResult, log: ReplayLog) -> ReplayFailure | None:
    # the loss scale of fp16 makes norms infinite
    is_fp16 = log.start is not None and log.start.spec["actor"].get("dtype") == "fp16"
    for record in log.records:
        values: dict[str, Sequence[float | None]] = {
            "loss": [record.result.loss],
            "log-probs": record.result.row_log_probs,
            "gradient norm": [] if is_fp16 else [record.result.grad_norm],
        }
        not_finite = [
            name
            for name, numbers in values.items()
            if any(value is not None and not math.isfinite(value) for value in numbers)
        ]
        if not_finite:
            first = record.first_non_finite or "what came first is not known"
            place = _PLACE.search(first)
            return ReplayFailure(
                kind=FailureKind.NOT_FINITE,
                quantities=tuple(not_finite),
                said=first,
                index=record.index,
                source=record.source,
                row=int(place[1]) if place else None,
                token=int(place[2]) if place else None,
            )
    return None


def _find_difference(child: ProcessResult, log: ReplayLog) -> ReplayFailure | None:
    verdict = log.verdict
    kinds = {Outcome.DIFFERS: FailureKind.DIFFERS, Outcome.UNSETTLED: FailureKind.UNSETTLED}
    if verdict is None or verdict.outcome not in kinds:
        return None
    first = verdict.first
    assert first is not None, "a verdict that differs or is unsettled names a pass"
    kind = kinds[verdict.outcome]
    status = FindingStatus.DIFFERS if kind is FailureKind.DIFFERS else FindingStatus.UNSETTLED
    findings = [finding for finding in first.findings if finding.status is status]
    rows = [_ROW.fullmatch(str(finding.where)) for finding in findings]
    row = next((int(match[1]) for match in rows if match), None)
    message = "; ".join(
        f"{finding.name}{' of ' + finding.where if finding.where else ''}: {finding.recorded} in the job, "
        f"{finding.replayed} here, {finding.difference} apart, bound {finding.bound}"
        for finding in findings[:1]
    )
    return ReplayFailure(
        kind=kind,
        quantities=tuple(dict.fromkeys(finding.name for finding in findings)),
        said=message or str(verdict.reason),
        index=first.index,
        source=first.source,
        row=row,
        bound=next((finding.bound for finding in findings if finding.name == LOG_PROBS), None),
    )


def _find_early_error(child: ProcessResult, log: ReplayLog) -> ReplayFailure | None:
    """Return an error outside a pass; None for a run with a verdict, which ended in no error of its own."""
    if child.exit_code == 0 or log.verdict is not None:
        return None
    message = child.error.removesuffix(ADVICE)
    match = _TYPED.match(message)
    return _describe_exception(*match.groups()) if match else _describe_exception("error", message)
