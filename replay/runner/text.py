"""Format a run as text: its passes, failures, and the summary of time and memory."""

from collections.abc import Sequence

from replay.options.resolved import Choice
from replay.output.text import (
    PHASES,
    Columns,
    Pairs,
    counted,
    gibibytes,
    milliseconds,
    short_names,
    table_lines,
    unreplayable,
)
from replay.resolution.selection import Selection
from replay.runlog.records import FirstUse, PassRecord
from replay.runlog.summary import FAILED, FIRST_USES, TRACED, Place, Statistics

MAX_SPREAD = 0.1  # of the median; a larger inter-quartile range brings a warning
MAX_WIDTH = 100  # columns of the pass table
LEFT_OUT_FIRST = ("padded", "rows", "wait ms")  # columns dropped first if the table is wider
SHORT = {"forward": "fwd", "backward": "bwd"}


def choice_table(choices: Sequence[Choice]) -> Columns:
    """Return a row for each setting: its value, who chose it, and why."""
    return {
        "setting": [_named_setting(choice.setting) for choice in choices],
        "value": [_value_text(choice.value) for choice in choices],
        "chosen by": [choice.by.value for choice in choices],
        "why": [choice.why for choice in choices],
    }


def _named_setting(setting: str) -> str:
    """Return the option that sets it; a name without a point, of what no option sets, stays."""
    _, point, field = setting.rpartition(".")
    return f"--{field.replace('_', '-')}" if point else setting


def _value_text(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def pass_table(records: Sequence[PassRecord], *, full_names: bool = False) -> Columns:
    """Return a row per pass and rank. A column appears only if it has content, and if there is room."""
    records = sorted(records, key=lambda r: (r.index, r.rank))
    phases = [name for name in PHASES if any(name in r.cost.phases for r in records)]
    columns: Columns = {"pass": [str(r.index + 1) for r in records]}
    if len({r.rank for r in records}) > 1:
        columns["rank"] = [str(r.rank) for r in records]
    columns["input"] = [r.source if full_names else short_names(r.source) for r in records]
    columns["rows"] = [str(r.input.rows) for r in records]
    columns["padded"] = [f"{r.input.padded_tokens:,}" for r in records]
    columns["real"] = [f"{r.input.real_tokens:,}" for r in records]
    for name in phases:
        seconds = [r.cost.phases[name].seconds if name in r.cost.phases else None for r in records]
        columns[f"{SHORT.get(name, name)} ms"] = [milliseconds(s) for s in seconds]
    if any(r.cost.wait_seconds is not None for r in records):
        columns["wait ms"] = [milliseconds(r.cost.wait_seconds) for r in records]
    if phases:
        columns["peak GiB"] = [
            gibibytes(max((cost.peak_allocated_bytes for cost in r.cost.phases.values()), default=None))
            for r in records
        ]
    columns["loss"] = ["-" if r.result.loss is None else f"{r.result.loss:.5f}" for r in records]
    if any(r.result.grad_norm is not None for r in records):
        columns["grad norm"] = ["-" if r.result.grad_norm is None else f"{r.result.grad_norm:.4g}" for r in records]
    if any(notes := [_note(r) for r in records]):
        columns["note"] = notes
    for name in () if full_names else LEFT_OUT_FIRST:
        if max(map(len, table_lines(columns))) > MAX_WIDTH:
            columns.pop(name, None)
    return columns


def _note(record: PassRecord) -> str:
    marks = ["warm-up"] if record.warmup else []
    compiled = record.compilation.new_graphs or FirstUse.COMPILED in record.first_uses
    marks += ["compiled"] if compiled else []
    marks += [] if record.warmup else [use for use in record.first_uses if use != FirstUse.COMPILED]
    marks += ["rollout"] if record.input.trains is False else []
    marks += [f"failed: {record.error_type}"] if record.error is not None else []
    return ", ".join(marks)


def progress(ranks: Sequence[PassRecord]) -> str:
    """Format one pass: phase times on its slowest rank, the first rank's loss and input."""
    slowest = {
        name: max((r.cost.phases[name].seconds for r in ranks if name in r.cost.phases), default=None)
        for name in PHASES
    }
    parts = [f"{name} {milliseconds(s)} ms" for name, s in slowest.items() if s is not None]
    parts += [] if ranks[0].result.loss is None else [f"loss {ranks[0].result.loss:.5f}"]
    parts += ["warm-up"] if ranks[0].warmup else []
    parts += [f"failed on rank {r.rank}: {r.error_type}" for r in ranks if r.error is not None]
    return ", ".join([*parts, ranks[0].source])


def failures(records: Sequence[PassRecord]) -> Pairs:
    """Name each failed pass."""
    return [
        ("failed", f"pass {r.index + 1}, rank {r.rank}, {r.source}: {r.error_type}: {r.error}")
        for r in records
        if r.error is not None
    ]


def counts(statistics: Statistics, *, all_damaged: bool = False) -> Pairs:
    text = f"{statistics.num_counted} of {counted(statistics.num_passes, 'pass')}"
    if statistics.left_out:
        text += "; left out: " + ", ".join(f"{number} {reason}" for reason, number in statistics.left_out.items())
    if not statistics.num_counted:
        if statistics.left_out.get(FAILED) == statistics.num_passes > 0:
            return [("counted", f"{text}. No pass counted, so there are no statistics")]
        way_out = "more inputs, or --warmup 0"
        if all_damaged:
            way_out = "other inputs; `capture check FOLDER` says which files can be read"
        elif FIRST_USES[FirstUse.PLAN] in statistics.left_out:
            way_out = "--epochs 2: the second time, cuDNN has its plan for each length"
        elif TRACED in statistics.left_out:
            way_out = "the run without --trace"
        text += f". No pass counted, so there are no statistics. Try: {way_out}"
    return [("counted", text)]


def phase_table(statistics: Statistics) -> Columns:
    """Return a row per phase and one for the whole pass: median, IQR, p95, peak. Needs a counted pass."""
    assert statistics.highest_peak is not None
    phases = statistics.phases.values()
    return {
        "": [*statistics.phases, "pass"],
        "median ms": [milliseconds(s) for s in (*(p.median_seconds for p in phases), statistics.median_seconds)],
        "IQR ms": [milliseconds(s) for s in (*(p.iqr_seconds for p in phases), statistics.iqr_seconds)],
        "p95 ms": [milliseconds(s) for s in (*(p.p95_seconds for p in phases), statistics.p95_seconds)],
        "peak GiB": [gibibytes(b) for b in (*(p.peak_allocated_bytes for p in phases), statistics.highest_peak.value)],
    }


def slowest(statistics: Statistics) -> Pairs:
    """Name the slowest pass that counts."""
    pass_ = statistics.slowest
    return [] if pass_ is None else [("slowest", f"{milliseconds(pass_.value)} ms, {_where(pass_)}")]


def summary(statistics: Statistics, memory_kind: str) -> Pairs:
    """Return the summary besides the phases. What was not measured is left out."""
    pairs = _spread(statistics)
    if statistics.real_tokens_per_second is not None:
        pairs.append(("speed", f"{statistics.real_tokens_per_second:,.0f} real tokens/s"))
    if statistics.padding_share is not None:
        fed = statistics.padding_time_share
        of_time = "" if fed is None else f"; {fed:.1%} of the ranks' time went to padding that was fed"
        pairs.append(("padding", f"{statistics.padding_share:.1%} of the inputs' tokens{of_time}"))
    if statistics.wait_share is not None:
        pairs.append(("waiting", f"{statistics.wait_share:.1%} of the ranks' time, for the slowest rank"))
    if (peak := statistics.highest_peak) is not None:
        pairs.append(("peak", f"{gibibytes(peak.value)} GiB, {memory_kind}, {_where(peak)}"))
    return pairs


def _spread(statistics: Statistics) -> Pairs:
    """Warn if pass times vary so much that the median says little about a single pass."""
    if not statistics.median_seconds or statistics.iqr_seconds is None:
        return []
    share = statistics.iqr_seconds / statistics.median_seconds
    why = "inputs of other lengths, or a machine that does other work"
    return [("spread", f"half of the passes lie {share:.0%} of the median apart: {why}")] if share > MAX_SPREAD else []


def _where(place: Place) -> str:
    return f"pass {place.index + 1}, rank {place.rank}, {place.source}"


def left_behind(selection: Selection) -> Pairs:
    """List the inputs that were not replayed, and why."""
    pairs: Pairs = []
    if number := selection.num_left_out_passes:
        pairs.append(("left out", f"{counted(number, 'pass')} of the other kind, met on the way (see --passes)"))
    if number := selection.num_left_over:
        pairs.append(("left over", f"{counted(number, 'input')}: the data ranks hold unequal numbers"))
    if selection.unreplayable:
        pairs.append(("left out", unreplayable(selection.unreplayable)))
    if number := len(selection.damaged):
        pairs.append(("damaged", f"{counted(number, 'file')}, named above"))
    return pairs


def not_finite(records: Sequence[PassRecord]) -> Pairs:
    """Name the first tensor with a NaN or an infinity in each pass that was searched."""
    searched = [record for record in records if record.first_non_finite is not None]
    return [("not finite", f"pass {r.index + 1}, rank {r.rank}, {r.source}: {r.first_non_finite}") for r in searched]
