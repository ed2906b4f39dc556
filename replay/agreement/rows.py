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
from typing import Any, Self

from actor_init.spec import UsageError
from replay.agreement.plan import REPEATS, Cell, Plan, Role
from replay.campaign.campaign import Campaign, Job, Settled
from replay.options.option_parsing import in_flags
from replay.processes.pool import Child
from replay.runlog.reader import PastRun


class State(StrEnum):
    PENDING = "pending"  # not run yet, or interrupted
    DONE = "done"
    REFUSED = "refused"  # by the run itself: the options contradict each other or need what this machine lacks
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A cell and the state of its run."""

    cell: Cell
    state: State = State.PENDING
    error: str = ""
    seconds: float | None = None
    ran_alone: bool = True  # otherwise its times mean nothing
    log: Path | None = None  # the folder of its log

    @property
    def is_open(self) -> bool:
        """Is the cell to be run? Also if it failed beside other runs, or because a reference did: alone it might
        succeed.
        """
        has_run_alone = self.seconds is not None and self.ran_alone
        return self.state is State.PENDING or (self.state is State.FAILED and not has_run_alone)

    def after(self, settled: Settled) -> "Row":
        """Return the row with what came of its run."""
        state, error, log = _outcome(settled.child)
        return replace(
            self, state=state, error=error, log=log, seconds=settled.child.seconds, ran_alone=settled.ran_alone
        )


@dataclass(kw_only=True, slots=True)
class ParityLog:
    """The runs of a parity run, as far as they are over."""

    campaign: Campaign[Plan]
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        self.campaign.has_failed = _has_failed
        self.rows = [Row(cell=cell) for cell in self.campaign.plan.cells]
        for number, job in enumerate(self.jobs):
            if (settled := self.campaign.known(job)) is not None:
                self.rows[number] = self.rows[number].after(settled)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the log. Raises UsageError for anything but a parity run of this version."""
        return cls(campaign=Campaign.read("parity", folder, Plan))

    @property
    def folder(self) -> Path:
        return self.campaign.folder

    @property
    def jobs(self) -> list[Job]:
        """Return the job of each row."""
        return [
            Job(
                home=f"cells/{number:03d}-{file_name(row.cell.name)}",
                spec=row.cell.spec,
                num_processes=row.cell.num_processes,
                python=row.cell.python,
                repeat=int(row.cell.varies == REPEATS[0]),
            )
            for number, row in enumerate(self.rows, start=1)
        ]

    def settle(self, *, references: bool) -> Iterator[int]:
        """Run pending rows, and yield their numbers; those whose reference failed are not run.

        references  run the references; False: the others, which depend on what came of them
        """
        states = {row.cell.name: row.state for row in self.rows}
        numbers = []
        for number, row in enumerate(self.rows):
            if row.state is not State.PENDING or (row.cell.role is Role.REFERENCE) is not references:
                continue
            reference = State.DONE if references else states[row.cell.reference]
            if reference is State.DONE:
                numbers.append(number)
            elif reference is not State.PENDING:
                error = f"not run because its reference was not: {row.cell.reference}"
                self.rows[number] = replace(row, state=State.FAILED, error=error)
                yield number
        jobs = self.jobs
        for settled in self.campaign.settle([jobs[number] for number in numbers]):
            number = numbers[settled.place]
            self.rows[number] = self.rows[number].after(settled)
            yield number

    def write(self, result: dict[str, Any]) -> None:
        """Write the runs, and what was judged of them."""
        runs = [
            {
                "name": row.cell.name,
                "state": row.state,
                "error": row.error,
                "seconds": row.seconds,
                "log": None if row.log is None else str(row.log.relative_to(self.folder)),
            }
            for row in self.rows
        ]
        finished = all(row.state is not State.PENDING for row in self.rows)
        self.campaign.result = {"finished": finished, "runs": runs, **result}
        self.campaign.write()


def file_name(cell: str) -> str:
    """Return the name of a cell as that of a folder."""
    return re.sub(r"[^\w.]+", "-", cell).strip("-")


def _has_failed(child: Child) -> bool:
    return _outcome(child)[0] is State.FAILED


def _outcome(child: Child) -> tuple[State, str, Path | None]:
    if child.is_refusal:
        return State.REFUSED, child.error, None
    if child.exit_code not in (0, 1):
        return State.FAILED, child.error, None
    try:
        # an exit code of 1 with every pass done: some inputs were damaged
        return State.DONE, child.error, PastRun.read(child.logs).folder
    except UsageError as error:
        has_run = any(child.logs.glob("*/run.json"))
        return State.FAILED, in_flags(error) if has_run else child.error, None
