"""Format a run as text (its passes, failures, and the summary of time and memory) and print it on rank 0."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from capture.progress_bar import ProgressBar
from replay.options.resolved import ResolvedChoice
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import (
    PHASES,
    Columns,
    Pairs,
    describe_damaged_files,
    describe_unreplayable,
    format_gibibytes,
    format_milliseconds,
    format_table,
    pluralise,
    shorten_names,
)
from replay.profiling.text import (
    build_holder_table,
    build_kernel_table,
    build_share_table,
    list_memory_remarks,
    list_profile_remarks,
)
from replay.resolution.selection import Selection
from replay.runlog.records import FirstUse, PassRecord
from replay.runlog.summary import FAILED, FIRST_USES, TRACED, Extreme, Statistics
from replay.runner.result import Run

# A warning comes if the inter-quartile range of the pass times is a larger share of their median.
MAX_SPREAD = 0.1
# Characters in a line of the pass table; if it is wider, these columns go first.
MAX_WIDTH = 100
DROPPED_COLUMNS = ("padded", "rows", "wait ms")
SHORT_PHASES = {"forward": "fwd", "backward": "bwd"}


def build_choice_table(choices: Sequence[ResolvedChoice]) -> Columns:
    """Return a row for each setting: its value, who chose it, and why."""
    return {
        "setting": [_name_option(choice.setting) for choice in choices],
        "value": [_format_value(choice.value) for choice in choices],
        "chosen by": [choice.by.value for choice in choices],
        "why": [choice.why for choice in choices],
    }


def _name_option(setting: str) -> str:
    """Return the option that sets it; a name without a point, of what no option sets, stays."""
    _, point, field = setting.rpartition(".")
    return f"--{field.replace('_', '-')}" if point else setting


def _format_value(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def build_pass_table(records: Sequence[PassRecord], *, full_names: bool = False) -> Columns:
    """Return a row per pass and rank. A column appears only if it has content, and if there is room."""
    records = sorted(records, key=lambda record: (record.index, record.rank))
    phases = [name for name in PHASES if any(name in record.cost.phases for record in records)]
    columns: Columns = {"pass": [str(record.index + 1) for record in records]}
    if len({record.rank for record in records}) > 1:
        columns["rank"] = [str(record.rank) for record in records]
    columns["input"] = [record.source if full_names else shorten_names(record.source) for record in records]
    columns["rows"] = [str(record.input.rows) for record in records]
    columns["padded"] = [f"{record.input.padded_tokens:,}" for record in records]
    columns["real"] = [f"{record.input.real_tokens:,}" for record in records]
    for name in phases:
        phase_seconds = [record.cost.phases[name].seconds if name in record.cost.phases else None for record in records]
        columns[f"{SHORT_PHASES.get(name, name)} ms"] = [format_milliseconds(seconds) for seconds in phase_seconds]
    if any(record.cost.wait_seconds is not None for record in records):
        columns["wait ms"] = [format_milliseconds(record.cost.wait_seconds) for record in records]
    if phases:
        columns["peak GiB"] = [
            format_gibibytes(max((cost.peak_allocated_bytes for cost in record.cost.phases.values()), default=None))
            for record in records
        ]
    columns["loss"] = ["-" if record.result.loss is None else f"{record.result.loss:.5f}" for record in records]
    if any(record.result.grad_norm is not None for record in records):
        columns["grad norm"] = [
            "-" if record.result.grad_norm is None else f"{record.result.grad_norm:.4g}" for record in records
        ]
    if any(notes := [_describe_note(record) for record in records]):
        columns["note"] = notes
    for name in () if full_names else DROPPED_COLUMNS:
        if max(map(len, format_table(columns))) > MAX_WIDTH:
            columns.pop(name, None)
    return columns


def _describe_note(record: PassRecord) -> str:
    marks = ["warm-up"] if record.warmup else []
    compiled = record.compilation.new_graphs or FirstUse.COMPILED in record.first_uses
    marks += ["compiled"] if compiled else []
    marks += [] if record.warmup else [use for use in record.first_uses if use != FirstUse.COMPILED]
    marks += ["rollout"] if record.input.trains is False else []
    marks += [f"failed: {record.error_type}"] if record.error is not None else []
    return ", ".join(marks)


def format_progress(rank_records: Sequence[PassRecord]) -> str:
    """Format one pass: phase times on its slowest rank, the first rank's loss and input."""
    slowest = {
        name: max(
            (record.cost.phases[name].seconds for record in rank_records if name in record.cost.phases), default=None
        )
        for name in PHASES
    }
    parts = [f"{name} {format_milliseconds(seconds)} ms" for name, seconds in slowest.items() if seconds is not None]
    parts += [] if rank_records[0].result.loss is None else [f"loss {rank_records[0].result.loss:.5f}"]
    parts += ["warm-up"] if rank_records[0].warmup else []
    parts += [
        f"failed on rank {record.rank}: {record.error_type}" for record in rank_records if record.error is not None
    ]
    return ", ".join([*parts, rank_records[0].source])


def list_failures(records: Sequence[PassRecord]) -> Pairs:
    """Name each failed pass."""
    return [
        ("failed", f"{_describe_pass(record)}: {record.error_type}: {record.error}")
        for record in records
        if record.error is not None
    ]


def list_counts(statistics: Statistics, *, all_damaged: bool = False) -> Pairs:
    text = f"{statistics.num_counted} of {statistics.num_passes}"
    if statistics.left_out:
        text += "; excluded: " + ", ".join(f"{number} {reason}" for reason, number in statistics.left_out.items())
    if not statistics.num_counted:
        if statistics.left_out.get(FAILED) == statistics.num_passes > 0:
            return [("passes measured", f"{text}. No pass was measured, so there are no statistics")]
        advice = "more inputs, or --warmup 0"
        if all_damaged:
            advice = "other inputs; `capture check FOLDER` says which files can be read"
        elif FIRST_USES[FirstUse.PLAN] in statistics.left_out:
            advice = "--epochs 2: the second time, cuDNN has its plan for each length"
        elif TRACED in statistics.left_out:
            advice = "the run without --trace"
        text += f". No pass was measured, so there are no statistics. Try: {advice}"
    return [("passes measured", text)]


def build_phase_table(statistics: Statistics) -> Columns:
    """Return a row per phase and one for the whole pass: median, IQR, p95, peak. Needs a counted pass."""
    assert statistics.highest_peak is not None
    phases = statistics.phases.values()
    medians = [*(phase.median_seconds for phase in phases), statistics.median_seconds]
    iqrs = [*(phase.iqr_seconds for phase in phases), statistics.iqr_seconds]
    p95s = [*(phase.p95_seconds for phase in phases), statistics.p95_seconds]
    peaks = [*(phase.peak_allocated_bytes for phase in phases), statistics.highest_peak.value]
    return {
        "": [*statistics.phases, "pass"],
        "median ms": [format_milliseconds(seconds) for seconds in medians],
        "IQR ms": [format_milliseconds(seconds) for seconds in iqrs],
        "p95 ms": [format_milliseconds(seconds) for seconds in p95s],
        "peak GiB": [format_gibibytes(num_bytes) for num_bytes in peaks],
    }


def name_slowest(statistics: Statistics) -> Pairs:
    """Name the slowest pass that counts."""
    place = statistics.slowest
    return [] if place is None else [("slowest", f"{format_milliseconds(place.value)} ms, {_describe_pass(place)}")]


def list_totals(statistics: Statistics, memory_kind: str) -> Pairs:
    """Return the summary besides the phases. What was not measured is left out."""
    pairs = _warn_of_spread(statistics)
    if statistics.real_tokens_per_second is not None:
        pairs.append(("speed", f"{statistics.real_tokens_per_second:,.0f} real tokens/s"))
    if statistics.padding_share is not None:
        time_share = statistics.padding_time_share
        time_text = "" if time_share is None else f"; {time_share:.1%} of the ranks' time went to padding that was fed"
        pairs.append(("padding", f"{statistics.padding_share:.1%} of the inputs' tokens{time_text}"))
    if statistics.wait_share is not None:
        pairs.append(("waiting", f"{statistics.wait_share:.1%} of the ranks' time, for the slowest rank"))
    if (peak := statistics.highest_peak) is not None:
        pairs.append(("peak", f"{format_gibibytes(peak.value)} GiB, {memory_kind}, {_describe_pass(peak)}"))
    return pairs


def _warn_of_spread(statistics: Statistics) -> Pairs:
    """Warn if pass times vary so much that the median says little about a single pass."""
    if not statistics.median_seconds or statistics.iqr_seconds is None:
        return []
    share = statistics.iqr_seconds / statistics.median_seconds
    why = "inputs of different lengths, or a machine that does other work"
    text = f"times vary a lot (IQR {100 * share:.0f} % of the median): {why}"
    return [("spread", text)] if share > MAX_SPREAD else []


def _describe_pass(place: Extreme | PassRecord) -> str:
    return f"pass {place.index + 1}, rank {place.rank}, {place.source}"


def list_unreplayed(selection: Selection) -> Pairs:
    """List the inputs that were not replayed, and why."""
    pairs: Pairs = []
    if number := selection.num_left_out_passes:
        which = "that --passes does not select (by default it selects those captured with autograd on)"
        pairs.append(("excluded", f"{pluralise(number, 'pass')} {which}"))
    if number := selection.num_left_over:
        pairs.append(("left over", f"{pluralise(number, 'input')}: the data ranks hold unequal numbers"))
    if selection.unreplayable:
        pairs.append(("excluded", describe_unreplayable(selection.unreplayable)))
    if number := len(selection.damaged):
        pairs.append(("damaged", f"{pluralise(number, 'file')}, named above"))
    return pairs


def list_non_finite(records: Sequence[PassRecord]) -> Pairs:
    """Name the first tensor with a NaN or an infinity in each pass that was searched."""
    searched = [record for record in records if record.first_non_finite is not None]
    return [("not finite", f"{_describe_pass(record)}: {record.first_non_finite}") for record in searched]


TICK_SECONDS = 0.25
MILLION = 10**6
# Fewer parameters are filled within a second or two, so that no progress bar is worth showing.
MIN_MILLIONS_FOR_BAR = 50


class Console:
    """Print on rank 0, in this order: header, a line per pass, the answer, the table of passes, the summary.

    On a terminal there is a progress bar instead of the lines per pass, and colours; elsewhere no line is wrapped.
    """

    def __init__(
        self,
        *,
        quiet: bool,
        full_names: bool = False,
        file: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = open_console(file)
        self._clock = clock
        self._quiet = quiet
        self._full_names = full_names
        self._num_passes = 0
        self._bar = ProgressBar(self._out.file, clock=clock)
        self._next_tick = 0.0
        self._num_filled = 0

    @property
    def has_bar(self) -> bool:
        return self._out.is_terminal and not self._quiet

    def show_opening(self, num_more: int, num_parameters: int) -> None:
        """Show that the actor is being opened, and that `num_more` more of its parameters have their values."""
        self._num_filled += num_more
        is_large = num_parameters >= MIN_MILLIONS_FOR_BAR * MILLION
        if self.has_bar and is_large and self._clock() >= self._next_tick:
            self._next_tick = self._clock() + TICK_SECONDS
            # Some parameters are filled twice.
            num_filled = min(self._num_filled, num_parameters)
            self._bar.show(num_filled // MILLION, num_parameters // MILLION, "million parameters filled")

    def print_header(self, lines: Mapping[str, str], *, num_passes: int) -> None:
        """Print what the results belong to: model, weights, backend, device, inputs."""
        self._num_passes = num_passes
        if not self._quiet:
            self._bar.clear()
            print_pairs(self._out, list(lines.items()))
            print_line(self._out)
        self._bar = ProgressBar(self._out.file, clock=self._clock)

    def show_pass(self, rank_records: Sequence[PassRecord]) -> None:
        """Print one pass of all ranks: in the progress bar on a terminal, otherwise as a line."""
        if self._quiet:
            return
        text, number = self._shorten_names(format_progress(rank_records)), rank_records[0].index + 1
        if self.has_bar:
            self._bar.show(number, self._num_passes, text)
        else:
            print_line(self._out, f"pass {number} of {self._num_passes}: {text}")

    def finish(
        self,
        run: Run,
        selection: Selection,
        *,
        verdict: Pairs,
        saved_lines: Pairs,
        missing_lines: Pairs,
    ) -> None:
        """Print the answer (verdict, failures, slowest pass), the table of passes, and the summary.

        missing_lines  what passes that ran once more should have shown and did not, and why
        """
        out, records, statistics = self._out, run.records, run.statistics
        profile, memory, out_of_memory = run.profile, run.memory, run.out_of_memory
        shows_passes = not self._quiet and records
        if shows_passes:
            self._bar.clear() if out.is_terminal else print_line(out)
        print_pairs(out, [(name, self._shorten_names(text)) for name, text in verdict])
        print_pairs(out, list_non_finite(records))
        print_pairs(out, list_failures(records))
        print_pairs(out, [] if out_of_memory is None else out_of_memory.lines(has_snapshot=memory is not None))
        print_pairs(out, describe_damaged_files(selection.damaged))
        print_pairs(out, [(name, self._shorten_names(text)) for name, text in name_slowest(statistics)])
        if shows_passes:
            print_line(out)
            print_table(out, build_pass_table(records, full_names=self._full_names))
            print_line(out)
        print_pairs(out, list_counts(statistics, all_damaged=bool(selection.damaged) and not records))
        if statistics.num_counted:
            print_table(out, build_phase_table(statistics))
        totals = list_totals(statistics, run.start.memory_kind) + list_unreplayed(selection)
        print_pairs(out, [(name, self._shorten_names(text)) for name, text in totals])
        if profile is not None:
            print_line(out)
            print_table(out, build_share_table(profile))
            print_line(out)
            print_table(out, build_kernel_table(profile))
            print_pairs(out, [(name, self._shorten_names(text)) for name, text in list_profile_remarks(profile)])
        if memory is not None:
            print_line(out)
            print_table(out, build_holder_table(memory))
            print_pairs(out, [(name, self._shorten_names(text)) for name, text in list_memory_remarks(memory)])
        print_pairs(out, [*missing_lines, *saved_lines, ("log", str(run.folder))])

    def _shorten_names(self, text: str) -> str:
        return text if self._full_names else shorten_names(text)
