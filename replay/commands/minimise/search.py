"""Search for the smallest replay that still fails: delta debugging over ranks, files, rows, layers, options and tokens.

`shows` says whether a candidate shows the failure. What decides is that answer alone: the guesses here (the failing
pass alone, its row, its token, one layer) cost a trial each and are right as a rule. Files, rows and options are found
by ddmin (Zeller, Hildebrandt 2002); layers and columns, of which a shorter run is kept, by bisection.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from actor_init.spec import UsageError
from replay.commands.minimise.cutting import BY_ROW, MIN_COLUMNS, Candidate, CaptureShape, Cut
from replay.commands.minimise.failure import JOB_DIFFERENCES, ReplayFailure
from replay.options.declarations import list_objectives_with
from replay.options.spec import PairOrder

Item = TypeVar("Item")
# The most layers that are tried, where nothing says how many the model has.
MOST_LAYERS = 256
# Options that bound a run and are no part of a failure.
LIMITS = ("--timeout", "--warmup")


class OutOfRunsError(Exception):
    """Raised by `shows` where no more run is allowed."""


def ddmin(items: Sequence[Item], shows: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Return a part of `items`, which show the failure, of which no single item can be left out; at least one."""
    remaining, num_chunks = list(items), 2
    while len(remaining) > 1:
        bounds = [len(remaining) * number // num_chunks for number in range(num_chunks + 1)]
        chunks = [remaining[first:end] for first, end in pairwise(bounds)]
        alone = next((chunk for chunk in chunks if shows(chunk)), None)
        if alone is not None:
            remaining, num_chunks = alone, 2
            continue
        without = [remaining[:first] + remaining[end:] for first, end in pairwise(bounds)]
        smaller = next((part for part in without if num_chunks > 2 and shows(part)), None)
        if smaller is not None:
            remaining, num_chunks = smaller, max(num_chunks - 1, 2)
        elif num_chunks >= len(remaining):
            break
        else:
            num_chunks = min(2 * num_chunks, len(remaining))
    return remaining


def bisect(succeeds: int, fails: int, shows: Callable[[int], bool]) -> int:
    """Return the number nearest to `succeeds` that shows the failure, if all from it to `fails` show it."""
    while abs(fails - succeeds) > 1:
        middle = (fails + succeeds) // 2
        if shows(middle):
            fails = middle
        else:
            succeeds = middle
    return fails


@dataclass(slots=True)
class MinimiseSearch:
    """Reduce `best` step by step.

    shapes      of the captures, by their number
    failure     what is to be shown; where it was seen, in a run of `best` as it is at first
    num_layers  of the model; None: not known
    fixed       flags of options that stay
    """

    best: Candidate
    failure: ReplayFailure
    shapes: Sequence[CaptureShape]
    num_layers: int | None
    shows: Callable[[Candidate, str], ReplayFailure | None]
    fixed: Collection[str] = ()
    # Keys of what bisection has made as short as it can.
    _bisected: set[object] = field(default_factory=set)

    def run(self) -> None:
        """Reduce until nothing more can be left out. Raises OutOfRunsError; `best` is then what was found so far."""
        before = None
        while before != self.best:
            before = self.best
            for stage in (
                self._reduce_ranks,
                self._reduce_files,
                self._reduce_rows,
                self._reduce_layers,
                self._reduce_options,
                self._reduce_tokens,
            ):
                stage()

    def _try(self, candidate: Candidate, what: str) -> bool:
        if candidate == self.best:
            return True
        shown_failure = self.shows(candidate, what)
        if shown_failure is not None:
            self.best, self.failure = candidate, shown_failure
        return shown_failure is not None

    @property
    def is_job_difference(self) -> bool:
        """Is the failure a difference from what the job recorded, which was of its whole model?"""
        return self.failure.kind in JOB_DIFFERENCES

    @property
    def _needs_all_rows(self) -> bool:
        """Do the numbers that differ come of all rows and tokens together, so that none can be left out?"""
        return self.is_job_difference and not {*self.failure.quantities} & {*BY_ROW}

    def _reduce_ranks(self) -> None:
        best, parallel = self.best, self.best.spec.actor.parallel
        if best.num_processes == 1:
            return
        rank_options = [option for option in best.changed_options if option.part == "actor.parallel"]
        num_data_ranks = best.num_processes // (parallel.tp * parallel.ring)
        for num_processes, dropped in (
            (1, rank_options),
            (parallel.tp * parallel.ring, []),
            (num_data_ranks, rank_options),
            (2, []),
        ):
            is_smaller = num_processes < self.best.num_processes
            smaller = _build_valid(partial(best.without_options, dropped))
            if is_smaller and smaller is not None and self._try(replace(smaller, num_processes=num_processes), "ranks"):
                return

    def _reduce_files(self) -> None:
        cuts, place = self.best.cuts, self._find_failing_cut()
        if len(cuts) == 1:
            return

        def shows(kept_cuts: Sequence[Cut]) -> bool:
            return self._try(replace(self.best, cuts=tuple(kept_cuts)), "files")

        if place is None:
            ddmin(cuts, shows)
            return
        size = self._num_data_ranks
        first = place // size * size
        failing = cuts[first : first + size]
        if shows(failing):
            return
        if first + size < len(cuts) and shows(cuts[: first + size]):
            cuts = cuts[: first + size]
        other_cuts = tuple(cut for cut in cuts if cut not in failing)
        ddmin(other_cuts, lambda kept_cuts: shows([cut for cut in cuts if cut in kept_cuts or cut in failing]))

    @property
    def _num_data_ranks(self) -> int:
        parallel = self.best.spec.actor.parallel
        return self.best.num_processes // (parallel.tp * parallel.ring)

    def _find_failing_cut(self) -> int | None:
        """Return the place of the cut that the failing pass was fed; None where that is not known."""
        names = [self.shapes[cut.source].name for cut in self.best.cuts]
        if self.failure.source in names:
            return names.index(self.failure.source)
        index = self.failure.index
        place = None if index is None else index * self._num_data_ranks
        return place if place is not None and place < len(names) else None

    def _reduce_rows(self) -> None:
        if self._needs_all_rows:
            return
        for place, cut in enumerate(self.best.cuts):
            units = self._group_rows(cut)
            if len(units) == 1 or not self.shapes[cut.source].can_cut_rows:
                continue

            def shows(kept_units: Sequence[tuple[int, ...]], place: int = place) -> bool:
                rows = tuple(sorted(row for unit in kept_units for row in unit))
                return self._try(self.best.with_cut(place, rows=rows), "rows")

            failing_row = self.failure.row if self._find_failing_cut() in (place, None) else None
            if failing_row is not None and failing_row < len(cut.rows):
                unit = next(unit for unit in units if cut.rows[failing_row] in unit)
                if shows([unit]):
                    continue
            ddmin(units, shows)

    def _group_rows(self, cut: Cut) -> list[tuple[int, ...]]:
        """Return the rows that go together: pairs, where the loss is of pairs."""
        spec = self.best.spec
        if spec.measure.loss not in list_objectives_with("pairs") or len(cut.rows) % 2:
            return [(row,) for row in cut.rows]
        if spec.objective.pairs is PairOrder.HALVES:
            return list(zip(cut.rows[: len(cut.rows) // 2], cut.rows[len(cut.rows) // 2 :], strict=True))
        return list(zip(cut.rows[::2], cut.rows[1::2], strict=True))

    def _reduce_layers(self) -> None:
        if self.is_job_difference:
            return
        typed_layers = self.best.spec.actor.num_layers
        total = min(number for number in (typed_layers, self.num_layers, MOST_LAYERS) if number is not None)

        def shows(number: int) -> bool:
            smaller = _build_valid(lambda: self.best.with_option("--num-layers", number))
            return smaller is not None and self._try(smaller, f"{number} of {total} layers")

        if "layers" in self._bisected and not (total > 1 and shows(total - 1)):
            return
        self._bisected.add("layers")
        succeeding = 0
        for number in _list_doubled(total):
            if shows(number):
                bisect(succeeding, number, shows)
                return
            succeeding = number
        if total - succeeding > 1 and total != MOST_LAYERS:
            bisect(succeeding, total, shows)

    def _reduce_options(self) -> None:
        fixed = ("--num-layers", *LIMITS, *self.fixed)
        changed_options = [option for option in self.best.changed_options if option.flag not in fixed]
        if self.best.num_processes > 1:
            changed_options = [option for option in changed_options if option.part != "actor.parallel"]
        if not changed_options:
            return

        def shows(kept_options: Sequence[Any]) -> bool:
            smaller = _build_valid(
                lambda: start.without_options([option for option in changed_options if option not in kept_options])
            )
            step_name = "options " + (" ".join(option.flag for option in kept_options) or "none")
            return smaller is not None and self._try(smaller, step_name)

        start = self.best
        if not shows([]) and len(changed_options) > 1:
            ddmin(changed_options, shows)
        actor = self.best.spec.actor
        if not actor.random_weights and actor.model is not None and Path(actor.model).is_dir():
            candidate = _build_valid(lambda: self.best.with_option("--random-weights", True))
            if candidate is not None and not self.is_job_difference and "--model" not in self.fixed:
                self._try(candidate, "random weights")

    def _reduce_tokens(self) -> None:
        if self._needs_all_rows:
            return
        for place in range(len(self.best.cuts)):
            if self.shapes[self.best.cuts[place].source].can_cut_columns:
                self._reduce_columns(place)

    def _reduce_columns(self, place: int) -> None:
        cut, shape = self.best.cuts[place], self.shapes[self.best.cuts[place].source]

        def shows(first: int, end: int) -> bool:
            if end - first < MIN_COLUMNS:
                return False
            return self._try(self.best.with_cut(place, first=first, end=end), f"columns {first + 1} to {end}")

        if cut.end - cut.first <= MIN_COLUMNS:
            return
        key = ("columns", cut.source)
        shorter = [(cut.first, cut.end - 1)]
        # A log-prob depends on all tokens before it. Where log-probs differ, the first columns have to stay.
        shorter += [] if self.is_job_difference else [(cut.first + 1, cut.end)]
        if key in self._bisected and not any(shows(*columns) for columns in shorter):
            return
        self._bisected.add(key)
        cut = self.best.cuts[place]
        token = self.failure.token if self._find_failing_cut() in (place, None) else None
        if token is not None and not self.is_job_difference:
            failing_column = min(cut.first + token, cut.end - 1)
            first = max(failing_column - 1, cut.first)
            if shows(first, max(failing_column + 1, first + MIN_COLUMNS)):
                return
        real = [shape.real[row] for row in cut.rows]
        shows(max(cut.first, min(first for first, _ in real)), min(cut.end, max(end for _, end in real)))
        if self.is_job_difference and not shape.has_values:
            return
        cut = self.best.cuts[place]
        least = cut.first + MIN_COLUMNS
        if not shows(cut.first, least):
            bisect(least, cut.end, lambda end: shows(cut.first, end))
        cut = self.best.cuts[place]
        most = cut.end - MIN_COLUMNS
        if most > cut.first and not self.is_job_difference and not shows(most, cut.end):
            bisect(most, cut.first, lambda first: shows(first, cut.end))


def _list_doubled(total: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... below `total`."""
    number = 1
    while number < total:
        yield number
        number *= 2


def _build_valid(make: Callable[[], Candidate]) -> Candidate | None:
    """Return what `make` returns; None where its options contradict each other."""
    try:
        return make()
    except UsageError:
        return None
