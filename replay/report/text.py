"""Records and statistics as text: the only module that knows milliseconds and GiB.

A table here is a dict of columns, name to cells; a pair is a name and what there is to say about it.
"""

from collections.abc import Sequence
from pathlib import Path

from actor_init.spec import BackendName
from replay.inspection.folder_facts import FolderFacts, Spread
from replay.runlog.records import PassRecord
from replay.runlog.summary import TRACED, Place, Statistics
from replay.runner.selection import Selection

TEXTS = {"as", "at input", "command", "configuration", "dtype", "given by", "input", "note", "passes", "quantity"} | {
    "ranks",
    "result",
    "run",
    "setting",
    "verdict",
}
Columns = dict[str, list[str]]
Pairs = list[tuple[str, str]]

PHASES = ("forward", "backward", "step")


def engine_text(backend: BackendName, zero_stage: object) -> str:
    """As `deepspeed, ZeRO stage 1`; ddp shards nothing, and has no stage."""
    return backend.value if backend is BackendName.DDP else f"{backend}, ZeRO stage {zero_stage}"


def milliseconds(seconds: float | None) -> str:
    """One decimal; two below 10 ms."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.{2 if seconds < 0.01 else 1}f}"


def gibibytes(num_bytes: float | None) -> str:
    """Of 1024^3 bytes; two decimals, three below 10 GiB."""
    if num_bytes is None:
        return "-"
    size = num_bytes / 2**30
    return f"{size:.{3 if size < 10 else 2}f}"


def one_line(text: str) -> str:
    return " ".join(text.split())


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`, `2 passes`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def pass_table(records: Sequence[PassRecord]) -> Columns:
    """A row a pass and rank; a column only where there is something to say."""
    records = sorted(records, key=lambda r: (r.index, r.rank))
    phases = [name for name in PHASES if any(name in r.phases for r in records)]
    columns: Columns = {"pass": [str(r.index + 1) for r in records]}
    if len({r.rank for r in records}) > 1:
        columns["rank"] = [str(r.rank) for r in records]
    columns["input"] = [r.source for r in records]
    columns["rows"] = [str(r.rows) for r in records]
    columns["padded"] = [f"{r.padded_tokens:,}" for r in records]
    columns["real"] = [f"{r.real_tokens:,}" for r in records]
    for name in phases:
        seconds = [r.phases[name].seconds if name in r.phases else None for r in records]
        columns[f"{name} ms"] = [milliseconds(s) for s in seconds]
    if any(r.wait_seconds is not None for r in records):
        columns["wait ms"] = [milliseconds(r.wait_seconds) for r in records]
    for name in phases:
        peaks = [r.phases[name].peak_allocated_bytes if name in r.phases else None for r in records]
        columns[f"{name} GiB"] = [gibibytes(peak) for peak in peaks]
    columns["loss"] = ["-" if r.loss is None else f"{r.loss:.5f}" for r in records]
    if any(r.grad_norm is not None for r in records):
        columns["grad norm"] = ["-" if r.grad_norm is None else f"{r.grad_norm:.4g}" for r in records]
    if any(r.new_graphs for r in records):
        columns["new graphs"] = [str(r.new_graphs) for r in records]
    if any(notes := [_note(r) for r in records]):
        columns["note"] = notes
    return columns


def _note(record: PassRecord) -> str:
    marks = ["warm-up"] if record.warmup else []
    marks += ["rollout"] if record.trains is False else []
    marks += [f"failed: {record.error_type}"] if record.error is not None else []
    return ", ".join(marks)


def progress(ranks: Sequence[PassRecord]) -> str:
    """One pass: what it took on its slowest rank, the first rank's loss and input."""
    slowest = {name: max((r.phases[name].seconds for r in ranks if name in r.phases), default=None) for name in PHASES}
    parts = [f"{name} {milliseconds(s)} ms" for name, s in slowest.items() if s is not None]
    parts += [] if ranks[0].loss is None else [f"loss {ranks[0].loss:.5f}"]
    parts += ["warm-up"] if ranks[0].warmup else []
    parts += [f"failed on rank {r.rank}: {r.error_type}" for r in ranks if r.error is not None]
    return ", ".join([*parts, ranks[0].source])


def failures(records: Sequence[PassRecord]) -> Pairs:
    return [
        ("failed", f"pass {r.index + 1}, rank {r.rank}, {r.source}: {r.error_type}: {r.error}")
        for r in records
        if r.error is not None
    ]


def damaged_files(damaged: Sequence[tuple[Path, str]]) -> Pairs:
    return [("damaged", reason if path.name in reason else f"{path.name}: {reason}") for path, reason in damaged]


def counts(statistics: Statistics) -> Pairs:
    text = f"{statistics.num_counted} of {counted(statistics.num_passes, 'pass')}"
    if statistics.left_out:
        text += "; left out: " + ", ".join(f"{number} {reason}" for reason, number in statistics.left_out.items())
    if not statistics.num_counted:
        way_out = "the run without --trace" if TRACED in statistics.left_out else "more inputs, or --warmup 0"
        text += f". No pass counted, so there are no statistics. Try: {way_out}"
    return [("counted", text)]


def phase_table(statistics: Statistics) -> Columns:
    """Median and p95 of each phase and of the whole pass, and the highest peak of each. Needs a counted pass."""
    assert statistics.highest_peak is not None
    phases = statistics.phases.values()
    return {
        "": [*statistics.phases, "pass"],
        "median ms": [milliseconds(s) for s in (*(p.median_seconds for p in phases), statistics.median_seconds)],
        "p95 ms": [milliseconds(s) for s in (*(p.p95_seconds for p in phases), statistics.p95_seconds)],
        "peak GiB": [gibibytes(b) for b in (*(p.peak_allocated_bytes for p in phases), statistics.highest_peak.value)],
    }


def summary(statistics: Statistics, memory_kind: str) -> Pairs:
    """What a run comes to, beside the phases; nothing is said of what was not measured."""
    pairs: Pairs = []
    if statistics.real_tokens_per_second is not None:
        pairs.append(("speed", f"{statistics.real_tokens_per_second:,.0f} real tokens/s"))
    if statistics.padding_share is not None:
        fed = statistics.padding_time_share
        of_time = "" if fed is None else f"; {fed:.1%} of the ranks' time went to padding that was fed"
        pairs.append(("padding", f"{statistics.padding_share:.1%} of the inputs' tokens{of_time}"))
    if statistics.wait_share is not None:
        pairs.append(("waiting", f"{statistics.wait_share:.1%} of the ranks' time, for the slowest rank"))
    if (slowest := statistics.slowest) is not None:
        pairs.append(("slowest", f"{milliseconds(slowest.value)} ms, {_where(slowest)}"))
    if (peak := statistics.highest_peak) is not None:
        pairs.append(("peak", f"{gibibytes(peak.value)} GiB, {memory_kind}, {_where(peak)}"))
    return pairs


def _where(place: Place) -> str:
    return f"pass {place.index + 1}, rank {place.rank}, {place.source}"


def left_behind(selection: Selection) -> Pairs:
    """The inputs that were not replayed, and why."""
    pairs: Pairs = []
    if number := selection.num_left_out_passes:
        pairs.append(("left out", f"{counted(number, 'pass')} of the other kind, met on the way (see --passes)"))
    if number := selection.num_left_over:
        pairs.append(("left over", f"{counted(number, 'input')}: the data ranks hold unequal numbers"))
    if number := len(selection.damaged):
        pairs.append(("damaged", f"{counted(number, 'file')}, named above"))
    return pairs


def not_finite(records: Sequence[PassRecord]) -> Pairs:
    """What held a NaN or an infinity first, in each pass that was looked through."""
    found = [record for record in records if record.first_non_finite is not None]
    return [("not finite", f"pass {r.index + 1}, rank {r.rank}, {r.source}: {r.first_non_finite}") for r in found]


def folder_facts(facts: FolderFacts) -> Pairs:
    pairs = [("folder", str(facts.folder)), ("model", facts.model)]
    pairs.append(("files", ", ".join(f"{number} {what}" for what, number in facts.num_by_format.items())))
    if facts.first_time is not None and facts.last_time is not None:
        pairs.append(("time", f"{facts.first_time} to {facts.last_time}"))
    if facts.versions:
        pairs.append(("versions", ", ".join(facts.versions)))
    return pairs


def incidents(facts: FolderFacts) -> Pairs:
    """List ranks that died without a word, then what failed first; last what follows from another rank's end.

    A death has the time at which somebody salvaged its passes, so it is not sorted by that.
    """
    pairs: Pairs = [] if facts.in_memory is None else [("incident", facts.in_memory)]
    order = {"died": 0}
    for one in sorted(
        facts.incidents,
        key=lambda one: (order.get(one.incident.what, 1 + one.incident.follows_another), one.incident.time),
    ):
        incident = one.incident
        forward = "before any forward" if incident.forward is None else f"forward {incident.forward}"
        text = f"rank {one.rank}, {forward}, {incident.time}: {incident.what}, {incident.where}"
        if incident.message:
            text += f": {incident.message}"
        saved = f"; {counted(len(incident.files), 'file')} for it"
        if incident.num_not_copied:
            saved += f", {counted(incident.num_not_copied, 'pass')} not on the host in time"
        pairs.append(("incident", text + saved))
    if number := sum({one.rank: one.num_others for one in facts.incidents}.values()):
        pairs.append(("incident", f"{number} more like these, for which nothing was written"))
    return pairs


def stand_outs(facts: FolderFacts, most: int = 10) -> Pairs:
    pairs = [("longest", f"{odd.source}: {odd.reason}") for odd in facts.longest]
    pairs += [("odd", f"{odd.source}: {odd.reason}") for odd in facts.odd[:most]]
    if len(facts.odd) > most:
        pairs.append(("odd", f"{len(facts.odd) - most} more"))
    return pairs


def kind_table(facts: FolderFacts) -> Columns:
    """A row for the training passes and one for the rollout passes; a spread is least / median / most."""
    kinds = facts.kinds
    return {
        "passes": [kind.name for kind in kinds],
        "files": [str(kind.num_files) for kind in kinds],
        "ranks": [", ".join("unknown" if rank is None else str(rank) for rank in kind.ranks) for kind in kinds],
        "rows": [_spread(kind.rows) for kind in kinds],
        "row length": [_spread(kind.row_length) for kind in kinds],
        "padded": [f"{kind.padded_tokens:,}" for kind in kinds],
        "real": [f"{kind.real_tokens:,}" for kind in kinds],
        "share": [f"{kind.real_tokens / kind.padded_tokens:.1%}" for kind in kinds],
        "action": [f"{kind.action_tokens:,}" for kind in kinds],
    }


def _spread(spread: Spread) -> str:
    return str(spread.least) if spread.least == spread.most else f"{spread.least} / {spread.median:g} / {spread.most}"


def is_text(name: str) -> bool:
    """Columns of words stand left, columns of numbers right."""
    return not name or name in TEXTS or (len(name) == 1 and name.isupper())  # a letter stands for a run
