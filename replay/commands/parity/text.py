"""Format a parity run as text: progress, noise, a row per cell, failures and refusals, and how to continue."""

from collections import Counter

from replay.agreement.noise_floor import CellResult, JudgedCell, MatrixResult
from replay.agreement.rows import ParityLog, ParityRow, RowState
from replay.output.text import Columns, Pairs, format_gibibytes, format_milliseconds, name_some, pluralise
from replay.processes.child_job import ChildJob

QUANTITIES = ("loss", "log-probs", "token log-probs", "gradient norm", "gradients")
MOST_NAMED = 3


def format_header(log: ParityLog) -> Pairs:
    roles = Counter(row.cell.role for row in log.rows)
    machine, environments = log.campaign.machine, log.campaign.plan.environments
    processes = pluralise(machine.num_devices, "GPU" if machine.has_gpus else "process")
    pairs: Pairs = [
        ("command", log.campaign.command_line),
        ("device", f"{processes} at most, {'cuda' if machine.has_gpus else 'cpu'}"),
        *((f"env {number}", environment.text) for number, environment in enumerate(environments, start=1)),
        ("runs", f"{len(log.rows)}: " + ", ".join(pluralise(number, role) for role, number in roles.items())),
    ]
    if num_finished := sum(row.state is not RowState.PENDING for row in log.rows):
        pairs.append(("going on", f"{num_finished} of {len(log.rows)} are there"))
    return pairs


def format_run(number: int, row: ParityRow, log: ParityLog, result: MatrixResult) -> str:
    """Format one ended run.

    3 of 24, fsdp2 fp32 padded eager: EQUAL, loss 0, log-probs 1.14e-08, gradient norm 9.13e-08, 8.1 s
    """
    judged_cell = result.cells.get(row.cell.name)
    distances = [f"{name} {point.value:.3g}" for name, point in judged_cell.distances.items()] if judged_cell else []
    error = [row.error] if row.state is not RowState.DONE else []
    took = [] if row.seconds is None else [f"{row.seconds:.1f} s"]
    verdict = row.cell.varies if row.cell.varies and row.state is RowState.DONE else name_result(row, judged_cell)
    details = ", ".join([verdict, *distances, *error, *took])
    return f"{number + 1} of {len(log.rows)}, {row.cell.name}: {details}"


def name_result(row: ParityRow, judged_cell: JudgedCell | None) -> str:
    if row.state is not RowState.DONE:
        return "not run" if row.state is RowState.PENDING else row.state.upper()
    return judged_cell.result if judged_cell else "the reference"


def format_noises(result: MatrixResult) -> Columns:
    noises = result.noises
    return {
        "dtype": [f"{noise.dtype}, {noise.group}" if noise.group else noise.dtype for noise in noises],
        "quantity": [noise.quantity for noise in noises],
        "noise floor": ["-" if noise.floor is None else f"{noise.floor:.3g}" for noise in noises],
        "factor": [f"{noise.factor:.3g}" for noise in noises],
        "bound": [f"{noise.bound:.3g}" for noise in noises],
        "ceiling": [f"{noise.ceiling:.2g}" for noise in noises],
        "given by": [noise.equivalent or "-" for noise in noises],
    }


def format_cells(log: ParityLog, result: MatrixResult) -> Columns:
    """Return a row per finished run, in run order; a distance is the largest relative difference of any input."""
    finished = [row for row in log.rows if row.state is not RowState.PENDING]
    rows = [(row, result.cells.get(row.cell.name), result.costs.get(row.cell.name)) for row in finished]
    return {
        "run": [row.cell.name for row, _, _ in rows],
        "as": [row.cell.varies or row.cell.role for row, _, _ in rows],
        "processes": [str(row.cell.num_processes) for row, _, _ in rows],
        "pass ms": [
            format_milliseconds(cost.median_seconds) if cost and row.ran_alone else "-" for row, _, cost in rows
        ],
        "peak GiB": [
            format_gibibytes(cost.highest_peak.value) if cost and cost.highest_peak else "-" for _, _, cost in rows
        ],
        **{name: [_format_distance(judged_cell, name) for _, judged_cell, _ in rows] for name in QUANTITIES},
        "verdict": [name_result(row, judged_cell) for row, judged_cell, _ in rows],
    }


def _format_distance(judged_cell: JudgedCell | None, quantity: str) -> str:
    distance = judged_cell.distances.get(quantity) if judged_cell else None
    return "-" if distance is None else f"{distance.value:.3g}"


def list_failures(log: ParityLog, result: MatrixResult) -> Pairs:
    """Return what the table does not show: where and by how much a run differs, why one failed, what was refused."""
    bounds = {(noise.baseline, noise.quantity): noise.bound for noise in result.noises}
    pairs: Pairs = []
    for row in log.rows:
        judged_cell = result.cells.get(row.cell.name)
        if judged_cell and judged_cell.result is CellResult.DIFFERS:
            differences = [
                f"{name} by {judged_cell.distances[name].value:.3g} at {judged_cell.distances[name].where} "
                f"(bound {bounds[row.cell.baseline, name]:.3g})"
                for name in judged_cell.deciding
            ]
            pairs.append(("DIFFERS", f"{row.cell.name}: {', '.join(differences)}"))
        pairs += [("note", f"{row.cell.name}: {note}") for note in judged_cell.notes] if judged_cell else []
        if row.state is RowState.FAILED:
            pairs.append(("FAILED", f"{row.cell.name}: {row.error}"))
    pairs += [("WRONG", remark) for remark in result.remarks]
    return pairs + _list_refusals(log)


def _list_refusals(log: ParityLog) -> Pairs:
    """Return a line per reason for refusing runs."""
    reasons = log.campaign.plan.refused | {
        row.cell.name: row.error for row in log.rows if row.state is RowState.REFUSED
    }
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return [("refused", f"{name_some(names, MOST_NAMED)}: {reason}") for reason, names in by_reason.items()]


def list_commands(log: ParityLog) -> list[str]:
    """Return the commands that repeat each run by itself."""
    return [
        ChildJob(spec=row.cell.spec).repeat_line(num_processes=row.cell.num_processes, python=row.cell.python)
        for row in log.rows
    ]


def format_summary(log: ParityLog, result: MatrixResult) -> Pairs:
    results = Counter(name_result(row, result.cells.get(row.cell.name)) for row in log.rows)
    ordered_names = [*CellResult, RowState.FAILED.upper(), RowState.REFUSED.upper(), "not run"]
    text = ", ".join(f"{results[name]} {name}" for name in ordered_names if results[name])
    pairs: Pairs = [("result", text)]
    if any(row.is_open for row in log.rows):
        pairs.append(("go on", log.campaign.continue_command))
    return pairs
