"""Rows of a parity run whose logs say what they are told to say."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.agreement.noise_floor import CellResult, MatrixJudge, MatrixResult
from replay.agreement.plan import Cell, Role
from replay.agreement.rows import ParityRow, RowState
from replay.options.option_parsing import build_replay_spec
from replay.options.spec import ReplaySpec
from replay.runlog.records import PassRecord
from tests.helpers.made_logs import passed, write_log

CONFIG = {"config": {"num_hidden_layers": 4, "hidden_size": 64}}


NAMES = "wxyz"


@dataclass
class Made:
    """Rows of a parity run whose logs say what they are told to say."""

    home: Path
    rows: list[ParityRow]

    def add(
        self,
        name: str,
        factor: float = 1.0,
        *,
        varies: str = "",
        reference: str = "ref",
        dtype: str = "fp32",
        role: Role = Role.CELL,
        num_processes: int = 1,
        records: list[PassRecord] | None = None,
        spec: ReplaySpec | None = None,
        group: str = "",
        **changes: Any,
    ) -> None:
        """A run whose losses are `factor` of the reference's."""
        spec = spec or build_replay_spec({"dtype": dtype})
        own = [passed(index, letter, factor * 2.0) for index, letter in enumerate(NAMES)]
        folder = write_log(self.home / name, records or own, spec=spec, **{"work": CONFIG, **changes})
        role = Role.REFERENCE if name == reference else Role.EQUIVALENT if varies else role
        cell = Cell(
            name=name,
            role=role,
            spec=spec,
            num_processes=num_processes,
            reference=reference,
            varies=varies,
            group=group,
        )
        self.rows.append(ParityRow(cell=cell, state=RowState.DONE, log=folder))

    def judged(self) -> MatrixResult:
        return MatrixJudge().judge(self.rows)

    def verdict_of(self, name: str) -> CellResult:
        return self.judged().cells[name].result
