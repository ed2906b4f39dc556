"""Hold a replay and what it came to: as it ended here, or as its log tells; also of one that failed or goes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from actor_init.spec import UsageError
from replay.output.text import counted
from replay.profiling.records import MemoryPeak, Profile
from replay.runlog.reader import folder_of, lines_so_far
from replay.runlog.records import PassRecord
from replay.runlog.run_file import RUN_FILE, RunEnd, RunFile, RunStart, Values, read_section
from replay.runlog.summary import Statistics, reason_to_leave_out, summarize
from replay.runner.out_of_memory import OutOfMemory
from replay.verdict.judge import Verdict

Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One replay: its log's folder, run.json, and passes by number and rank.

    problems  why the log is not whole
    """

    folder: Path
    file: RunFile
    records: Sequence[PassRecord]
    problems: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the run in the folder `path`, or the only one below it, as far as it came.

        Raises UsageError if it is no run's folder, or one of another format.
        """
        folder = folder_of(path)
        file = RunFile.read(folder)
        if file.start is None:
            raise UsageError(f"{folder}: run.json names no devices, so it is damaged. Give a folder that a run left")
        problems: list[str] = []
        records: list[PassRecord] = []
        for rank in range(len(file.start.devices)):
            own, problem = lines_so_far(folder / f"rank{rank}.jsonl")
            records += own
            problems += [problem] if problem else []
        records.sort(key=lambda record: (record.index, record.rank))
        if file.exit_code is None:
            problems.append("run.json has no end: the run goes on, or was killed")
        if failure := file.failure:
            problems.append(f"the run broke off{file.where_it_broke_off()}: {failure.error or failure.kind}")
        if failed := len({record.index for record in records if record.error is not None}):
            problems.append(f"{counted(failed, 'pass')} failed")
        return cls(folder=folder, file=file, records=records, problems=problems)

    @property
    def start(self) -> RunStart:
        """What was known before the first pass."""
        assert self.file.start is not None, "read() and a run that ended have one"
        return self.file.start

    @property
    def exit_code(self) -> int:
        """What the process ended with; 1 of a run that has no end."""
        return 1 if self.file.exit_code is None else self.file.exit_code

    @property
    def statistics(self) -> Statistics:
        return summarize(self.records)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict, None without an end. This and what follows raise UsageError for what another version wrote."""
        return self._section(Verdict, "verdict", self._end.verdict)

    @property
    def profile(self) -> Profile | None:
        return self._section(Profile, "profile", self._end.profile)

    @property
    def memory(self) -> MemoryPeak | None:
        return self._section(MemoryPeak, "memory", self._end.memory)

    @property
    def out_of_memory(self) -> OutOfMemory | None:
        return self._section(OutOfMemory, "out_of_memory", self._end.out_of_memory)

    @property
    def ranks(self) -> list[int]:
        return sorted({record.rank for record in self.records})

    def marks(self) -> dict[int, str]:
        """Return why passes are left out of the statistics, by pass."""
        ranks: dict[int, list[PassRecord]] = {}
        for record in self.records:
            ranks.setdefault(record.index, []).append(record)
        reasons = {index: reason_to_leave_out(peers) for index, peers in ranks.items()}
        return {index: reason for index, reason in reasons.items() if reason}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of run.json."""
        return self.file.to_dict()

    @property
    def _end(self) -> RunEnd:
        return self.file.end or RunEnd(statistics=self.statistics)

    def _section(self, kind: type[Section], name: str, values: Values | None) -> Section | None:
        return read_section(kind, values, source=f"{self.folder / RUN_FILE}: {name}")
