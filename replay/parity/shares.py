"""Compute what parity's plot shows: each run's distances as a share of their bound."""

from collections.abc import Iterator, Mapping, Sequence

from replay.parity.plan import Cell
from replay.parity.results import MatrixResult
from replay.parity.rows import ParityLog
from replay.report.text import counted, engine_text

MAX_RUNS = 60  # a plot with more lines is unreadable
Shares = Mapping[str, Mapping[str, Sequence[float]]]  # shares of a line's runs, by its name and quantity


def shares_of(log: ParityLog, result: MatrixResult) -> Shares:
    """Return a line per run; for more than MAX_RUNS, a line per value of an option, such as `tp 2 (96 runs)`."""
    bounds = {(one.ground, one.quantity): one.bound for one in result.noises}
    cells = {row.cell.name: row.cell for row in log.rows}
    by_run = {
        name: {
            quantity: [one.value / bounds[cells[name].ground, quantity]]
            for quantity, one in judged.distances.items()
            if (cells[name].ground, quantity) in bounds
        }
        for name, judged in result.cells.items()
    }
    if len(by_run) <= MAX_RUNS:
        return by_run
    runs: dict[tuple[int, str], list[str]] = {}
    for name in by_run:
        for value in enumerate(_values(cells[name])):
            runs.setdefault(value, []).append(name)
    return {
        f"{value} ({counted(len(names), 'run')})": {
            quantity: [share for name in names for share in by_run[name].get(quantity, ())]
            for quantity in dict.fromkeys(quantity for name in names for quantity in by_run[name])
        }
        for (_, value), names in sorted(runs.items())
    }


def _values(cell: Cell) -> Iterator[str]:
    """Yield the cell's value of every option that a built-in matrix varies."""
    actor = cell.spec.actor
    yield engine_text(actor.backend, actor.resolved_zero_stage)
    yield actor.dtype
    yield "packed" if actor.packs else "padded"
    yield actor.attention
    yield f"compile {actor.compile}"
    yield f"kernels {actor.kernels}"
    sizes = {"data": cell.num_data_ranks, "tp": actor.parallel.tp, "ring": actor.parallel.ring}
    yield " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"
