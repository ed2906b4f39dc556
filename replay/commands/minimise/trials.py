"""Plan a minimisation, and keep its trials.

`minimise.json` (campaign.py) has what is known in its result, written after every trial:

    {"failure": {...}, "num_layers": 4, "num_rows": 16, "num_tokens": 640,
     "trials": [{"what": "files", "candidate": {"cuts": [...], "spec": {...}, "num_processes": 1}, "num_runs": 1,
                 "found": {...}, "said": "shows it", "seconds": 1.9}]}

A candidate without cuts is the replay as it was typed, or what the folder that is written at the end holds. The logs of
trial number n are in `trials/<n>`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from actor_init.spec import UsageError
from capture.facts import Setting
from replay.agreement.noise_floor import MatrixJudge, measure_parity_distances
from replay.agreement.rows import ParityLog
from replay.campaign.campaign import Campaign
from replay.commands.minimise.cutting import FILE_OPTIONS, Candidate, find_changed_options
from replay.commands.minimise.failure import FailureKind, ReplayFailure
from replay.comparison.differences import compare
from replay.options.spec import ReplaySpec
from replay.processes.pool import ProcessResult
from replay.runlog.reader import PastRun


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityCell:
    """A cell that differed, as parity ran it, to be replayed beside its reference.

    The bounds are those of the parity run: the noise was measured on all of its inputs, and bounds parts of them too.

    spec, reference  of the cell and of its reference, with their inputs
    num_processes  of the reference
    bounds         by quantity, beyond which the two differ
    """

    name: str
    spec: ReplaySpec
    reference: ReplaySpec
    num_processes: int
    bounds: dict[str, float]

    @property
    def shared_flags(self) -> list[str]:
        """Return the flags of what cell and reference have in common: the noise was measured with these."""
        return [
            option.flag
            for option in find_changed_options(self.spec)
            if option.read_value(self.reference) == option.read_value(self.spec)
        ]

    def build_reference(self, candidate: Candidate) -> ReplaySpec:
        """Return the spec of the reference of a candidate: its files, as many layers, as many passes in a window.

        Raises UsageError for options that exclude each other.
        """
        spec, candidate_spec = self.reference, candidate.spec
        reference = Candidate.from_spec([], spec, self.num_processes)
        for option in candidate.changed_options:
            if option.flag in FILE_OPTIONS and option.flag in self.shared_flags:
                reference = reference.with_option(option.flag, option.read_value(candidate_spec))
        if candidate_spec.actor.num_layers is not None:
            reference = reference.with_option("--num-layers", candidate_spec.actor.num_layers)
        num_data_ranks = candidate.num_processes // (
            candidate_spec.actor.parallel.tp * candidate_spec.actor.parallel.ring
        )
        num_reference_ranks = self.num_processes // (spec.actor.parallel.tp * spec.actor.parallel.ring)
        grad_accumulation = num_data_ranks * candidate_spec.actor.resolved_grad_accumulation // num_reference_ranks
        if grad_accumulation != reference.spec.actor.resolved_grad_accumulation:
            reference = reference.with_option("--grad-accumulation", grad_accumulation)
        return reference.spec

    def compare_runs(self, reference: ProcessResult, cell: ProcessResult) -> ReplayFailure | None:
        """Compare the two runs. Returns None where they cannot be compared."""
        try:
            distances = measure_parity_distances(compare(PastRun.read(reference.logs), PastRun.read(cell.logs)))
        except UsageError:
            return None
        beyond = {
            name: point for name, point in distances.items() if name in self.bounds and point.value > self.bounds[name]
        }
        if not beyond:
            return None
        name, worst = max(beyond.items(), key=lambda pair: pair[1].value / self.bounds[pair[0]])
        return ReplayFailure(
            kind=FailureKind.PARITY,
            quantities=tuple(beyond),
            said=f"{name} of {worst.where} {worst.value:.3g} from the reference, bound {self.bounds[name]:.3g}",
            index=worst.place,
            source=worst.source,
        )


def read_cell(folder: Path, name: str) -> tuple[ParityCell, int]:
    """Return a cell of the parity run in `folder`, and the number of its processes.

    Raises UsageError if there is no such cell, if it was not judged to differ, or runs in another environment.
    """
    log = ParityLog.read(folder)
    rows = {row.cell.name: row for row in log.rows}
    result = MatrixJudge().judge(log.rows)
    differing = sorted(cell_name for cell_name, judged_cell in result.cells.items() if judged_cell.result == "DIFFERS")
    if name not in differing:
        condition = "differs" if name in rows else "is there"
        names = "; ".join(differing[:5]) or "none"
        raise UsageError(
            Setting("cell", name), f": no such cell {condition} in {folder}", f"Those that differ: {names}"
        )
    row = rows[name]
    if row.cell.python:
        raise UsageError(
            Setting("cell", name), f"ran in {row.cell.python}", "Minimise runs in one environment: this one"
        )
    reference = rows[row.cell.reference].cell
    bounds = {noise.quantity: noise.bound for noise in result.noises if noise.baseline == row.cell.baseline}
    cell = ParityCell(
        name=name,
        spec=_reset_log_options(row.cell.spec),
        reference=_reset_log_options(reference.spec),
        num_processes=reference.num_processes,
        bounds=bounds,
    )
    return cell, row.cell.num_processes


def _reset_log_options(spec: ReplaySpec) -> ReplaySpec:
    measure = replace(
        spec.measure, log_folder=ReplaySpec().measure.log_folder, name=ReplaySpec().measure.name, quiet=False
    )
    return replace(spec, measure=measure)


AS_TYPED = "as typed"


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimiseLimits:
    """Bounds of a minimisation.

    tries     runs of the replay as it was typed, at most, to see it fail
    run       seconds for one run
    num_runs  of replays, all together
    """

    tries: int
    run: float
    num_runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimisePlan:
    """What is minimised.

    spec     of the replay as it was typed
    sources  captures that it replays, in their order
    parity   what --parity and --cell named
    """

    spec: ReplaySpec
    num_processes: int
    limits: MinimiseLimits
    redact: bool
    sources: list[Path]
    parity: ParityCell | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimiseTrial:
    """One candidate and what came of it.

    found  the failure, if it is the one that is looked for
    said   what came of it, in words
    """

    what: str
    candidate: Candidate
    num_runs: int
    found: ReplayFailure | None
    said: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimiseOutcome:
    """The `result` of minimise.json after each trial: fields of `MinimiseLog`."""

    failure: ReplayFailure | None
    num_layers: int | None
    num_rows: int
    num_tokens: int
    trials: Sequence[MinimiseTrial]


@dataclass(kw_only=True, slots=True)
class MinimiseLog:
    """What a minimisation has found out so far.

    failure     None until the replay has failed
    num_layers  of its model; None: not known
    num_rows, num_tokens  of the sources, padding included
    """

    campaign: Campaign[MinimisePlan]
    failure: ReplayFailure | None = None
    num_layers: int | None = None
    num_rows: int = 0
    num_tokens: int = 0
    trials: list[MinimiseTrial] = field(default_factory=list)

    @property
    def plan(self) -> MinimisePlan:
        return self.campaign.plan

    @property
    def folder(self) -> Path:
        return self.campaign.folder

    @property
    def num_runs(self) -> int:
        return sum(trial.num_runs for trial in self.trials)

    @property
    def num_tries(self) -> int:
        """Return how often the replay was run as it was typed."""
        return sum(trial.what == AS_TYPED for trial in self.trials)

    def add_trial(self, trial: MinimiseTrial) -> None:
        self.trials.append(trial)
        self.write_outcome(MinimiseOutcome)

    def write_outcome(self, outcome_type: type[MinimiseOutcome], **more: Any) -> None:
        """Write into minimise.json what has been found out, and `more`: the other fields of this type of outcome."""
        known = {part.name: getattr(self, part.name) for part in fields(MinimiseOutcome)}
        self.campaign.result = outcome_type(**known, **more)
        self.campaign.write()
