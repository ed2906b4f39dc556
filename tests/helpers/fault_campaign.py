"""Faults against `replay parity`: its plan, its result and its first difference, over runs of a few shared worlds.

Parity itself starts processes for every run; here all runs of one kind of world share them, and a run may have a fault.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from transformers import AutoConfig

from replay.agreement.matrix import EDGE_DOCUMENTS, EDGES, Setting, name_of
from replay.agreement.noise_floor import ROUNDING_VARIATIONS, JudgedCell, MatrixJudge
from replay.agreement.plan import Cell, MatrixContext, plan_matrix
from replay.agreement.rows import ParityRow, RowState
from replay.comparison.differences import compare
from replay.options.spec import find_edge_folder
from replay.processes.child_job import ChildJob
from replay.runlog.reader import PastRun
from replay.tracing.distances import measure_distances
from replay.tracing.first_difference import FirstDifference, find_first_difference
from replay.tracing.trace_file import TracedRun
from tests.helpers.commands import ROOT
from tests.helpers.faults import Fault
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded import MODELS, SIZES

World = tuple[int, int, int]  # processes, tp, ring
Log = TypeVar("Log", PastRun, TracedRun)
Found = TypeVar("Found")

NUM_INPUTS = 4
OF_MODEL = {
    "llama, biases": "llama, tied, biases, uneven",
    "gemma3": "gemma3, sliding window, softcap",
    "qwen3": "qwen3, norms on heads",
    "llama": "llama",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """The clean runs of one model, dtype and seed: references, equivalents and cells."""

    cells: Sequence[Cell]
    model: str
    options: Mapping[str, Any]  # as typed, of the whole parity run
    group: str = ""

    def cell(self, setting: Setting) -> Cell:
        """The cell of `setting`."""
        name = f"{self.group}: {name_of(setting)}" if self.group else name_of(setting)
        [found] = [cell for cell in self.cells if cell.name == name]
        return found


def ground_of(
    model: str,
    settings: Iterable[Setting],
    home: Path,
    options: Mapping[str, Any],
    group: str = "",
    folder: Path | None = None,
) -> Ground:
    """What parity would run for these settings of one dtype, on inputs of the group, of `folder`, or of the sample."""
    home.mkdir(parents=True, exist_ok=True)
    values = {**SIZES, **MODELS[OF_MODEL[model]]}
    config = home / f"{model}.json"
    config.write_text(json.dumps(values))
    here = MatrixContext(
        device="cpu",
        num_devices=2,
        num_inputs=NUM_INPUTS,
        config=AutoConfig.for_model(**values),
        must_pack=group == EDGE_DOCUMENTS,
        group=group,
    )
    folder = find_edge_folder(EDGES[group]) if group else folder
    inputs = {"inputs": str(folder)} if folder else {}
    planned = plan_matrix(list(settings), {"model": str(config), **inputs, **options}, here)
    assert not [reason for name, reason in planned.refused.items() if "flash" not in name], planned.refused
    return Ground(cells=planned.cells, model=model, options=options, group=group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A cell with or without a fault, and where it is logged."""

    cell: Cell
    logs: Path
    fault: str = ""
    traced: bool = True

    @property
    def world(self) -> World:
        parallel = self.cell.spec.actor.parallel
        return self.cell.num_processes, parallel.tp, parallel.ring


def is_traceable(cell: Cell) -> bool:
    """A trace tells rows by their place."""
    return not cell.spec.inputs.reverse_rows


def replay_all(runs: Sequence[Run], home: Path) -> None:
    """One launch for each kind of world."""
    worlds: dict[World, list[dict[str, Any]]] = {}
    for run in runs:
        spec = run.cell.spec
        spec = replace(spec, measure=replace(spec.measure, trace=run.traced and is_traceable(run.cell)))
        spec = spec.make_child_spec()
        job = ChildJob(spec=spec).with_log_folder(run.logs)
        worlds.setdefault(run.world, []).append({"job": job.text, "fault": run.fault})
    for world, jobs in worlds.items():
        run_jobs(jobs, world, home)


def run_jobs(jobs: Sequence[Mapping[str, Any]], world: World, home: Path) -> None:
    """Those of tests/helpers/fault_worker.py, in one launch."""
    num_processes, tp, ring = world
    table = home / f"jobs-{num_processes}-{tp}-{ring}.json"
    table.write_text(json.dumps(jobs))
    run_ranks(["-m", "tests.helpers.fault_worker", str(table), str(tp), str(ring)], num_processes)


def run_command(arguments: Sequence[str], fault: str) -> None:
    """A command of `replay` in one process, with the fault."""
    program = ["-m", "tests.helpers.faulty_command", fault or "none"]
    subprocess.run([sys.executable, *program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@contextmanager
def comparing_once() -> Iterator[None]:
    """Read each run once, and compare each pair once: clean runs are in the answer about every fault."""

    def once(compared: Callable[[Log, Log], Found]) -> Callable[[Log, Log], Found]:
        known: dict[tuple[Path, Path], Found] = {}

        def remembered(reference: Log, other: Log) -> Found:
            pair = reference.folder, other.folder
            if pair not in known:
                known[pair] = compared(reference, other)
            return known[pair]

        return remembered

    with (
        patch.object(PastRun, "read", cache(PastRun.read)),
        patch.object(TracedRun, "read", cache(TracedRun.read)),
        patch("replay.agreement.noise_floor.compare", once(compare)),
        patch("replay.tracing.first_difference.measure_distances", once(measure_distances)),
    ):
        yield


@dataclass(slots=True)
class Campaign:
    """The clean runs of some grounds, and what parity says of them, and of them with a fault."""

    home: Path
    grounds: Sequence[Ground]
    faults: Sequence[Fault] = ()
    traced: bool = True
    _runs: dict[tuple[int, str, str], Run] = field(default_factory=dict)  # ground, cell, fault

    def replay(self) -> None:
        for number, ground in enumerate(self.grounds):
            for cell in ground.cells:
                self._add(number, cell, "")
            for fault in self.faults:
                if (fault.model, fault.options, fault.group) == (ground.model, ground.options, ground.group):
                    self._add(number, ground.cell(fault.cell), fault.name)
        replay_all(list(self._runs.values()), self.home)

    def _add(self, number: int, cell: Cell, fault: str) -> None:
        logs = self.home / str(number) / str(len(self._runs))
        self._runs[number, cell.name, fault] = Run(cell=cell, logs=logs, fault=fault, traced=self.traced)

    def place_of(self, fault: Fault) -> tuple[int, Cell]:
        """Its ground's number, and the cell that has it."""
        places = [(ground.model, ground.options, ground.group) for ground in self.grounds]
        number = places.index((fault.model, fault.options, fault.group))
        return number, self.grounds[number].cell(fault.cell)

    def judged(self, number: int, cell: Cell, fault: str = "") -> JudgedCell:
        """What parity says of `cell` in that ground, which has the fault."""
        rows = [
            self._row(number, other_cell, "")
            for other_cell in self.grounds[number].cells
            if other_cell.name != cell.name
        ]
        return MatrixJudge().judge([*rows, self._row(number, cell, fault)]).cells[cell.name]

    def parting(self, number: int, cell: Cell, fault: str = "") -> FirstDifference | None:
        """What parity names first, by the rule of `replay.commands.parity.runs`."""
        equivalents = [
            other_cell
            for other_cell in self.grounds[number].cells
            if other_cell.varies in ROUNDING_VARIATIONS and other_cell.name != cell.name
        ]
        [reference] = [other_cell for other_cell in self.grounds[number].cells if other_cell.name == cell.reference]
        return find_first_difference(
            self._log(number, reference, ""),
            self._log(number, cell, fault),
            [self._log(number, equivalent, "") for equivalent in equivalents],
        )

    def _row(self, number: int, cell: Cell, fault: str) -> ParityRow:
        return ParityRow(cell=cell, state=RowState.DONE, log=self._log(number, cell, fault))

    def _log(self, number: int, cell: Cell, fault: str) -> Path:
        return PastRun.read(self._runs[number, cell.name, fault].logs).folder


def grounds_for(faults: Iterable[Fault], home: Path, folder: Path | None = None) -> list[Ground]:
    """One for each model, options and group, with the cells that the faults are put into."""
    grounds: list[tuple[str, Mapping[str, Any], str, list[Setting]]] = []
    for fault in faults:
        known = [ground for ground in grounds if ground[:3] == (fault.model, fault.options, fault.group)]
        *_, settings = known[0] if known else (fault.model, fault.options, fault.group, list[Setting]())
        if not known:
            grounds.append((fault.model, fault.options, fault.group, settings))
        if fault.cell not in settings:
            settings.append(fault.cell)
    return [ground_of(model, settings, home, options, group, folder) for model, options, group, settings in grounds]
