"""Write one HTML page of a run, or of several beside each other, that needs no network."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path

from actor_init.as_json import to_json
from actor_init.spec import UsageError
from replay.option_parsing import spec_from_dict
from replay.processes.child_job import ChildJob
from replay.profiling.text import holder_table, kernel_table, memory_remarks, share_table
from replay.profiling.text import remarks as profile_remarks
from replay.report.text import Columns, Pairs, gibibytes, is_text, milliseconds, run_letters, short_names
from replay.run_page.comparing import Change
from replay.run_page.pictures import Bar, Point, Unit, bars, points
from replay.runlog.records import PassRecord
from replay.runlog.summary import peak_bytes, phase_seconds
from replay.runner import text as run_text
from replay.runner.result import Run
from replay.verdict.text import verdict_lines
from replay.wording import in_flags

MOST_RANKS = 8  # that get bars of their own; of more, those that waited least and most
MILLISECONDS, GIBIBYTES = Unit("ms", 1e-3, milliseconds), Unit("GiB", 2**30, gibibytes)
TOKENS = Unit("tokens", 1, "{:,.0f}".format)
STYLE, SCRIPT = (files("replay.run_page").joinpath(name) for name in ("page.css", "sort.js"))
LINKED = {
    "trace": "sketches of every traced tensor",
    "gradients": "sketches of gradients",
    "log_probs": "log-probs of action tokens",
    "failure.txt": "what was printed when the run broke off",
}


def page(runs: Sequence[Run], changes: Sequence[Change], beside: Path) -> str:
    """Return the page. `beside` is the folder that it is written into: links are relative to it."""
    title = " and ".join(run.folder.name for run in runs)
    names = run_letters(len(runs))
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(title)}</title><style>{STYLE.read_text()}</style></head><body>",
    ]
    if len(runs) > 1:
        parts += ["<h1>What changed</h1>", *(_change(one) for one in changes)]
        parts.append(_together(names, runs))
    for name, run in zip(names, runs, strict=True):
        parts.append(_run(f"{name}: {run.folder.name}" if len(runs) > 1 else run.folder.name, run, beside))
    return "\n".join([*parts, f"<script>{SCRIPT.read_text()}</script></body></html>"]) + "\n"


def _run(heading: str, run: Run, beside: Path) -> str:
    records, statistics, start = run.records, run.statistics, run.start
    answer = [("problem", text) for text in run.problems] + _verdict(run)
    if run.file.end is not None and (first := run.file.end.first_non_finite) is not None:
        answer.append(("not finite", str(to_json(first))))
    answer += run_text.counts(statistics) + run_text.slowest(statistics)
    answer += run_text.summary(statistics, start.memory_kind)
    parts = [f"<h1>{escape(heading)}</h1>", _pairs(answer), _command(run)]
    if statistics.num_counted:
        parts.append(_table(run_text.phase_table(statistics)))
    if records:
        parts += ["<h2>Passes</h2>", *_pictures(run), _table(_pass_table(run), sorts=True)]
    facts = {**start.facts, "devices": ", ".join(start.devices), "started": start.started}
    parts += ["<h2>How it ran</h2>", _pairs([(name.replace("_", " "), str(value)) for name, value in facts.items()])]
    parts += ["<h2>Versions</h2>", _pairs([(name, number or "-") for name, number in start.versions.items()])]
    return "\n".join([*parts, *_profiles(run), _links(run, beside)])


def _verdict(run: Run) -> Pairs:
    try:
        verdict = run.verdict
    except UsageError as error:
        outcome = run.file.end and run.file.end.verdict and run.file.end.verdict.get("outcome")
        return [("verdict", f"{outcome}; the rest cannot be read: {in_flags(error)}")]
    if verdict is None:
        return []
    first = verdict.first
    place = [] if first is None else [("first", f"pass {first.index + 1}, {first.source}")]
    return [*verdict_lines(verdict), *place]


def _pictures(run: Run) -> list[str]:
    marks = run.marks()
    drawn = []
    for rank in _shown_ranks(run):
        own = [record for record in run.records if record.rank == rank]
        who = f", rank {rank}" if len(run.ranks) > 1 else ""
        seconds = [Bar(name=_name(r), values=_seconds_by_phase(r), mark=marks.get(r.index, "")) for r in own]
        drawn.append(bars(f"Time by pass{who}", seconds, MILLISECONDS))
        peaks = [Bar(name=_name(r), values=_rising_peaks(r), mark=marks.get(r.index, "")) for r in own]
        drawn.append(bars(f"Peak memory by pass{who}", peaks, GIBIBYTES))
    tokens = [
        Bar(
            name=_name(r),
            values={"real tokens": r.input.real_tokens, "padding": r.input.padded_tokens - r.input.real_tokens},
        )
        for r in {(r.index, r.data_rank): r for r in run.records}.values()
    ]
    drawn.append(bars("Tokens of the inputs by pass", tokens, TOKENS))
    return [*drawn, *_scatters([("", run)])]


def _scatters(runs: Sequence[tuple[str, Run]]) -> list[str]:
    seconds, peaks = [], []
    for name, run in runs:
        marks = run.marks()
        for r in run.records:
            if r.cost.phases:
                who = f"{name}, rank {r.rank}" if name and len(run.ranks) > 1 else name or f"rank {r.rank}"
                place = Point(
                    name=_name(r), series=who, x=r.input.fed_tokens, y=phase_seconds(r), mark=marks.get(r.index, "")
                )
                seconds.append(place)
                peaks.append(replace(place, y=peak_bytes(r)))
    return [
        points("Seconds against tokens", seconds, MILLISECONDS),
        points("Peak memory against tokens", peaks, GIBIBYTES),
    ]


def _together(names: Sequence[str], runs: Sequence[Run]) -> str:
    return "\n".join(_scatters(list(zip(names, runs, strict=True))))


def _shown_ranks(run: Run) -> list[int]:
    """All ranks; of many, those that waited least and most: the slow and the fast ones."""
    if len(run.ranks) <= MOST_RANKS:
        return run.ranks
    waited = {rank: sum(r.cost.wait_seconds or 0.0 for r in run.records if r.rank == rank) for rank in run.ranks}
    order = sorted(run.ranks, key=lambda rank: waited[rank])
    return sorted([*order[: MOST_RANKS // 2], *order[-MOST_RANKS // 2 :]])


def _seconds_by_phase(record: PassRecord) -> dict[str, float]:
    seconds = {name: cost.seconds for name, cost in record.cost.phases.items()}
    return seconds if record.cost.wait_seconds is None else seconds | {"waiting": record.cost.wait_seconds}


def _rising_peaks(record: PassRecord) -> dict[str, float]:
    """Return by how much each phase's peak is above that of the phases before it: the bar ends at the pass's peak."""
    rising, highest = {}, 0.0
    for name, cost in record.cost.phases.items():
        rising[name] = max(cost.peak_allocated_bytes - highest, 0.0)
        highest = max(highest, cost.peak_allocated_bytes)
    return rising


def _pass_table(run: Run) -> Columns:
    columns = run_text.pass_table(run.records, full_names=True)
    columns["input"] = [short_names(name) for name in columns["input"]]
    marks = run.marks()
    if marks:
        columns["not counted"] = [marks.get(record.index, "") for record in run.records]
    return columns


def _change(one: Change) -> str:
    parts = [f"<h2>{escape(one.heading)}</h2>", _pairs(one.said)]
    for heading, columns in one.tables.items():
        if any(columns.values()):
            parts += [f"<h3>{escape(heading)}</h3>", _table(columns, sorts=True)]
    return "\n".join(parts)


def _command(run: Run) -> str:
    job = ChildJob(spec=spec_from_dict(run.start.spec))
    line = job.repeat_line(num_processes=len(run.start.devices))
    return f"<p>To repeat it: <code>{escape(line)}</code></p>"


def _profiles(run: Run) -> list[str]:
    """Return what --profile and --memory-snapshot found, if the run had them."""
    parts: list[str] = []
    try:
        if profile := run.profile:
            parts += ["<h2>One pass, profiled</h2>", _table(share_table(profile)), _table(kernel_table(profile))]
            parts.append(_pairs(profile_remarks(profile)))
        if ran_out := run.out_of_memory:
            parts += ["<h2>Out of memory</h2>", _pairs(ran_out.lines(has_snapshot=run.memory is not None))]
        if memory := run.memory:
            parts += ["<h2>What held the peak</h2>", _table(holder_table(memory)), _pairs(memory_remarks(memory))]
    except UsageError as error:
        parts.append(_pairs([("problem", in_flags(error))]))
    return parts


def _links(run: Run, beside: Path) -> str:
    there = {name: what for name, what in LINKED.items() if (run.folder / name).exists()}
    there |= {path.name: "a timeline, for ui.perfetto.dev" for path in sorted(run.folder.glob("rank*.profile.json.gz"))}
    there |= {path.name: "for pytorch.org/memory_viz" for path in sorted(run.folder.glob("rank*.memory.pickle"))}
    there |= {path.name: "allocations, for ui.perfetto.dev" for path in sorted(run.folder.glob("rank*.memory.json.gz"))}
    there |= {path.name: "what held a rank's memory" for path in sorted(run.folder.glob("rank*.memory.txt"))}
    there |= {path.name: "the stack of each thread" for path in sorted(run.folder.glob("rank*.stack.txt"))}
    links = {name: escape(_relative(run.folder / name, beside), quote=True) for name in there}
    items = [f"<dt><a href='{links[name]}'>{escape(name)}</a></dt><dd>{what}</dd>" for name, what in there.items()]
    return f"<h2>Files</h2><dl>{''.join(items)}</dl>" if items else ""


def _relative(path: Path, beside: Path) -> str:
    return Path(os.path.relpath(path.resolve(), beside.resolve())).as_posix()


def _pairs(pairs: Pairs) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd class='{escape(text.split(':')[0].replace(' ', '-'), quote=True)}'>"
        f"{escape(short_names(text))}</dd>"
        for name, text in pairs
    )
    return f"<dl>{items}</dl>" if items else ""


def _table(columns: Mapping[str, Sequence[str]], *, sorts: bool = False) -> str:
    head = "".join(
        f"<th{_kind(name)}>{f'<button>{escape(name)}</button>' if sorts else escape(name)}</th>" for name in columns
    )
    rows = zip(*columns.values(), strict=True)
    body = "".join(
        "<tr>"
        + "".join(f"<td{_kind(name)}>{escape(cell)}</td>" for name, cell in zip(columns, row, strict=True))
        + "</tr>"
        for row in rows
    )
    kind = " class='sorts'" if sorts else ""
    return f"<div class='wide'><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _kind(name: str) -> str:
    return " class='text'" if is_text(name) or name == "not counted" else ""


def _name(record: PassRecord) -> str:
    return f"pass {record.index + 1}"
