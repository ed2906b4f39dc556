"""Write one HTML page of a run, or of several beside each other, that needs no network.

Of several runs it tells what changed from the first to each other: settings, statistics, and each pass on the same
input.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actor_init.as_json import to_json
from actor_init.spec import UsageError
from replay.commands.report.pictures import AxisUnit, Bar, Figure, ScatterPoint, draw_bars, draw_points
from replay.comparison.comparison import Comparison
from replay.comparison.text import (
    describe_first_differences,
    describe_other_work,
    list_remarks,
    make_difference_table,
    make_setting_table,
)
from replay.options.option_parsing import format_error_with_flags, spec_from_dict
from replay.output.html import render
from replay.output.text import Columns, Pairs, format_gibibytes, format_milliseconds, list_run_letters, shorten_names
from replay.processes.child_job import ChildJob
from replay.profiling.text import (
    build_holder_table,
    build_kernel_table,
    build_share_table,
    list_memory_remarks,
    list_profile_remarks,
)
from replay.runlog.reader import match_by_key
from replay.runlog.records import PassRecord
from replay.runlog.summary import find_peak_bytes, sum_phase_seconds
from replay.runner import text as run_text
from replay.runner.result import Run
from replay.verdict.text import format_verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class RunChange:
    """What is different in one run, held against the first."""

    heading: str
    remarks: Pairs
    tables: dict[str, Columns]


def describe_changes(runs: Sequence[Run]) -> list[RunChange]:
    """Hold each run against the first. Numbers of runs that did other work are not compared; the reason is said."""
    return [
        _describe_change(runs[0], other, name)
        for other, name in zip(runs[1:], list_run_letters(len(runs))[1:], strict=True)
    ]


def _describe_change(first: Run, other: Run, name: str) -> RunChange:
    tables: dict[str, Columns] = {"Statistics": _compare_statistics(first, other, name)}
    try:
        comparison = Comparison.read([first.folder, other.folder], threshold=0.0, names=["A", name])
        pairs = describe_other_work(comparison) + list_remarks(comparison) + describe_first_differences(comparison)
        tables = {"Settings": make_setting_table(comparison), **tables, "Numbers": make_difference_table(comparison)}
    except UsageError as error:
        pairs = [("not compared", format_error_with_flags(error))]
    return RunChange(
        heading=f"{name} beside A", remarks=pairs, tables={**tables, "Passes": _compare_passes(first, other, name)}
    )


def _compare_statistics(first: Run, other: Run, name: str) -> Columns:
    rows = []
    both = first.statistics, other.statistics
    for quantity, format_value, values in (
        ("median ms", format_milliseconds, [statistics.median_seconds for statistics in both]),
        ("p95 ms", format_milliseconds, [statistics.p95_seconds for statistics in both]),
        ("real tokens/s", _format_number, [statistics.real_tokens_per_second for statistics in both]),
        (
            "peak GiB",
            format_gibibytes,
            [None if (peak := statistics.highest_peak) is None else peak.value for statistics in both],
        ),
    ):
        rows.append((quantity, *(format_value(value) for value in values), _format_ratio(*values)))
    return _build_columns(("quantity", "A", name, f"{name} / A"), rows)


def _compare_passes(first: Run, other: Run, name: str) -> Columns:
    """Make a row for each input and rank that both have, left-out passes too."""
    pairs = match_by_key(first.records, other.records, key=lambda record: (record.source, record.rank))
    rows = []
    for pair in pairs:
        if all(record.cost.phases for record in pair):
            seconds = [sum_phase_seconds(record) for record in pair]
            peaks = [find_peak_bytes(record) for record in pair]
            losses = ["-" if record.result.loss is None else f"{record.result.loss:.6g}" for record in pair]
            rows.append(
                (
                    shorten_names(pair[0].source),
                    str(pair[0].rank),
                    *(format_milliseconds(value) for value in seconds),
                    _format_ratio(*seconds),
                    *(format_gibibytes(value) for value in peaks),
                    _format_ratio(*peaks),
                    *losses,
                )
            )
    titles = ("input", "rank", "A ms", f"{name} ms", "time ratio", "A GiB", f"{name} GiB", "peak ratio", "A loss")
    return _build_columns((*titles, f"{name} loss"), rows)


def _build_columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Columns:
    return {title: [row[number] for row in rows] for number, title in enumerate(titles)}


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _format_ratio(first: float | None, other: float | None) -> str:
    return f"{other / first:.3f}" if first and other is not None else "-"


# Of more ranks, those that waited least and most get bars of their own.
MAX_DRAWN_RANKS = 8
MILLISECONDS, GIBIBYTES = AxisUnit("ms", 1e-3, format_milliseconds), AxisUnit("GiB", 2**30, format_gibibytes)
TOKENS = AxisUnit("tokens", 1, "{:,.0f}".format)
LINKED_FILES = {
    "trace": "sketches of every traced tensor",
    "gradients": "sketches of gradients",
    "log_probs": "log-probs of action tokens",
    "failure.txt": "what was printed when the run broke off",
}
LINKED_FILES_OF_RANKS = {
    "rank*.profile.json.gz": "a timeline, for ui.perfetto.dev",
    "rank*.memory.pickle": "for pytorch.org/memory_viz",
    "rank*.memory.json.gz": "allocations, for ui.perfetto.dev",
    "rank*.memory.txt": "what held a rank's memory",
    "rank*.stack.txt": "the stack of each thread",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What a run was asked to find out besides: a heading, tables, remarks."""

    heading: str
    tables: Sequence[Columns] = ()
    remarks: Pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkedFile:
    name: str
    # Relative to the page.
    link: str
    what: str


def render_page(runs: Sequence[Run], changes: Sequence[RunChange], page_folder: Path) -> str:
    """Return the page. `page_folder` is the folder that it is written into: links are relative to it."""
    names = list_run_letters(len(runs))
    headings = [run.folder.name for run in runs]
    if len(runs) > 1:
        headings = [f"{name}: {heading}" for name, heading in zip(names, headings, strict=True)]
    return render(
        "commands/report/run.html",
        title=" and ".join(run.folder.name for run in runs),
        changes=[replace(change, remarks=_shorten_pairs(change.remarks)) for change in changes],
        together=_draw_scatters(list(zip(names, runs, strict=True))),
        runs=[_collect_run_values(heading, run, page_folder) for heading, run in zip(headings, runs, strict=True)],
    )


def _collect_run_values(heading: str, run: Run, page_folder: Path) -> dict[str, Any]:
    """Return what the template shows of one run."""
    records, statistics, start = run.records, run.statistics, run.start
    answer = [("problem", text) for text in run.problems] + _list_verdict(run)
    if run.file.end is not None and (first := run.file.end.first_non_finite) is not None:
        answer.append(("not finite", str(to_json(first))))
    answer += run_text.list_counts(statistics) + run_text.name_slowest(statistics)
    answer += run_text.list_totals(statistics, start.memory_kind)
    facts = {**start.facts, "devices": ", ".join(start.devices), "started": start.started}
    job = ChildJob(spec=spec_from_dict(start.spec))
    profiles, problems = _collect_findings(run)
    return {
        "heading": heading,
        "answer": _shorten_pairs(answer),
        "command": job.repeat_line(num_processes=len(start.devices)),
        "phases": run_text.build_phase_table(statistics) if statistics.num_counted else None,
        "figures": _draw_run(run) if records else [],
        "passes": _build_pass_table(run) if records else None,
        "facts": _shorten_pairs([(name.replace("_", " "), str(value)) for name, value in facts.items()]),
        "versions": [(name, number or "-") for name, number in start.versions.items()],
        "profiles": profiles,
        "problems": problems,
        "files": _list_files(run, page_folder),
    }


def _shorten_pairs(pairs: Pairs) -> Pairs:
    return [(name, shorten_names(text)) for name, text in pairs]


def _list_verdict(run: Run) -> Pairs:
    try:
        verdict = run.verdict
    except UsageError as error:
        outcome = run.file.end and run.file.end.verdict and run.file.end.verdict.get("outcome")
        return [("verdict", f"{outcome}; the rest cannot be read: {format_error_with_flags(error)}")]
    if verdict is None:
        return []
    first = verdict.first
    place = [] if first is None else [("first", f"pass {first.index + 1}, {first.source}")]
    return [*format_verdict(verdict), *place]


def _draw_run(run: Run) -> list[Figure]:
    marks = run.marks()
    figures = []
    for rank in _choose_drawn_ranks(run):
        records = [record for record in run.records if record.rank == rank]
        suffix = f", rank {rank}" if len(run.ranks) > 1 else ""
        seconds = [Bar(name=_name_pass(r), values=_list_phase_seconds(r), mark=marks.get(r.index, "")) for r in records]
        figures.append(draw_bars(f"Time by pass{suffix}", seconds, MILLISECONDS))
        peaks = [Bar(name=_name_pass(r), values=_stack_peaks(r), mark=marks.get(r.index, "")) for r in records]
        figures.append(draw_bars(f"Peak memory by pass{suffix}", peaks, GIBIBYTES))
    tokens = [
        Bar(
            name=_name_pass(r),
            values={"real tokens": r.input.real_tokens, "padding": r.input.padded_tokens - r.input.real_tokens},
        )
        for r in {(r.index, r.data_rank): r for r in run.records}.values()
    ]
    figures.append(draw_bars("Tokens of the inputs by pass", tokens, TOKENS))
    return [*figures, *_draw_scatters([("", run)])]


def _draw_scatters(runs: Sequence[tuple[str, Run]]) -> list[Figure]:
    seconds, peaks = [], []
    for name, run in runs:
        marks = run.marks()
        for r in run.records:
            if r.cost.phases:
                series = f"{name}, rank {r.rank}" if name and len(run.ranks) > 1 else name or f"rank {r.rank}"
                point = ScatterPoint(
                    name=_name_pass(r),
                    series=series,
                    x=r.input.fed_tokens,
                    y=sum_phase_seconds(r),
                    mark=marks.get(r.index, ""),
                )
                seconds.append(point)
                peaks.append(replace(point, y=find_peak_bytes(r)))
    return [
        draw_points("Seconds against tokens", seconds, MILLISECONDS),
        draw_points("Peak memory against tokens", peaks, GIBIBYTES),
    ]


def _choose_drawn_ranks(run: Run) -> list[int]:
    """Choose all ranks; of many, those that waited least and most: the slow and the fast ones."""
    if len(run.ranks) <= MAX_DRAWN_RANKS:
        return run.ranks
    wait_seconds = {rank: sum(r.cost.wait_seconds or 0.0 for r in run.records if r.rank == rank) for rank in run.ranks}
    order = sorted(run.ranks, key=lambda rank: wait_seconds[rank])
    return sorted([*order[: MAX_DRAWN_RANKS // 2], *order[-MAX_DRAWN_RANKS // 2 :]])


def _list_phase_seconds(record: PassRecord) -> dict[str, float]:
    seconds = {name: cost.seconds for name, cost in record.cost.phases.items()}
    return seconds if record.cost.wait_seconds is None else seconds | {"waiting": record.cost.wait_seconds}


def _stack_peaks(record: PassRecord) -> dict[str, float]:
    """Return by how much each phase's peak is above that of the phases before it: the bar ends at the pass's peak."""
    rising, highest = {}, 0.0
    for name, cost in record.cost.phases.items():
        rising[name] = max(cost.peak_allocated_bytes - highest, 0.0)
        highest = max(highest, cost.peak_allocated_bytes)
    return rising


def _build_pass_table(run: Run) -> Columns:
    columns = run_text.build_pass_table(run.records, full_names=True)
    columns["input"] = [shorten_names(name) for name in columns["input"]]
    marks = run.marks()
    if marks:
        columns["not counted"] = [marks.get(record.index, "") for record in run.records]
    return columns


def _collect_findings(run: Run) -> tuple[list[Findings], Pairs]:
    """Return what --profile and --memory-snapshot found, if the run had them, and why the rest cannot be read."""
    profiles: list[Findings] = []
    try:
        if profile := run.profile:
            tables = [build_share_table(profile), build_kernel_table(profile)]
            remarks = _shorten_pairs(list_profile_remarks(profile))
            profiles.append(Findings(heading="One pass, profiled", tables=tables, remarks=remarks))
        if ran_out := run.out_of_memory:
            remarks = _shorten_pairs(ran_out.lines(has_snapshot=run.memory is not None))
            profiles.append(Findings(heading="Out of memory", remarks=remarks))
        if memory := run.memory:
            remarks = _shorten_pairs(list_memory_remarks(memory))
            profiles.append(
                Findings(heading="What held the peak", tables=[build_holder_table(memory)], remarks=remarks)
            )
    except UsageError as error:
        return profiles, [("problem", format_error_with_flags(error))]
    return profiles, []


def _list_files(run: Run, page_folder: Path) -> list[LinkedFile]:
    names = {name: what for name, what in LINKED_FILES.items() if (run.folder / name).exists()}
    for pattern, what in LINKED_FILES_OF_RANKS.items():
        names |= {path.name: what for path in sorted(run.folder.glob(pattern))}
    return [
        LinkedFile(name=name, link=_make_relative(run.folder / name, page_folder), what=what)
        for name, what in names.items()
    ]


def _make_relative(path: Path, page_folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), page_folder.resolve())).as_posix()


def _name_pass(record: PassRecord) -> str:
    return f"pass {record.index + 1}"
