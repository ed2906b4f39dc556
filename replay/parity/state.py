"""Keep the state of a parity run in `logs/<time>-parity/parity.json`, rewritten whenever a cell ends.

{"format": 2, "command": "replay parity --matrix quick", "finished": false, "device": "cpu", "num_devices": 2,
 "refused": {"fsdp2 bf16 packed flash": "flash-attn has no CPU kernel. Try: [...]"},
 "result": {"noise": [...], "cells": {...}, "remarks": [...]},
 "cells": [{"name": "fsdp2 fp32 padded sdpa", "role": "reference", "state": "done", "seconds": 8.1,
            "log": "cells/01-fsdp2-fp32-padded-sdpa/20261121-185921-replay", "spec": {...}, ...}]}
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from actor_init.as_json import from_json, to_json
from actor_init.spec import UsageError
from capture.file_format.atomic_write import write_atomically
from replay.option_parsing import spec_from_dict, spec_to_dict
from replay.parity.plan import Cell, Plan, Role
from replay.processes.interpreter import Environment

FORMAT = 2
FILE = "parity.json"


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


@dataclass(kw_only=True, slots=True)
class ParityLog:
    folder: Path
    command: str
    device: str
    num_devices: int
    rows: list[Row]
    refused: dict[str, str]
    result: Mapping[str, Any] = field(default_factory=dict)  # as JSON, for readers of the file
    finished: bool = False
    environments: list[Environment] = field(default_factory=list)  # none: this one alone
    _lines: list[str] = field(init=False)  # rows as JSON text: serialising a thousand takes half a second

    def __post_init__(self) -> None:
        self._lines = [_line(row, self.folder) for row in self.rows]

    @classmethod
    def begin(
        cls,
        folder: Path,
        plan: Plan,
        *,
        command: str,
        device: str,
        num_devices: int,
        environments: Sequence[Environment] = (),
    ) -> Self:
        log = cls(
            folder=folder,
            command=command,
            device=device,
            num_devices=num_devices,
            rows=[Row(cell=cell) for cell in plan.cells],
            refused=plan.refused,
            environments=list(environments),
        )
        log.write()
        return log

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the log, with unfinished rows pending again. Raises UsageError for anything but a parity run of this
        version.
        """
        path = folder / FILE
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is damaged: {error!r}. Try: replay parity, from the beginning") from error
        if isinstance(whole, dict) and whole.get("format", FORMAT) != FORMAT:
            raise UsageError(f"{path} is of format {whole['format']}; this version goes on with {FORMAT} alone")
        try:
            written = from_json(_File, _with_current_keys(whole), source=f"{path} is damaged", ignore_others=True)
            rows = [
                _row_of(line, folder, source=f"{path} is damaged: cells.{number}")
                for number, line in enumerate(written.cells)
            ]
        except UsageError as error:
            raise UsageError(f"{error.text}. Try: replay parity, from the beginning") from error
        return cls(
            folder=folder,
            command=written.command,
            device=written.device,
            num_devices=written.num_devices,
            rows=rows,
            refused=written.refused,
            environments=written.environments,
        )

    def write(self) -> None:
        whole = {
            "format": FORMAT,
            "command": self.command,
            "finished": self.finished,
            "device": self.device,
            "num_devices": self.num_devices,
            "refused": self.refused,
            "environments": self.environments,
            "result": self.result,
        }
        text = json.dumps(to_json(whole), indent=1, allow_nan=False).removesuffix("\n}")
        cells = ",\n  ".join(self._lines)
        write_atomically(self.folder / FILE, f'{text},\n "cells": [\n  {cells}\n ]\n}}\n'.encode())

    def pending(self) -> Iterator[tuple[int, Row]]:
        """Yield the pending rows, checking each when it is reached."""
        for number in range(len(self.rows)):
            if self.rows[number].state is State.PENDING:
                yield number, self.rows[number]

    def settle(self, number: int, **changes: Any) -> Row:
        self.rows[number] = replace(self.rows[number], **changes)
        self._lines[number] = _line(self.rows[number], self.folder)
        self.write()
        return self.rows[number]

    def home_of(self, number: int) -> Path:
        """Return the folder for a cell's files."""
        name = re.sub(r"[^\w.]+", "-", self.rows[number].cell.name).strip("-")
        return self.folder / "cells" / f"{number + 1:03d}-{name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """One row as parity.json stores it."""

    name: str
    role: Role
    num_processes: int
    reference: str
    varies: str
    group: str
    state: State
    error: str
    seconds: float | None
    log: str | None  # relative to the folder of parity.json
    ran_alone: bool
    spec: dict[str, Any]
    python: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """The fields of parity.json that --continue reads."""

    format: int
    command: str
    device: str
    num_devices: int
    refused: dict[str, str]
    cells: list[_Line]
    environments: list[Environment] = field(default_factory=list)


def _with_current_keys(whole: Any) -> Any:
    """Rename the key `trouble` of cells, which earlier versions wrote, to `error`."""
    if not isinstance(whole, dict) or not isinstance(whole.get("cells"), list):
        return whole
    cells = [
        {"error" if key == "trouble" else key: value for key, value in cell.items()} if isinstance(cell, dict) else cell
        for cell in whole["cells"]
    ]
    return whole | {"cells": cells}


def _line(row: Row, folder: Path) -> str:
    line = _Line(
        name=row.cell.name,
        role=row.cell.role,
        num_processes=row.cell.num_processes,
        reference=row.cell.reference,
        varies=row.cell.varies,
        group=row.cell.group,
        state=row.state,
        error=row.error,
        seconds=row.seconds,
        log=None if row.log is None else str(row.log.relative_to(folder)),
        ran_alone=row.ran_alone,
        spec=spec_to_dict(row.cell.spec),
        python=row.cell.python,
    )
    return json.dumps(to_json(line), allow_nan=False)


def _row_of(line: _Line, folder: Path, *, source: str) -> Row:
    cell = Cell(
        name=line.name,
        role=line.role,
        spec=spec_from_dict(line.spec, source=f"{source}.spec"),
        num_processes=line.num_processes,
        reference=line.reference,
        varies=line.varies,
        group=line.group,
        python=line.python,
    )
    row = Row(
        cell=cell,
        state=line.state,
        error=line.error,
        seconds=line.seconds,
        ran_alone=line.ran_alone,
        log=None if line.log is None else folder / line.log,
    )
    return Row(cell=cell) if row.is_open else row
