"""The search of `replay minimise` finds the smallest candidate of planted predicates, and in few runs."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import SimpleNamespace

import pytest

from actor_init.spec import UsageError
from replay.commands.minimise.cutting import Candidate, CaptureShape, Cut
from replay.commands.minimise.failure import FailureKind, ReplayFailure
from replay.commands.minimise.search import MinimiseSearch, OutOfRunsError, bisect, ddmin
from replay.commands.minimise.standalone import format_script
from tests.helpers.typed import spec_of

NUM_FILES, NUM_ROWS, LENGTH, LAYERS = 12, 4, 64, 16
FAILURE = ReplayFailure(kind=FailureKind.EXCEPTION, error_type="IndexError", message="N")
AT = (7, 2, 40)  # file, row, column


def has(candidate: Candidate, file: int, row: int, column: int) -> bool:
    return any(cut.source == file and row in cut.rows and cut.first <= column < cut.end for cut in candidate.cuts)


def num_tokens(candidate: Candidate) -> int:
    return max((len(cut.rows) * (cut.end - cut.first) for cut in candidate.cuts), default=0)


@dataclass(kw_only=True)
class Planted:
    """A predicate, the failure as it is seen at first, and what is to be left."""

    fails: Callable[[Candidate], bool]
    typed: Sequence[str] = ()
    num_processes: int = 1
    first: ReplayFailure = replace(FAILURE, index=7)
    files: int = 1
    rows: int = 1
    tokens: int = 2
    layers: int = 1
    processes: int = 1
    options: Sequence[str] = ()
    runs: int = 40


PLANTED = {
    "a token": Planted(fails=lambda c: has(c, *AT)),
    "a token, and nothing says in which pass": Planted(fails=lambda c: has(c, *AT), first=FAILURE),
    "the row and token are known": Planted(
        fails=lambda c: has(c, *AT), first=replace(FAILURE, index=7, row=2, token=40), runs=4
    ),
    "a row of n tokens": Planted(fails=lambda c: any(cut.end - cut.first > 48 for cut in c.cuts), tokens=49),
    "two rows together": Planted(fails=lambda c: has(c, 7, 0, 3) and has(c, 7, 3, 60), rows=2, tokens=2 * 58),
    "two files": Planted(fails=lambda c: has(c, 3, 1, 9) and has(c, *AT), files=2, rows=2, tokens=4),
    "a tenth layer": Planted(
        fails=lambda c: has(c, *AT) and (c.spec.actor.num_layers or LAYERS) >= 10, layers=10, runs=44
    ),
    "one option of five": Planted(
        fails=lambda c: c.spec.actor.gradient_checkpointing,
        typed=[
            "--dtype",
            "fp16",
            "--no-packing",
            "--gradient-checkpointing",
            "--attention",
            "eager",
            "--max-norm",
            "1",
        ],
        options=["--gradient-checkpointing"],
    ),
    "two options of five": Planted(
        fails=lambda c: c.spec.actor.gradient_checkpointing and c.spec.actor.dtype == "fp16",
        typed=[
            "--dtype",
            "fp16",
            "--no-packing",
            "--gradient-checkpointing",
            "--attention",
            "eager",
            "--max-norm",
            "1",
        ],
        options=["--dtype", "fp16", "--gradient-checkpointing"],
    ),
    "two ranks of four": Planted(
        fails=lambda c: c.num_processes > 1 and len(c.cuts) >= c.num_processes and has(c, *AT),
        num_processes=4,
        first=replace(FAILURE, index=1),
        files=2,
        rows=2,
        tokens=4,
        processes=2,
    ),
    "tp of four ranks": Planted(
        fails=lambda c: c.spec.actor.parallel.tp == 2 and has(c, *AT),
        num_processes=4,
        typed=["--backend", "fsdp2", "--tp", "2"],
        first=replace(FAILURE, index=3),
        processes=2,
        options=["--tp", "2"],
    ),
    "two files that two data ranks are fed at once, of which the second is the one that fails": Planted(
        fails=lambda c: c.num_processes == 2 and has(c, 6, 0, 3) and has(c, *AT),
        num_processes=2,
        first=replace(FAILURE, index=3, source="7.pkl"),
        files=2,
        rows=2,
        tokens=4,
        processes=2,
    ),
    "no token at all": Planted(fails=lambda c: True, runs=5),
    "memory": Planted(fails=lambda c: num_tokens(c) > 100, rows=2, tokens=102),
}


def shapes_of(num_files: int) -> list[CaptureShape]:
    return [
        CaptureShape(
            num_rows=NUM_ROWS,
            num_columns=LENGTH,
            real=((0, LENGTH), (0, LENGTH), (10, LENGTH), (0, LENGTH)),
            has_values=number == 7,
            name=f"{number}.pkl",
        )
        for number in range(num_files)
    ]


@dataclass(kw_only=True)
class Runs:
    """Answers for the processes, and counts the runs; each refuses what `replay` would."""

    fails: Callable[[Candidate], bool]
    found: ReplayFailure = FAILURE
    most: int = 1000
    tried: list[Candidate] = field(default_factory=list)

    def __call__(self, candidate: Candidate, what: str) -> ReplayFailure | None:
        if candidate not in self.tried:
            if len(self.tried) == self.most:
                raise OutOfRunsError
            self.tried.append(candidate)
        return self.found if self.fails(candidate) else None


def search_of(planted: Planted, runs: Runs) -> MinimiseSearch:
    whole = [Cut(source=n, rows=tuple(range(NUM_ROWS)), first=0, end=LENGTH) for n in range(NUM_FILES)]
    return MinimiseSearch(
        best=Candidate.from_spec(whole, spec_of(planted.typed), planted.num_processes),
        failure=planted.first,
        shapes=shapes_of(NUM_FILES),
        num_layers=LAYERS,
        shows=runs,
    )


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_failure_becomes_as_small_as_it_can(name: str) -> None:
    planted = PLANTED[name]
    runs = Runs(fails=planted.fails, found=replace(planted.first, index=None))
    search = search_of(planted, runs)
    search.run()
    best = search.best
    assert planted.fails(best)
    left = [word for word in best.arguments if not (word == "--num-layers" or word.isdigit())]
    layers = best.spec.actor.num_layers or LAYERS
    rows = sum(len(cut.rows) for cut in best.cuts)
    tokens = sum(len(cut.rows) * (cut.end - cut.first) for cut in best.cuts)
    assert (len(best.cuts), rows, tokens) == (planted.files, planted.rows, planted.tokens)
    assert (layers, best.num_processes) == (planted.layers, planted.processes)
    assert left == [word for word in planted.options if not word.isdigit()]
    assert len(runs.tried) <= planted.runs, len(runs.tried)


@pytest.mark.parametrize("seed", range(30))
def test_what_ddmin_keeps_shows_it_and_no_item_of_it_can_go(seed: int) -> None:
    """Against every subset: some are enough, as are all that hold one of them."""
    draw = random.Random(seed)
    items = list(range(draw.randint(1, 8)))
    enough = [set(draw.sample(items, draw.randint(1, len(items)))) for _ in range(draw.randint(1, 3))]

    def shows(part: Sequence[int]) -> bool:
        assert list(part) == sorted(part), "the order of the files is kept"
        return any(numbers <= {*part} for numbers in enough)

    kept = ddmin(items, shows)
    smaller = [part for size in range(1, len(kept)) for part in combinations(kept, size)]
    assert shows(kept)
    assert not any(shows(part) for part in smaller)


def test_bisection_goes_up_and_down() -> None:
    assert bisect(0, 100, lambda number: number >= 37) == 37
    assert bisect(100, 0, lambda number: number <= 37) == 37


@pytest.mark.parametrize(
    ("succeeds", "fails", "asked"),
    [(0, 1, []), (5, 5, []), (0, 2, [1]), (0, 8, [4, 6, 5]), (8, 0, [4, 2, 3])],
)
def test_bisection_asks_of_the_middle_and_never_of_its_ends(succeeds: int, fails: int, asked: list[int]) -> None:
    numbers: list[int] = []

    def shows(number: int) -> bool:
        numbers.append(number)
        return abs(number - succeeds) > abs(fails - succeeds) / 2

    bisect(succeeds, fails, shows)
    assert numbers == asked


@pytest.mark.parametrize(
    ("items", "enough", "asked"),
    [
        ("a", "a", []),
        ("ab", "a", ["a"]),
        ("ab", "ab", ["a", "b"]),
        # Halves first, then quarters, then what each quarter leaves.
        ("abcd", "ad", ["ab", "cd", "a", "b", "c", "d", "bcd", "acd", "a", "c", "d", "cd", "ad", "a", "d"]),
    ],
)
def test_ddmin_asks_of_parts_and_then_of_what_they_leave(items: str, enough: str, asked: list[str]) -> None:
    parts: list[str] = []

    def shows(part: Sequence[str]) -> bool:
        parts.append("".join(part))
        return {*enough} <= {*part}

    assert "".join(ddmin(items, shows)) == enough
    assert parts == asked


def test_what_was_recorded_of_all_rows_loses_no_row_token_or_layer() -> None:
    first = ReplayFailure(kind=FailureKind.DIFFERS, quantities=("loss",), index=7)
    runs = Runs(fails=lambda c: any(cut.source == 7 for cut in c.cuts), found=first)
    search = search_of(Planted(fails=runs.fails, first=first), runs)
    search.run()
    assert search.best.cuts == (Cut(source=7, rows=tuple(range(NUM_ROWS)), first=0, end=LENGTH),)
    assert search.best.spec.actor.num_layers is None


def test_a_log_prob_that_differs_keeps_the_tokens_before_it() -> None:
    first = ReplayFailure(kind=FailureKind.DIFFERS, quantities=("log-probs",), index=7)
    runs = Runs(fails=lambda c: has(c, *AT), found=first)
    search = search_of(Planted(fails=runs.fails, first=first), runs)
    search.run()
    assert search.best.cuts == (Cut(source=7, rows=(2,), first=10, end=41),)
    assert search.best.spec.actor.num_layers is None


def test_pairs_of_dpo_stay_together() -> None:
    def fails(candidate: Candidate) -> bool:
        if any(len(cut.rows) % 2 for cut in candidate.cuts):
            raise AssertionError("a pair was torn")
        return has(candidate, 7, 3, 5)

    planted = Planted(fails=fails, typed=["--loss", "dpo"], first=replace(FAILURE, index=7, row=3))
    search = search_of(planted, Runs(fails=lambda c: c.spec.measure.loss == "dpo" and fails(c)))
    search.run()
    assert search.best.cuts[0].rows == (1, 3)


def test_what_was_found_is_kept_where_the_runs_end() -> None:
    planted = PLANTED["a token"]
    search = search_of(planted, Runs(fails=planted.fails, most=4))
    with pytest.raises(OutOfRunsError):
        search.run()
    assert planted.fails(search.best)
    assert len(search.best.cuts) == 1


def test_options_that_need_each_other_are_not_tried_apart() -> None:
    """--step needs backward: a candidate that is refused costs no run."""
    candidate = Candidate.from_spec([], spec_of(["--step", "--learning-rate", "0.1", "--save-state", "x"]), 1)
    [step] = [option for option in candidate.changed_options if option.flag == "--step"]
    assert "--step" not in candidate.without_options([step]).arguments
    with pytest.raises(UsageError):
        candidate.with_option("--optimizer", "none")


@pytest.mark.parametrize(("kernel", "name"), [("flash", "sdpa"), ("flex", "eager"), ("eager", "eager")])
def test_a_standalone_script_has_a_kernel_that_its_model_has_on_a_cpu(kernel: str, name: str) -> None:
    """Flex attention is what models without sdpa are trained with."""
    script = format_script(spec_of(["--attention", kernel, "--dtype", "bf16"]), FAILURE, has_weights=False)
    assert f'"{name}"' in next(line for line in script.splitlines() if "attn_implementation" in line)


@pytest.mark.parametrize("names", [["gradient"], ["gradient", "activation"]])
def test_a_standalone_script_checkpoints_under_the_name_that_its_transformers_knows(names: Sequence[str]) -> None:
    """4.57 has the older name alone, and 5.23 warns of it."""
    script = format_script(spec_of(["--gradient-checkpointing", "--dtype", "fp32"]), FAILURE, has_weights=False)
    [begin] = [number for number, line in enumerate(script.splitlines()) if line.startswith("new_name = ")]
    called: list[tuple[str, object]] = []
    methods = {f"{name}_checkpointing_enable": lambda given, name=name: called.append((name, given)) for name in names}
    exec("\n".join(script.splitlines()[begin : begin + 3]), {"model": SimpleNamespace(**methods)})
    assert called == [(names[-1], {"use_reentrant": False})]
