"""Find where a differing run departs from its reference: trace both again, beside equivalents that measure the noise.

Only the inputs of one gradient are run, those of the pass where the two are farthest apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from actor_init.spec import UsageError
from replay.campaign.job import Job
from replay.compare.text import parting
from replay.parity.noise_floor import CellResult
from replay.parity.plan import Cell
from replay.parity.results import MEASURING, MatrixResult
from replay.parity.rows import ParityLog, file_name
from replay.runlog.reader import PastRun
from replay.tracing.first_difference import FirstDifference, first_difference
from replay.wording import in_flags


class Partings:
    """Find the first difference of each differing run. References and equivalents are traced once and shared."""

    def __init__(self, log: ParityLog) -> None:
        self._campaign = log.campaign
        self._rows = {row.cell.name: row for row in log.rows}

    def of(self, result: MatrixResult) -> Iterator[tuple[str, str]]:
        """Yield a line for each run that differs."""
        distrusted = {name for noise in result.noises for name in noise.distrusted}
        measuring = {name for name, row in self._rows.items() if row.cell.varies in MEASURING}
        sound = [name for name in result.cells if name in measuring - distrusted]
        for name, judged in result.cells.items():
            if judged.result is CellResult.DIFFERS:
                index = judged.distances[judged.deciding[0]].place
                try:
                    said = parting(self._between(self._rows[name].cell, index, sound))
                except UsageError as error:
                    said = f"not found: {in_flags(error)}"
                yield "first", f"{name}: {said}"

    def _between(self, cell: Cell, index: int, sound: Sequence[str]) -> FirstDifference | None:
        """Find the first difference; `index` is that of the farthest pass."""
        num_inputs = cell.num_data_ranks * cell.spec.actor.num_accumulated  # behind one gradient
        first = index // num_inputs * num_inputs
        others = [self._rows[name].cell for name in sound if name != cell.name]
        equivalents = [one for one in others if one.ground == cell.ground]
        reference = self._rows[cell.reference].cell
        folders = [self._run(one, first, num_inputs) for one in (reference, cell, *equivalents)]
        return first_difference(folders[0], folders[1], folders[2:])

    def _run(self, cell: Cell, first: int, num_inputs: int) -> Path:
        """Return the log of the traced run over the inputs of one gradient. Raises UsageError if it failed."""
        num_each = num_inputs // cell.num_data_ranks
        spec = replace(
            cell.spec,
            actor=replace(cell.spec.actor, grad_accumulation=num_each),
            inputs=replace(cell.spec.inputs, skip_inputs=first // cell.num_data_ranks, max_inputs=num_each),
            measure=replace(cell.spec.measure, trace=True, warmup=0),
        )
        home = f"traces/{first:04d}-{file_name(cell.name)}"
        child = self._campaign.run(Job(home=home, spec=spec, num_processes=cell.num_processes, python=cell.python))
        if child.exit_code != 0:
            raise UsageError(f"the traced run of {cell.name} failed: {child.error}")
        return PastRun.read(child.logs).folder
