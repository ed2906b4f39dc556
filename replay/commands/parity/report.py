"""Report a parity run: on the terminal a line per run as it ends, then the tables; and in the files of its folder.

command    replay parity --matrix quick
device     2 processes at most, cpu
runs       25: 3 references, 10 equivalents, 12 cells

1 of 25, fsdp2 fp32 padded sdpa: the reference, 9.3 s
2 of 25, fsdp2 fp32 padded sdpa, again: the same again, loss 0, log-probs 0, gradient norm 0, 9.2 s
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from capture.progress_bar import ProgressBar
from replay.agreement.noise_floor import MatrixResult
from replay.agreement.plan import Cell
from replay.agreement.rows import ParityLog, ParityRow, ParityRun, RowState
from replay.commands.parity import text as parity_wording
from replay.output.html import render
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import Pairs, describe_engine, pluralise
from replay.runlog.writer import list_versions

# A plot with more lines is unreadable.
MAX_RUNS = 60
# By name of a line and by quantity, the shares of its runs.
Shares = Mapping[str, Mapping[str, Sequence[float]]]


class ParityProgress:
    def __init__(self, log: ParityLog, file: IO[str]) -> None:
        self._out = open_console(file)
        self._log = log
        print_pairs(self._out, parity_wording.format_header(log))
        print_line(self._out)
        self._bar = ProgressBar(self._out.file)
        # Runs that ended before this command began.
        self._num_settled = count_settled(log)

    def show_run(self, number: int, row: ParityRow, result: MatrixResult, num_running: int) -> None:
        self._bar.clear()
        print_line(self._out, parity_wording.format_run(number, row, self._log, result))
        num_failed = sum(row.state is RowState.FAILED for row in self._log.rows)
        note = f"{num_running} running, {num_failed} failed"
        self._bar.show(count_settled(self._log) - self._num_settled, len(self._log.rows) - self._num_settled, note)

    def finish(self, result: MatrixResult, differences: Pairs, paths: Sequence[Path], note: str) -> None:
        """Print the result, failures and differences, a row per run, the noise, and where the results are written."""
        out = self._out
        self._bar.clear()
        print_line(out)
        print_pairs(out, parity_wording.format_summary(self._log, result))
        print_pairs(out, parity_wording.list_failures(self._log, result) + differences)
        for columns in (parity_wording.format_cells(self._log, result), parity_wording.format_noises(result)):
            print_line(out)
            print_table(out, columns)
        print_line(out)
        print_pairs(out, [("note", note)] if note else [])
        print_pairs(out, [("written", str(path)) for path in paths])


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityOutcome(MatrixResult):
    """The `result` of parity.json: what was judged of the runs, the runs, and where those that differ first depart."""

    finished: bool
    runs: Sequence[ParityRun]
    first_differences: Sequence[str]


def count_settled(log: ParityLog) -> int:
    """Count the runs that have ended or will not be made."""
    return sum(row.state is not RowState.PENDING for row in log.rows)


def write_report(log: ParityLog, result: MatrixResult, differences: Pairs, progress: ParityProgress) -> None:
    """Print what is known, and write it into parity.json, parity.html and, with matplotlib, parity.svg."""
    log.campaign.result = ParityOutcome(
        cells=result.cells,
        noises=result.noises,
        remarks=result.remarks,
        costs=result.costs,
        finished=count_settled(log) == len(log.rows),
        runs=log.list_runs(),
        first_differences=[text for _, text in differences],
    )
    log.campaign.write()
    paths, note, picture = [log.campaign.path], "", None
    if shares := compute_shares(log, result):
        drawn = log.folder / "parity.svg"
        try:
            from replay.comparison.plot import draw_parity

            draw_parity(drawn, shares)
        except ImportError:
            note = "no picture: it needs matplotlib. Try: pip install 'micro-replay[plot]'"
        else:
            paths.append(drawn)
            picture = drawn.read_text(encoding="utf-8")
    html = log.folder / "parity.html"
    html.write_text(render_page(log, result, differences, picture), encoding="utf-8")
    progress.finish(result, differences, [*paths, html], note)


def render_page(log: ParityLog, result: MatrixResult, differences: Pairs, picture: str | None) -> str:
    """Return parity.html, one file that needs no network and no script.

    differences  where differing cells first depart from the reference
    picture      an SVG file's text
    """
    return render(
        "commands/parity/parity.html",
        title="replay parity",
        summary=[*parity_wording.format_header(log), *parity_wording.format_summary(log, result)],
        failures=parity_wording.list_failures(log, result) + differences,
        picture=picture and picture[picture.index("<svg") :],
        noises=parity_wording.format_noises(result),
        runs=parity_wording.format_cells(log, result),
        commands={"run": [row.cell.name for row in log.rows], "command": parity_wording.list_commands(log)},
        versions=[(name, number or "-") for name, number in list_versions().items()],
    )


def compute_shares(log: ParityLog, result: MatrixResult, *, max_runs: int = MAX_RUNS) -> Shares:
    """Return what the picture shows: each run's distances as shares of their bound.

    A line is a run, or for more than `max_runs` all those with a value of an option, such as `tp 2 (96 runs)`.
    """
    bounds = {(noise.baseline, noise.quantity): noise.bound for noise in result.noises}
    cells = {row.cell.name: row.cell for row in log.rows}
    by_run = {
        name: {
            quantity: [point.value / bounds[cells[name].baseline, quantity]]
            for quantity, point in cell_judgement.distances.items()
            if (cells[name].baseline, quantity) in bounds
        }
        for name, cell_judgement in result.cells.items()
    }
    if len(by_run) <= max_runs:
        return by_run
    runs: dict[tuple[int, str], list[str]] = {}
    for name in by_run:
        for value in enumerate(_list_values(cells[name])):
            runs.setdefault(value, []).append(name)
    return {
        f"{value} ({pluralise(len(names), 'run')})": {
            quantity: [share for name in names for share in by_run[name].get(quantity, ())]
            for quantity in dict.fromkeys(quantity for name in names for quantity in by_run[name])
        }
        for (_, value), names in sorted(runs.items())
    }


def _list_values(cell: Cell) -> Iterator[str]:
    """Yield the cell's value of every option that a built-in matrix varies."""
    actor = cell.spec.actor
    yield describe_engine(actor.backend, actor.resolved_zero_stage)
    yield actor.dtype
    yield "packed" if actor.packs else "padded"
    yield actor.attention
    yield f"compile {actor.compile}"
    yield f"kernels {actor.kernels}"
    sizes = {"data": cell.num_data_ranks, "tp": actor.parallel.tp, "ring": actor.parallel.ring}
    yield " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"
