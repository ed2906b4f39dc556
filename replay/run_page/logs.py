"""Read the log of a run for its page: also of one that failed, goes on, or was cut short."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from actor_init.spec import UsageError
from replay.report.text import PHASES, counted
from replay.runlog.reader import folder_of, lines_so_far, read_run
from replay.runlog.records import PassRecord
from replay.runlog.summary import Statistics, reason_to_leave_out, summarize


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSoFar:
    """What the log of a run holds; whole or not."""

    folder: Path
    run: dict[str, Any]  # run.json
    records: Sequence[PassRecord]  # by pass and rank
    statistics: Statistics
    problems: Sequence[str]  # why the log is not whole

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the run in the folder `path`, or the only one below it.

        Raises UsageError if it is no run's folder, or one of another format.
        """
        folder = folder_of(path)
        run = read_run(folder)
        problems: list[str] = []
        records: list[PassRecord] = []
        devices = run.get("devices")
        if not isinstance(devices, list):
            raise UsageError(f"{folder}: run.json names no devices, so it is damaged. Give a folder that a run left")
        for rank in range(len(devices)):
            own, problem = lines_so_far(folder / f"rank{rank}.jsonl")
            records += own
            problems += [problem] if problem else []
        records.sort(key=lambda record: (record.index, record.rank))
        if run.get("exit_code") is None:
            problems.append("run.json has no end: the run goes on, or was killed")
        if failure := run.get("failure"):
            where = f" on rank {failure['rank']}" if failure.get("rank") is not None else ""
            problems.append(f"the run broke off{where}: {failure.get('error') or failure.get('kind')}")
        failed = len({record.index for record in records if record.error is not None})
        if failed:
            problems.append(f"{counted(failed, 'pass')} failed")
        return cls(folder=folder, run=run, records=records, statistics=summarize(records), problems=problems)

    @property
    def ranks(self) -> list[int]:
        return sorted({record.rank for record in self.records})

    @property
    def phases(self) -> list[str]:
        return [name for name in PHASES if any(name in record.cost.phases for record in self.records)]

    def marks(self) -> dict[int, str]:
        """Return why passes are left out of the statistics, by pass."""
        ranks: dict[int, list[PassRecord]] = {}
        for record in self.records:
            ranks.setdefault(record.index, []).append(record)
        reasons = {index: reason_to_leave_out(peers) for index, peers in ranks.items()}
        return {index: reason for index, reason in reasons.items() if reason}
