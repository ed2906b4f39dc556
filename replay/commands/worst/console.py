"""Print what `replay worst` measured and predicts, as it becomes known.

command    replay worst --inputs inputs/my-run --model llama-3.1-8b
measured   12 of 80 inputs, in logs/20261123-140000-worst/runs/0/20261123-140001-replay
error      at most 1.1 % of a peak and 3.0 % of a time, on 4 inputs that were held out of the fit
largest    rank0 #31, 2 rows, 3,830 tokens: 61.20 GiB of 138.9 GiB free on NVIDIA H200: fits, 77.70 GiB (56 %) are left
slowest    rank0 #31, 2 rows, 3,830 tokens: 312.0 ms
"""

from collections.abc import Sequence
from pathlib import Path
from typing import IO

from replay.commands.worst.configuration import OtherConfiguration
from replay.commands.worst.configuration_costs import Bounds
from replay.commands.worst.measuring import Fits, MeasuringRun, MemoryRoom, RankedInput
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import (
    Columns,
    describe_damaged_files,
    format_gibibytes,
    format_milliseconds,
    have_distinct_short_names,
    pluralise,
    shorten_names,
)
from replay.profiling.prediction import (
    MOST_OF_PEAK,
    MOST_OF_SECONDS,
    TERMS,
    Cost,
    CostFit,
    CostModel,
    InputShape,
    MeasuredPass,
    PredictionErrors,
)

# The error on all measured inputs is printed where it exceeds that on the held-out ones by this share.
SAID_FROM = 0.005


class WorstConsole:
    def __init__(
        self,
        command: str,
        shapes: Sequence[InputShape],
        damaged: Sequence[tuple[Path, str]],
        *,
        full_names: bool,
        file: IO[str],
    ) -> None:
        self._out = open_console(file)
        self._num_inputs = len(shapes)
        self._full_names = full_names or not have_distinct_short_names([shape.source for shape in shapes])
        print_pairs(self._out, [("command", command), *describe_damaged_files(damaged)])

    def line(self, name: str, text: str) -> None:
        print_pairs(self._out, [(name, text)])

    def show_measured(
        self, measured: Sequence[MeasuredPass], chosen: Sequence[InputShape], measuring: MeasuringRun
    ) -> None:
        log_text = f", in {measuring.log}" if measuring.log else ""
        self.line("measured", f"{len(measured)} of {pluralise(self._num_inputs, 'input')}{log_text}")
        for place, error in sorted(measuring.failed.items()):
            self.line("failed", f"{self._describe_shape(chosen[place])}: {error}")
        if measuring.ended:
            self.line("failed", f"the run that measures ended early: {measuring.ended}")

    def show_ranking(
        self,
        ranked: Sequence[RankedInput],
        model: CostModel,
        room: MemoryRoom,
        num_ranks: int,
        measured: Sequence[MeasuredPass],
        num_shown: int,
    ) -> None:
        """Print what takes the time and the memory, the error, the largest and the slowest input, and a table.

        The error is that on inputs held out of the fit. That on all measured inputs is added where it is larger.
        """
        for trains, predictor in model.predictors.items():
            kind = "" if len(model.predictors) == 1 else (" of training passes" if trains else " of rollout passes")
            for phase, fit in predictor.seconds.items():
                self.line("time", f"{phase}{kind}: {_formula(fit, 1e3, 'ms')}")
            for phase, fit in predictor.peaks.items():
                self.line("peak", f"{phase}{kind}: {_formula(fit, 2**-30, 'GiB')}")
        if model.error is None:
            self.line("error", "not known: there are too few inputs to hold some out of the fit")
        else:
            held_out = pluralise(model.error.num_inputs, "input")
            text = f"{_describe_error(model.error)}, on {held_out} held out of a fit to the others"
            guesses = [
                (guess, measurement.cost)
                for measurement in measured
                if (guess := model.predict(measurement.shape)) is not None
            ]
            all_errors = PredictionErrors.compare(guesses)
            excesses = (
                all_errors.most_of_peak - model.error.most_of_peak,
                all_errors.most_of_seconds - model.error.most_of_seconds,
            )
            if max(excesses) > SAID_FROM:
                text += f"; at most {all_errors.most_of_peak:.1%} and {all_errors.most_of_seconds:.1%} "
                text += "on all that are measured"
            self.line("error", text)
        highest = max(ranked, key=lambda ranking: (ranking.cost.peak_bytes, ranking.shape.real_tokens))
        fits = room.fits(highest.cost.peak_bytes, num_ranks)
        self.line(
            "largest", f"{self._describe_shape(highest.shape)}: {_room(highest.cost.peak_bytes, num_ranks, room, fits)}"
        )
        self.line(
            "slowest",
            f"{self._describe_shape(ranked[0].shape)}: {format_milliseconds(ranked[0].cost.total_seconds)} ms",
        )
        total = sum(ranking.cost.total_seconds for ranking in ranked)
        self.line("all", f"{pluralise(len(ranked), 'input')} one after the other: {total:,.1f} s")
        if num_shown:
            costs = {measurement.shape.number: measurement.cost for measurement in measured}
            print_line(self._out)
            print_table(
                self._out, self._table(ranked[:num_shown], [costs.get(ranking.shape.number) for ranking in ranked])
            )
            print_line(self._out)

    def show_check(
        self,
        pairs: Sequence[tuple[RankedInput, Cost]],
        error: PredictionErrors | None,
        failed: Sequence[tuple[InputShape, str]],
        ended: str,
    ) -> None:
        print_table(self._out, self._table([ranking for ranking, _ in pairs], [cost for _, cost in pairs]))
        print_line(self._out)
        for shape, message in failed:
            self.line("failed", f"{self._describe_shape(shape)}: {message}")
        if ended:
            self.line("failed", f"the run that checks ended early: {ended}")
        if error is not None:
            self.line(
                "checked",
                f"{_judge_error(error)}, on {pluralise(error.num_inputs, 'input')}, the worst and some others",
            )

    def show_prediction(
        self, other: OtherConfiguration, num_layers: int, slowest: Bounds, highest: Bounds, room: MemoryRoom, fits: Fits
    ) -> None:
        """Print a prediction for another configuration."""
        least, most = highest.least.peak_bytes, highest.most.peak_bytes
        seconds = _format_range(
            format_milliseconds(slowest.least.total_seconds), format_milliseconds(slowest.most.total_seconds)
        )
        several = other.num_processes > 1
        without = ", without communication between ranks" if several else ""
        of_rank = " a rank" if several else ""
        peak = _format_range(format_gibibytes(least), format_gibibytes(most))
        fits_text = "" if room.memory is None else f", {fits.value} in {format_gibibytes(room.memory.free_bytes)} GiB"
        self.line(
            "predicted",
            f"{other.text}, {pluralise(num_layers, 'layer')}: highest peak {peak} GiB{of_rank}{fits_text}; slowest "
            f"{seconds} ms{without}",
        )

    def show_other_check(
        self, other: OtherConfiguration, error: PredictionErrors | None, failed: Sequence[str]
    ) -> None:
        for message in failed:
            self.line("failed", f"{other.text}: {message}")
        if error is not None:
            passes = pluralise(error.num_inputs, "pass")
            self.line("checked", f"{other.text}: {_judge_error(error)}, on {passes}, the slowest and some others")

    def finish(self, written: Path) -> None:
        self.line("written", str(written))

    def _table(self, ranked: Sequence[RankedInput], measured: Sequence[Cost | None]) -> Columns:
        rows = list(zip(ranked, measured, strict=False))
        return {
            "input": [self._name(ranking.shape) for ranking, _ in rows],
            "rows": [f"{ranking.shape.rows:,}" for ranking, _ in rows],
            "tokens": [f"{ranking.shape.real_tokens:,}" for ranking, _ in rows],
            "longest": [f"{max(ranking.shape.documents):,}" for ranking, _ in rows],
            "ms": [format_milliseconds(ranking.cost.total_seconds) for ranking, _ in rows],
            "measured": [format_milliseconds(cost.total_seconds if cost else None) for _, cost in rows],
            "GiB": [format_gibibytes(ranking.cost.peak_bytes) for ranking, _ in rows],
            "measured GiB": [format_gibibytes(cost.peak_bytes if cost else None) for _, cost in rows],
        }

    def _describe_shape(self, shape: InputShape) -> str:
        return f"{self._name(shape)}, {pluralise(shape.rows, 'row')}, {shape.real_tokens:,} tokens"

    def _name(self, shape: InputShape) -> str:
        return shape.source if self._full_names else shorten_names(shape.source)


def _room(peak: float, num_ranks: int, room: MemoryRoom, fits: Fits) -> str:
    """Say how a peak and the memory here go together."""
    if room.is_known_to_fail(peak):
        ran_out = "an input that is predicted to need no more ran out of memory when it was measured"
        return f"{format_gibibytes(peak)} GiB by prediction, but {fits.value}: {ran_out}"
    if room.memory is None:
        return f"{format_gibibytes(peak)} GiB; how much is free here is not known"
    needed = room.count_needed_bytes(peak, num_ranks)
    free = room.memory.free_bytes
    left = f"{format_gibibytes(free - needed)} GiB ({(free - needed) / free:.0%}) are left"
    if needed > free:
        left = f"{format_gibibytes(needed - free)} GiB ({(needed - free) / free:.0%}) are lacking"
    held = "" if needed == peak else f", {format_gibibytes(needed)} GiB with what the allocator keeps"
    if room.memory.is_shared:
        held = " resident in the process, which takes the place of an allocator's peak"
        held += f", times {pluralise(num_ranks, 'rank')}" if num_ranks > 1 else ""
    free_text = f"{format_gibibytes(free)} GiB free on {room.memory.device}"
    return f"{format_gibibytes(peak)} GiB{held}; of {free_text}: {fits.value}, {left}"


def _formula(fit: CostFit, unit: float, name: str) -> str:
    """Write a fit as a sum, per thousand tokens and per million of squared lengths."""
    scales = (1.0, 1e3, 1e6, 1e3, 1e6)
    units = (
        "",
        " per 1,000 tokens",
        " per 1,000,000 squared lengths",
        " per 1,000 action tokens",
        " per 1,000,000 of squared rows",
    )
    parts = [
        f"{factor * scale * unit:.4g} {name}{name_of_term}"
        for factor, scale, name_of_term, _ in zip(fit.coefficients, scales, units, TERMS, strict=True)
        if factor
    ]
    floor = f", at least {fit.floor * unit:.4g} {name}" if fit.floor else ""
    return f"{' + '.join(parts) or f'0 {name}'}{floor}"


def _describe_error(error: PredictionErrors) -> str:
    return (
        f"at most {error.most_of_peak:.1%} of a peak and {error.most_of_seconds:.1%} of a time "
        f"(medians {error.median_of_peak:.1%} and {error.median_of_seconds:.1%})"
    )


def _judge_error(error: PredictionErrors) -> str:
    bounds = f"{MOST_OF_PEAK:.0%} and {MOST_OF_SECONDS:.0%}"
    return f"{'within' if error.is_near else 'beyond'} {bounds}: off by {_describe_error(error)}"


def _format_range(least: str, most: str) -> str:
    return most if least == most else f"{least} to {most}"
