"""A pass that did something for the first time says what, and is not counted; a pass that is always slow is."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from actor_init.declarations.attention import find_attention_form
from actor_init.declarations.attention.kernel_order import LONG
from capture.file_format.actor_config import write_actor_config
from replay.command_line.cli import main
from replay.objective.objective import compute_negated_mean
from replay.runlog.records import FirstUse, PassRecord
from replay.runlog.summary import FIRST_USES, NEW_GRAPH, WARMUP, Statistics, summarize
from replay.runner.first_uses import ExpectedTimes, FirstUses, TritonWatch
from replay.runner.meter import HostInstrument
from replay.runner.observers import FirstUseObserver
from replay.watch.progress import RankPhase, Tracker
from tests.helpers.made_captures import LLAMA, write_pass
from tests.helpers.made_records import cost, record
from tests.helpers.made_time import Clock, at_the_meter
from tests.helpers.read_logs import read_log
from tests.helpers.replaced_parts import replace_stand_in_loss
from tests.helpers.thread_ranks import call_on_ranks

CPU = torch.device("cpu")
LOSS = """
import ctypes, importlib, sys, torch
from pathlib import Path

calls = 0

def loss(inputs):
    global calls
    calls += 1
    value = -inputs.log_probs_BA[inputs.action_mask_BA].mean()
    if calls == 2:
        torch._dynamo.reset()
        torch.compile(lambda x: x * 2, backend="eager")(value.detach())
    if calls == 3:
        ctypes.CDLL(str(Path(__file__).with_name("planted.so")))
    if calls == 4:
        sys.path.append(str(Path(__file__).parent))
        importlib.import_module("planted_module")
    return value
"""


def write_captures(folder: Path, lengths: Sequence[int], num_rows: Sequence[int] = (2,)) -> Path:
    for step, length in enumerate(lengths):
        rows = num_rows[step % len(num_rows)]
        write_pass(folder, step=step, num_rows=rows, length=length, num_real=length, num_actions=1, vocabulary=64)
    write_actor_config(folder, LLAMA, "tiny")
    return folder


def replay_captures(folder: Path, logs: Path, *typed: str) -> tuple[list[PassRecord], Statistics]:
    assert main(["--inputs", str(folder), "--backend", "ddp", "--log-folder", str(logs), *typed]) == 0
    (log,) = logs.iterdir()
    records = read_log(log)[1]
    return records, summarize(records)


@pytest.mark.usefixtures("one_world")
def test_planted_first_uses_are_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loss.py").write_text(LOSS)
    (tmp_path / "planted_module.py").write_text("")
    (tmp_path / "planted.so").write_bytes(Path(sys.modules["_ctypes"].__file__ or "").read_bytes())
    folder = write_captures(tmp_path / "captures", [10, 11, 12, 13, 14])
    records, statistics = replay_captures(folder, tmp_path / "logs", "--loss", f"{tmp_path / 'loss.py'}:loss")
    assert FirstUse.COMPILED in records[1].first_uses
    assert records[2].first_uses == [FirstUse.LIBRARY]
    assert records[3].first_uses == [FirstUse.IMPORT]
    assert records[4].first_uses == []
    assert statistics.left_out == {WARMUP: 1, NEW_GRAPH: 1, "loaded a library": 1, "imported a module": 1}
    assert statistics.slowest is not None
    assert statistics.slowest.index == 4
    said = capsys.readouterr().out
    assert "1 loaded a library, 1 imported a module" in said
    assert [line.split()[-1] for line in said.splitlines() if line.startswith(("   3  ", "   4  "))] == [
        "library",
        "import",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("one_world")
@pytest.mark.parametrize("rows", [(1, 2, 3), (2, 1, 3)], ids=str)
def test_forty_lengths_are_three_graphs_and_none_that_compiled_counts(
    rows: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo makes constants of the first pass's 1s, and of what is 1 later: one document, a multiple of one length."""
    torch.compiler.reset()
    # Dynamo makes the same graphs for the eager backend, and inductor would take minutes.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    folder = write_captures(tmp_path / "captures", [2 + 7 * step % 41 for step in range(40)], rows)
    records, statistics = replay_captures(folder, tmp_path / "logs", "--compile")
    assert len({record.input.fed_tokens for record in records}) > 30
    assert records[0].compilation.new_graphs > 0
    assert sum(record.compilation.new_graphs for record in records[1:]) <= 2
    compiled = [record for record in records if record.compilation.new_graphs or record.first_uses]
    assert statistics.num_counted == len(records) - len({0, *(record.index for record in compiled)})


class WaitingDevice(HostInstrument):
    """A device that waits for its host, as a GPU does while a kernel is looked for."""

    is_asynchronous = True

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def mark(self) -> float:
        return self.clock.now


@pytest.mark.usefixtures("one_world")
@pytest.mark.parametrize("typed", [[], ["--step"]], ids=" ".join)
def test_slow_once_is_no_measurement_and_always_slow_is_one(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, lengths, seen = at_the_meter(monkeypatch, WaitingDevice), [10, 11, 12, 13, 14], set[int]()
    slow_lengths = {12, 14}

    def loss(log_probs_BA: Tensor, inputs: Any) -> Tensor:
        length = inputs.input_ids.numel() // 2
        is_first = length not in seen
        seen.add(length)
        clock.now += 8.0 if length in slow_lengths and (length == 14 or is_first) else 1.0
        return compute_negated_mean(log_probs_BA, inputs)

    phases: list[RankPhase] = []
    enter_phase = Tracker.enter_phase

    def note_phase(tracker: Tracker, phase: RankPhase) -> None:
        phases.append(phase)
        enter_phase(tracker, phase)

    monkeypatch.setattr(Tracker, "enter_phase", note_phase)
    replace_stand_in_loss(monkeypatch, loss)
    folder = write_captures(tmp_path / "captures", lengths)
    records, statistics = replay_captures(folder, tmp_path / "logs", "--no-noise-floor", *typed)
    assert [record.first_uses for record in records[1:]] == [[], [FirstUse.ONCE], [], []]
    assert [record.cost.seconds_again for record in records] == [None, 1.0, 1.0, None, 8.0]
    assert (phases.count(RankPhase.RERUNNING), phases.count(RankPhase.SEARCHING_NON_FINITE)) == (3, 0)
    assert statistics.left_out == {WARMUP: 1, "slow only once": 1}
    assert statistics.slowest is not None
    assert (statistics.slowest.index, statistics.slowest.value) == (4, 8.0)

    slow_lengths.clear()
    never, _ = replay_captures(folder, tmp_path / "never", "--no-noise-floor", *typed)
    assert [record.cost.seconds_again for record in never] == [None, 1.0, None, None, None]
    numbers = [(record.result.loss, record.result.row_log_probs, record.result.grad_norm) for record in records]
    assert numbers == [(record.result.loss, record.result.row_log_probs, record.result.grad_norm) for record in never]


@pytest.mark.parametrize("use", FirstUse)
def test_each_first_use_has_its_reason(use: FirstUse) -> None:
    statistics = summarize([record(0), record(1, forward=99.0, first_uses=[use.value]), record(2)])
    assert statistics.left_out == {FIRST_USES[use]: 1}
    assert statistics.slowest is not None
    assert statistics.slowest.index != 1


def test_a_first_use_that_a_later_release_may_name_is_left_out_too() -> None:
    assert summarize([record(0), record(1, first_uses=["warp"])]).left_out == {"warp": 1}


@pytest.mark.parametrize("has_knobs", [True, False])
def test_triton_kernels_and_autotuning_are_counted(has_knobs: bool) -> None:
    """By its hooks of today (`triton.knobs`) and of before 3.4 (`JITFunction.compiled_hook`); an earlier hook stays."""
    called: list[str] = []

    class Autotuner:
        def _bench(self, config: str) -> str:
            return config

    class JITFunction:
        compiled_hook: Any = None

    runtime = SimpleNamespace(jit_post_compile_hook=lambda **named: called.append(named["key"]))
    modules = {
        "triton.runtime.autotuner": SimpleNamespace(Autotuner=Autotuner),
        "triton.runtime.jit": SimpleNamespace(JITFunction=JITFunction),
    } | ({"triton.knobs": SimpleNamespace(runtime=runtime)} if has_knobs else {})
    uses = FirstUses(CPU, TritonWatch(modules))
    uses.begin()
    assert uses.end() == []
    uses.begin()
    if has_knobs:
        runtime.jit_post_compile_hook(key="a")
        assert called == ["a"]
    else:
        JITFunction.compiled_hook(key="a")
    assert uses.end() == [FirstUse.TRITON]
    uses.begin()
    assert Autotuner()._bench(config="b") == "b"
    assert uses.end() == [FirstUse.AUTOTUNED]


@pytest.mark.usefixtures("one_world")
def test_a_length_that_is_new_to_cudnns_attention_is_a_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = partial(FirstUseObserver, kernel="packed_cudnn")
    monkeypatch.setattr("replay.runner.replayer.FirstUseObserver", lambda device, _: counter(device))
    folder = write_captures(tmp_path / "captures", [10, 11, 10, 11, 12, 12])
    records, statistics = replay_captures(folder, tmp_path / "logs", "--no-noise-floor")
    marked = [record.index for record in records if FirstUse.PLAN in record.first_uses]
    assert marked == [0, 1, 4]
    assert statistics.left_out == {WARMUP: 1, FIRST_USES[FirstUse.PLAN]: 2}


@pytest.mark.parametrize(
    ("kernel", "lengths", "calls"),
    [
        ("packed_cudnn", [5, 1, 7, 5], {(1, 5), (1, 7)}),
        ("padded_cudnn", [], {(2, 5000)}),
        ("packed_fa2_or_cudnn", [5000], {(1, 5000)}),
        ("packed_fa2_or_cudnn", [2500, 2500], set()),
        ("ring_fa2_or_cudnn", [5000], set()),
    ],
)
def test_what_cudnns_attention_is_called_for(kernel: str, lengths: list[int], calls: set[tuple[int, int]]) -> None:
    planned = find_attention_form(kernel).plan_calls
    assert planned is not None
    assert planned(1 if lengths else 2, 5000, lengths) == calls


@pytest.mark.parametrize("kernel", ["packed_fa2", "sdpa"])
def test_other_kernels_plan_nothing(kernel: str) -> None:
    assert find_attention_form(kernel).plan_calls is None


def test_a_short_row_of_one_document_is_not_for_cudnn() -> None:
    planned = find_attention_form("packed_fa2_or_cudnn").plan_calls
    assert planned is not None
    assert planned(1, LONG - 1, [LONG - 1]) == set()


def test_a_ring_calls_cudnn_for_what_is_long_on_each_rank() -> None:
    planned = find_attention_form("ring_fa2_or_cudnn").plan_calls
    assert planned is not None
    assert planned(1, 9000, [18000]) == {(1, 9000)}


def test_a_pass_that_failed_leaves_its_plan_to_the_next() -> None:
    uses = FirstUses(CPU)
    uses.begin([1])
    uses.begin([1])
    assert uses.end() == [FirstUse.PLAN]
    uses.begin([1])
    assert uses.end() == []


@pytest.mark.parametrize(
    ("second_run", "is_once", "expected"),
    [((1.0, 2.0), True, 2.0), ((2.0, 1.0), True, 2.0), ((1.0, 8.0), False, 8.0), ((20.0, 1.0), False, 9.0)],
)
def test_ranks_expect_of_a_pass_what_its_second_run_took_on_the_slowest(
    second_run: tuple[float, float], is_once: bool, expected: float
) -> None:
    """Otherwise a rank would run a later pass again, and the others would not."""
    # The first run took 9 s on a rank, since its host held it up.
    rank_records = [
        record(0, forward=seconds, phases={"forward": cost(seconds), "backward": cost(0.5)}, rank=rank)
        for rank, seconds in enumerate((0.5, 8.5))
    ]

    def run_on_rank(world: Any) -> tuple[Any, ...]:
        """Return what the second run took here, whether the pass was slow once, and what later passes are held to."""
        times = ExpectedTimes()
        found = times.learn_second_run(rank_records[world.rank], second_run[world.rank], rank_records, world)
        fed_tokens = rank_records[world.rank].input.fed_tokens
        expected_seconds = [times.expect_seconds(has_backward, fed_tokens) for has_backward in (False, True)]
        return found.cost.seconds_again, FirstUse.ONCE.value in found.first_uses, expected_seconds

    results = call_on_ranks(run_on_rank, [CPU] * 2)
    assert results == [(seconds, is_once, [None, expected]) for seconds in second_run]


def make_rank_records(
    seconds: float,
    tokens: int = 80,
    *,
    host_shares: Sequence[float] = (0.8,),
    has_backward: bool = True,
    **changes: Any,
) -> list[PassRecord]:
    """A pass of `seconds` on each rank; its host launches kernels for a share of them."""
    names = ("forward", "backward") if has_backward else ("forward",)
    return [
        record(
            9,
            phases={
                name: replace(cost(seconds / len(names)), host_seconds=share * seconds / len(names)) for name in names
            }
            # A step is not run again, so its seconds tell nothing.
            | {"step": replace(cost(50.0), host_seconds=50.0)},
            fed_tokens=tokens,
            rank=rank,
            **changes,
        )
        for rank, share in enumerate(host_shares)
    ]


def learn_three_passes() -> ExpectedTimes:
    times = ExpectedTimes()
    times.learn(make_rank_records(1.0, 80))
    times.learn(make_rank_records(9.0, 40), second_run_seconds=2.0)
    times.learn(make_rank_records(1.5, 80))
    # None of these counts.
    times.learn(make_rank_records(99.0, 80, warmup=True))
    times.learn(make_rank_records(99.0, 80, first_uses=["compiled"]))
    return times


@pytest.mark.parametrize(
    ("tokens", "most"),
    [
        (40, 3.0),  # 2 s for as many tokens
        (20, 3.0),  # fewer tokens may take as long
        (80, 6.0),  # twice the tokens of the slowest pass, twice its seconds
        (160, 12.0),
    ],
)
def test_a_pass_is_slow_beyond_the_most_that_passes_so_far_let_expect(tokens: int, most: float) -> None:
    times = learn_three_passes()
    assert times.is_unexpectedly_slow(make_rank_records(most + 0.01, tokens))
    assert not times.is_unexpectedly_slow(make_rank_records(most - 0.01, tokens))


@pytest.mark.parametrize(
    ("changes", "is_slow"),
    [
        ({}, True),
        ({"host_shares": (0.1, 0.8)}, True),  # one rank's host holds up all
        ({"host_shares": (0.79, 0.1)}, False),
        ({"warmup": True}, False),
        ({"traced": True}, False),
        ({"first_uses": ["compiled"]}, False),
        ({"new_graphs": 1}, False),
        ({"error": "boom"}, False),
    ],
    ids=str,
)
def test_only_a_pass_that_would_count_and_waited_for_its_host_is_run_again(
    changes: dict[str, Any], is_slow: bool
) -> None:
    assert learn_three_passes().is_unexpectedly_slow(make_rank_records(60.0, **changes)) is is_slow


def test_passes_without_a_backward_are_held_to_their_own_times() -> None:
    times = learn_three_passes()
    # Of the first such pass nothing is expected.
    assert times.is_unexpectedly_slow(make_rank_records(0.1, has_backward=False))
    times.learn(make_rank_records(0.1, has_backward=False))
    assert not times.is_unexpectedly_slow(make_rank_records(0.14, has_backward=False))
    assert times.is_unexpectedly_slow(make_rank_records(0.16, has_backward=False))
    assert not times.is_unexpectedly_slow(make_rank_records(5.0))
