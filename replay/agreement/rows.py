"""Hold what became of each run of a parity run.

`parity.json` (campaign.py) has the runs and what was judged in its result:

    {"finished": true, "runs": [{"name": "fsdp2 fp32 padded sdpa", "state": "done", "error": "", "seconds": 8.1,
                                 "log": "cells/001-fsdp2-fp32-padded-sdpa/0/20261121-185921-replay"}],
     "noises": [...], "cells": {...}, "remarks": [...], "first_differences": [...]}
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

from actor_init.spec import UsageError
from replay.agreement.plan import REPEATS, Cell, ParityPlan, Role
from replay.campaign.campaign import Campaign, EndedRun, PlannedRun
from replay.options.option_parsing import format_error_with_flags
from replay.processes.pool import ProcessResult
from replay.runlog.reader import PastRun


class RowState(StrEnum):
    # The run has not begun, or was interrupted.
    PENDING = "pending"
    DONE = "done"
    # The run refused its options: they contradict each other, or need what this machine lacks.
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityRun:
    """What parity.json has of a row; `log` is the folder of its log, below that of the command."""

    name: str
    state: RowState
    error: str
    seconds: float | None
    log: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityRow:
    """A cell and the state of its run."""

    cell: Cell
    state: RowState = RowState.PENDING
    error: str = ""
    seconds: float | None = None
    # Whether nothing else ran on the machine. Otherwise its times mean nothing.
    ran_alone: bool = True
    # Folder of the run's log.
    log: Path | None = None

    @property
    def is_open(self) -> bool:
        """Is the cell to be run? Also if it failed beside other runs, or because a reference did: alone it might
        succeed.
        """
        has_run_alone = self.seconds is not None and self.ran_alone
        return self.state is RowState.PENDING or (self.state is RowState.FAILED and not has_run_alone)

    def after(self, finished: EndedRun) -> Self:
        """Return the row with what came of its run."""
        state, error, log = judge_child(finished.process_result)
        return replace(
            self,
            state=state,
            error=error,
            log=log,
            seconds=finished.process_result.seconds,
            ran_alone=finished.ran_alone,
        )


@dataclass(kw_only=True, slots=True)
class ParityLog:
    """The runs of a parity run, as far as they are over."""

    campaign: Campaign[ParityPlan]
    rows: list[ParityRow] = field(init=False)

    def __post_init__(self) -> None:
        self.campaign.may_succeed_alone = _has_failed_run
        self.rows = [ParityRow(cell=cell) for cell in self.campaign.plan.cells]
        for number, planned_run in enumerate(self.planned_runs):
            if (finished := self.campaign.find_ended(planned_run)) is not None:
                self.rows[number] = self.rows[number].after(finished)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the log. Raises UsageError for anything but a parity run of this version."""
        return cls(campaign=Campaign.read("parity", folder, ParityPlan))

    @property
    def folder(self) -> Path:
        return self.campaign.folder

    @property
    def planned_runs(self) -> list[PlannedRun]:
        """Return the planned run of each row."""
        return [
            PlannedRun(
                home=f"cells/{number:03d}-{folder_name_of(row.cell.name)}",
                spec=row.cell.spec,
                num_processes=row.cell.num_processes,
                python=row.cell.python,
                repeat=int(row.cell.varies == REPEATS[0]),
            )
            for number, row in enumerate(self.rows, start=1)
        ]

    def run_rows(self, *, references: bool) -> Iterator[int]:
        """Run pending rows, and yield their numbers; those whose reference failed are not run.

        references  run the references; False: the others, which depend on what came of them
        """
        states = {row.cell.name: row.state for row in self.rows}
        numbers = []
        for number, row in enumerate(self.rows):
            if row.state is not RowState.PENDING or (row.cell.role is Role.REFERENCE) is not references:
                continue
            reference = RowState.DONE if references else states[row.cell.reference]
            if reference is RowState.DONE:
                numbers.append(number)
            elif reference is not RowState.PENDING:
                error = f"not run because its reference was not: {row.cell.reference}"
                self.rows[number] = replace(row, state=RowState.FAILED, error=error)
                yield number
        planned_runs = self.planned_runs
        for finished in self.campaign.run_all([planned_runs[number] for number in numbers]):
            number = numbers[finished.position]
            self.rows[number] = self.rows[number].after(finished)
            yield number

    def list_runs(self) -> list[ParityRun]:
        """List the rows as parity.json has them."""
        return [
            ParityRun(
                name=row.cell.name,
                state=row.state,
                error=row.error,
                seconds=row.seconds,
                log=None if row.log is None else str(row.log.relative_to(self.folder)),
            )
            for row in self.rows
        ]


def folder_name_of(cell: str) -> str:
    """Return the name of a cell as that of a folder."""
    return re.sub(r"[^\w.]+", "-", cell).strip("-")


def _has_failed_run(child: ProcessResult) -> bool:
    return judge_child(child)[0] is RowState.FAILED


def judge_child(child: ProcessResult) -> tuple[RowState, str, Path | None]:
    """Return the state of a run that has ended, why it is not whole, and the folder of its log."""
    if child.is_refusal:
        return RowState.REFUSED, child.error, None
    if child.exit_code not in (0, 1):
        return RowState.FAILED, child.error, None
    try:
        # an exit code of 1 with every pass done: some inputs were damaged
        return RowState.DONE, child.error, PastRun.read(child.logs).folder
    except UsageError as error:
        has_run = any(child.logs.glob("*/run.json"))
        return RowState.FAILED, format_error_with_flags(error) if has_run else child.error, None
