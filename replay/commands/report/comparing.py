"""Say what changed from one run to another: settings, statistics, and each pass on the same input."""

from collections.abc import Sequence
from dataclasses import dataclass

from actor_init.spec import UsageError
from replay.comparison.comparison import Comparison
from replay.comparison.text import difference_table, other_work, partings, remarks, setting_table
from replay.options.wording import in_flags
from replay.output.text import Columns, Pairs, gibibytes, milliseconds, run_letters, short_names
from replay.runlog.matching import matched
from replay.runlog.summary import peak_bytes, phase_seconds
from replay.runner.result import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What is different in one run, held against the first."""

    heading: str
    said: Pairs
    tables: dict[str, Columns]


def changes(runs: Sequence[Run]) -> list[Change]:
    """Hold each run against the first. Numbers of runs that did other work are not compared; the reason is said."""
    return [_change(runs[0], other, name) for other, name in zip(runs[1:], run_letters(len(runs))[1:], strict=True)]


def _change(first: Run, other: Run, name: str) -> Change:
    tables: dict[str, Columns] = {"Statistics": _statistics(first, other, name)}
    try:
        comparison = Comparison.read([first.folder, other.folder], threshold=0.0, names=["A", name])
        said = other_work(comparison) + remarks(comparison) + partings(comparison)
        tables = {"Settings": setting_table(comparison), **tables, "Numbers": difference_table(comparison)}
    except UsageError as error:
        said = [("not compared", in_flags(error))]
    return Change(heading=f"{name} beside A", said=said, tables={**tables, "Passes": _passes(first, other, name)})


def _statistics(first: Run, other: Run, name: str) -> Columns:
    rows = []
    both = first.statistics, other.statistics
    for what, said, values in (
        ("median ms", milliseconds, [statistics.median_seconds for statistics in both]),
        ("p95 ms", milliseconds, [statistics.p95_seconds for statistics in both]),
        ("real tokens/s", _number, [statistics.real_tokens_per_second for statistics in both]),
        (
            "peak GiB",
            gibibytes,
            [None if (peak := statistics.highest_peak) is None else peak.value for statistics in both],
        ),
    ):
        rows.append((what, *(said(value) for value in values), _ratio(*values)))
    return _columns(("quantity", "A", name, f"{name} / A"), rows)


def _passes(first: Run, other: Run, name: str) -> Columns:
    """Make a row for each input and rank that both have, left-out passes too."""
    pairs = matched(first.records, other.records, key=lambda record: (record.source, record.rank))
    rows = []
    for a, b in pairs:
        if a.cost.phases and b.cost.phases:
            seconds = phase_seconds(a), phase_seconds(b)
            peaks = peak_bytes(a), peak_bytes(b)
            losses = tuple("-" if one.result.loss is None else f"{one.result.loss:.6g}" for one in (a, b))
            rows.append(
                (
                    short_names(a.source),
                    str(a.rank),
                    *(milliseconds(value) for value in seconds),
                    _ratio(*seconds),
                    *(gibibytes(value) for value in peaks),
                    _ratio(*peaks),
                    *losses,
                )
            )
    titles = ("input", "rank", "A ms", f"{name} ms", "time ratio", "A GiB", f"{name} GiB", "peak ratio", "A loss")
    return _columns((*titles, f"{name} loss"), rows)


def _columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Columns:
    return {title: [row[number] for row in rows] for number, title in enumerate(titles)}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ratio(first: float | None, other: float | None) -> str:
    return f"{other / first:.3f}" if first and other is not None else "-"
