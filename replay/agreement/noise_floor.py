"""Measure the noise floor of each dtype from runs that should be equal except for rounding, and judge each cell by it.

A distance is |other - reference|, relative to the reference's value or to the mean of all values, whichever is larger:
a row of one near-certain token has a log-prob near 0, and its rounding error must not count as a difference.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Self

from actor_init.as_json import AnyFloat
from actor_init.spec import Dtype, UsageError
from replay.agreement.plan import Role
from replay.agreement.rows import ParityRow, RowState
from replay.comparison.differences import ComparedPoint, Differences, compare
from replay.options.option_parsing import format_error_with_flags
from replay.output.text import pluralise
from replay.runlog.reader import PastRun
from replay.runlog.summary import Statistics, summarize
from replay.tolerances.difference import FP32_SPACING, as_share, estimate_rounding_ceiling
from replay.tolerances.run_bounds import CEILINGS, compute_bound_from_floor, is_trusted


class CellResult(StrEnum):
    EQUAL = "EQUAL"
    WITHIN_NOISE = "WITHIN NOISE"
    DIFFERS = "DIFFERS"
    # The noise of the cell's dtype could not be measured.
    NOT_JUDGED = "NOT JUDGED"


@dataclass(frozen=True, kw_only=True, slots=True)
class FarthestPoint:
    """The farthest point of one quantity."""

    value: AnyFloat
    # The input's file.
    source: str
    # Index of the pass among the reference's passes.
    place: int
    num_points: int
    # Name of the parameter, where the quantity is measured by parameter.
    name: str = ""

    @property
    def where(self) -> str:
        return f"{self.name} at {self.source}" if self.name else self.source


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityNoise:
    """The noise floor of one quantity in one dtype."""

    dtype: Dtype
    # The group of runs that the floor applies to.
    group: str = ""
    quantity: str
    # None where no equivalent run can be trusted.
    floor: float | None
    # Name of the run that set the floor.
    equivalent: str
    factor: float
    bound: float
    ceiling: float
    # Distances by name of the equivalent run.
    measured: Mapping[str, AnyFloat]
    # Equivalent runs whose distance is too large for rounding.
    distrusted: Sequence[str]

    @property
    def baseline(self) -> tuple[str, Dtype]:
        return self.group, self.dtype


def measure_parity_distances(comparison: Differences) -> dict[str, FarthestPoint]:
    """Return distances by quantity: loss, log-probs, token log-probs, gradient norm and gradients, where recorded."""
    return {quantity.name: _find_farthest(quantity.points) for quantity in comparison.results}


def _find_farthest(points: Sequence[ComparedPoint]) -> FarthestPoint:
    sizes = [abs(point.reference) for point in points if math.isfinite(point.reference)]
    mean = fmean(sizes) if sizes else 0.0

    def distance(point: ComparedPoint) -> float:
        size = abs(point.reference) if point.apart is not None else max(abs(point.reference), mean)
        return as_share(point.difference, size)

    worst = max(points, key=distance)
    return FarthestPoint(
        value=distance(worst),
        source=worst.source,
        place=worst.place,
        num_points=sum(point.num_values for point in points),
        name=worst.name,
    )


def measure_noise(
    dtype: Dtype, quantity: str, equivalents: Mapping[str, FarthestPoint], ceiling: float, *, group: str = ""
) -> ParityNoise:
    """Return the noise from `equivalents`, distances by run name. `ceiling` applies to a single number."""
    ceiling *= CEILINGS.get(quantity, 1.0)
    measured = {name: point.value for name, point in equivalents.items()}
    trusted = {name: value for name, value in measured.items() if is_trusted(name, measured, ceiling)}
    loudest = max(trusted, key=lambda name: trusted[name], default="")
    floor = max(trusted[loudest], FP32_SPACING) if trusted else None
    bound = compute_bound_from_floor(floor, equivalents[loudest].num_points if trusted else 0, ceiling)
    return ParityNoise(
        dtype=dtype,
        group=group,
        quantity=quantity,
        floor=floor,
        equivalent=loudest,
        factor=bound / (floor or FP32_SPACING),
        bound=bound,
        ceiling=ceiling,
        measured=measured,
        distrusted=[name for name in measured if name not in trusted],
    )


def judge_distances(
    distances: Mapping[str, FarthestPoint], noises: Mapping[str, ParityNoise]
) -> tuple[CellResult, list[str]]:
    """Return the result of a cell and the quantities that decide it; `noises` are those of its dtype, by quantity."""
    if all(point.value <= FP32_SPACING for point in distances.values()):
        return CellResult.EQUAL, []
    beyond = [name for name, point in distances.items() if name in noises and point.value > noises[name].bound]
    if beyond:
        return CellResult.DIFFERS, beyond
    unknown = [name for name in distances if name not in noises]
    return (CellResult.NOT_JUDGED, unknown) if unknown else (CellResult.WITHIN_NOISE, [])


# What equivalents vary that changes rounding. The other equivalents may be bitwise equal to the reference.
ROUNDING_VARIATIONS = ("kernel", "reduction order", "tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedCell:
    """A cell that has run, compared with its reference."""

    result: CellResult
    # By quantity.
    distances: Mapping[str, FarthestPoint]
    # Quantities beyond their bound, or without a bound.
    deciding: Sequence[str]
    # Why the cell, or a part of it, was not judged.
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixResult:
    # By name, without the references of each dtype and the cells that did not run.
    cells: Mapping[str, JudgedCell]
    noises: Sequence[ParityNoise]
    # Faults of a reference or of an equivalent run.
    remarks: Sequence[str]
    # By name, for every run.
    costs: Mapping[str, Statistics]

    @property
    def is_clean(self) -> bool:
        return not self.remarks and all(
            cell.result in (CellResult.EQUAL, CellResult.WITHIN_NOISE) for cell in self.cells.values()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogDistances:
    """The result of comparing two logs; no distances if they could not be compared."""

    distances: Mapping[str, FarthestPoint] = field(default_factory=dict)
    notes: Sequence[str] = ()
    # Whether the gradient norms are missing, or are those of other windows.
    lacks_norms: bool = False

    @classmethod
    def measure(cls, comparison: Differences) -> Self:
        unfinished = [
            f"{quantity.name} is not finite at {pluralise(quantity.num_not_finite, 'point')}"
            for quantity in comparison.results
            if quantity.num_not_finite
        ]
        norms = [note for note in comparison.notes if note.startswith("gradient norms")]
        return cls(distances=measure_parity_distances(comparison), notes=unfinished + norms, lacks_norms=bool(norms))


@dataclass(slots=True)
class MatrixJudge:
    """Judge the cells of a matrix. Reads each log once, however often it is asked."""

    _runs: dict[str, PastRun] = field(default_factory=dict)
    _distances: dict[tuple[str, str], LogDistances] = field(default_factory=dict)
    _costs: dict[str, Statistics] = field(default_factory=dict)

    def judge(self, rows: Sequence[ParityRow]) -> MatrixResult:
        """Return the results that follow from the cells that are done."""
        finished = {row.cell.name: row for row in rows if row.state is RowState.DONE}
        noises: list[ParityNoise] = []
        remarks: list[str] = []
        for baseline in dict.fromkeys(row.cell.baseline for row in rows):
            noises += self._measure_noises(baseline, finished)
        remarks += [_describe_distrust(noise, finished) for noise in noises if noise.distrusted]
        remarks += self._compare_dtypes(finished)
        judged_cells = {
            row.cell.name: self._judge_row(row, finished, noises)
            for row in finished.values()
            if row.cell.reference != row.cell.name
        }
        costs = {name: self._summarize_cost(row) for name, row in finished.items()}
        return MatrixResult(cells=judged_cells, noises=noises, remarks=remarks, costs=costs)

    def _measure_noises(self, baseline: tuple[str, Dtype], finished: Mapping[str, ParityRow]) -> list[ParityNoise]:
        """Return the noise; none before an equivalent that changes rounding has run."""
        group, dtype = baseline
        equivalents = [
            row for row in finished.values() if row.cell.role is Role.EQUIVALENT and row.cell.baseline == baseline
        ]
        # By quantity, then by name of the equivalent run.
        distances: dict[str, dict[str, FarthestPoint]] = {}
        for row in equivalents:
            log_distances = self._compare_with_reference(row.cell.name, row.cell.reference, finished)
            for quantity, distance in log_distances.distances.items():
                distances.setdefault(quantity, {})[row.cell.name] = distance
        if not any(row.cell.varies in ROUNDING_VARIATIONS for row in equivalents):
            return []
        ceiling = self._compute_ceiling(dtype, finished[equivalents[0].cell.reference])
        return [measure_noise(dtype, quantity, points, ceiling, group=group) for quantity, points in distances.items()]

    def _judge_row(
        self, row: ParityRow, finished: Mapping[str, ParityRow], noises: Sequence[ParityNoise]
    ) -> JudgedCell:
        compared = self._compare_with_reference(row.cell.name, row.cell.reference, finished)
        if not compared.distances:
            return JudgedCell(result=CellResult.NOT_JUDGED, distances={}, deciding=[], notes=compared.notes)
        own_noises = {noise.quantity: noise for noise in noises if noise.baseline == row.cell.baseline}
        outcome, deciding = judge_distances(compared.distances, own_noises)
        # A reference is compared with one that accumulates otherwise, so what it lacks is no fault.
        if row.cell.role is Role.REFERENCE:
            return JudgedCell(result=outcome, distances=compared.distances, deciding=deciding)
        notes = [*compared.notes]
        if outcome is CellResult.NOT_JUDGED:
            notes.append("no equivalent run measured its noise")
        if compared.lacks_norms and outcome is not CellResult.DIFFERS:
            outcome = CellResult.NOT_JUDGED
        return JudgedCell(result=outcome, distances=compared.distances, deciding=deciding, notes=notes)

    def _compare_with_reference(self, name: str, reference: str, finished: Mapping[str, ParityRow]) -> LogDistances:
        if reference not in finished:
            return LogDistances(notes=[f"its reference did not run: {reference}"])
        if (name, reference) not in self._distances:
            try:
                distances = LogDistances.measure(
                    compare(self._read_run(finished[reference]), self._read_run(finished[name]))
                )
            except UsageError as error:
                distances = LogDistances(notes=[format_error_with_flags(error)])
            self._distances[name, reference] = distances
        return self._distances[name, reference]

    def _compute_ceiling(self, dtype: Dtype, row: ParityRow) -> float:
        run = self._read_run(row)
        return estimate_rounding_ceiling(dtype, run.config, max(record.input.real_tokens for record in run.records))

    def _read_run(self, row: ParityRow) -> PastRun:
        assert row.log is not None
        if row.cell.name not in self._runs:
            self._runs[row.cell.name] = PastRun.read(row.log)
        return self._runs[row.cell.name]

    def _summarize_cost(self, row: ParityRow) -> Statistics:
        if row.cell.name not in self._costs:
            self._costs[row.cell.name] = summarize(self._read_run(row).records)
        return self._costs[row.cell.name]

    def _compare_dtypes(self, finished: Mapping[str, ParityRow]) -> list[str]:
        """Report references of a narrow dtype that are farther from the fp32 reference than rounding explains."""
        plain: dict[Dtype, ParityRow] = {}
        for row in finished.values():
            if row.cell.reference == row.cell.name and not row.cell.group:
                plain.setdefault(row.cell.spec.actor.dtype, row)
        wide = plain.pop(Dtype.FP32, None)
        remarks: list[str] = []
        for dtype, row in plain.items() if wide else ():
            assert wide is not None
            compared = self._compare_with_reference(row.cell.name, wide.cell.name, finished)
            of_a_number = self._compute_ceiling(dtype, row)
            for quantity, distance in compared.distances.items():
                ceiling = of_a_number * CEILINGS.get(quantity, 1.0)
                if distance.value > ceiling:
                    remarks.append(
                        f"the reference in {dtype} is {distance.value:.3g} from that in fp32 in its {quantity} at "
                        f"{distance.where}, and rounding explains {ceiling:.2g}: one of the two is wrong"
                    )
        return remarks


def _describe_distrust(noise: ParityNoise, finished: Mapping[str, ParityRow]) -> str:
    distances = ", ".join(f"{name} ({noise.measured[name]:.3g})" for name in noise.distrusted)
    group = f"{noise.group}, " if noise.group else ""
    text = (
        f"{group}{noise.dtype} {noise.quantity}: not in the floor, for it is more than rounding explains "
        f"({noise.ceiling:.2g}), or an order of magnitude above the other equivalents: {distances}"
    )
    if "the same again" in {finished[name].cell.varies for name in noise.distrusted}:
        return f"{text}. The reference does not repeat itself: look for dropout, or memory that nobody wrote"
    if noise.floor is None or len(noise.distrusted) * 2 > len(noise.measured):
        return f"{text}. The reference itself may be the one that is wrong"
    return text
