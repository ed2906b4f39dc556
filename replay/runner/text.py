"""Format a run as text: its passes, failures, and the summary of time and memory."""

import time
from collections.abc import Mapping, Sequence
from typing import IO

from capture.progress_bar import ProgressBar
from replay.options.resolved import Choice
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import (
    PHASES,
    Columns,
    Pairs,
    counted,
    damaged_files,
    gibibytes,
    milliseconds,
    short_names,
    table_lines,
    unreplayable,
)
from replay.profiling.text import holder_table, kernel_table, memory_remarks, remarks, share_table
from replay.resolution.selection import Selection
from replay.runlog.records import FirstUse, PassRecord
from replay.runlog.summary import FAILED, FIRST_USES, TRACED, Place, Statistics
from replay.runner.result import Run

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


# Print a run: on a terminal with a progress bar and colours; elsewhere plain lines, which are not wrapped.

TICK_SECONDS = 0.25
MILLION = 10**6
LONG_MILLIONS = 50  # of parameters; fewer are filled within a second or two


class Console:
    """Print on rank 0, in this order: header, a line per pass, the answer, the table of passes, the summary."""

    def __init__(self, *, quiet: bool, full_names: bool = False, file: IO[str] | None = None) -> None:
        self._out = open_console(file)
        self._quiet = quiet
        self._full_names = full_names
        self._num_passes = 0
        self._bar = ProgressBar(self._out.file)
        self._next_tick = 0.0
        self._num_filled = 0

    @property
    def has_bar(self) -> bool:
        return self._out.is_terminal and not self._quiet

    def opening(self, num_filled: int, num_parameters: int) -> None:
        """Show that the actor is being opened, and that `num_filled` more of its parameters have their values."""
        self._num_filled += num_filled
        is_long = num_parameters >= LONG_MILLIONS * MILLION
        if self.has_bar and is_long and time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK_SECONDS
            num_done = min(self._num_filled, num_parameters)  # some are filled twice
            self._bar.show(num_done // MILLION, num_parameters // MILLION, "million parameters filled")

    def header(self, lines: Mapping[str, str], *, num_passes: int) -> None:
        """Print what the results belong to: model, weights, backend, device, inputs."""
        self._num_passes = num_passes
        if not self._quiet:
            self._bar.clear()
            print_pairs(self._out, list(lines.items()))
            print_line(self._out)
        self._bar = ProgressBar(self._out.file)

    def passed(self, ranks: Sequence[PassRecord]) -> None:
        """Print one pass of all ranks: in the progress bar on a terminal, otherwise as a line."""
        if self._quiet:
            return
        said, number = self._named(progress(ranks)), ranks[0].index + 1
        if self.has_bar:
            self._bar.show(number, self._num_passes, said)
        else:
            print_line(self._out, f"pass {number} of {self._num_passes}: {said}")

    def finish(
        self,
        run: Run,
        selection: Selection,
        *,
        verdict: Pairs,
        saved: Pairs,
        missing: Pairs,
    ) -> None:
        """Print the answer (verdict, failures, slowest pass), the table of passes, and the summary.

        missing  what passes that ran once more should have shown and did not, and why
        """
        out, records, statistics = self._out, run.records, run.statistics
        profile, memory, ran_out = run.profile, run.memory, run.out_of_memory
        shows_passes = not self._quiet and records
        if shows_passes:
            self._bar.clear() if out.is_terminal else print_line(out)
        print_pairs(out, [(name, self._named(text)) for name, text in verdict])
        print_pairs(out, not_finite(records))
        print_pairs(out, failures(records))
        print_pairs(out, [] if ran_out is None else ran_out.lines(has_snapshot=memory is not None))
        print_pairs(out, damaged_files(selection.damaged))
        print_pairs(out, [(name, self._named(text)) for name, text in slowest(statistics)])
        if shows_passes:
            print_line(out)
            print_table(out, pass_table(records, full_names=self._full_names))
            print_line(out)
        print_pairs(out, counts(statistics, all_damaged=bool(selection.damaged) and not records))
        if statistics.num_counted:
            print_table(out, phase_table(statistics))
        totals = summary(statistics, run.start.memory_kind) + left_behind(selection)
        print_pairs(out, [(name, self._named(text)) for name, text in totals])
        if profile is not None:
            print_line(out)
            print_table(out, share_table(profile))
            print_line(out)
            print_table(out, kernel_table(profile))
            print_pairs(out, [(name, self._named(text)) for name, text in remarks(profile)])
        if memory is not None:
            print_line(out)
            print_table(out, holder_table(memory))
            print_pairs(out, [(name, self._named(text)) for name, text in memory_remarks(memory)])
        print_pairs(out, [*missing, *saved, ("log", str(run.folder))])

    def _named(self, text: str) -> str:
        return text if self._full_names else short_names(text)
