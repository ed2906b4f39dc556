"""Which pass runs once more, and what runs before it, so that its window is as it was."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replay.runlog.records import PassRecord
from replay.runner.reruns import Reruns, find_highest_peak
from tests.helpers.made_records import cost, record
from tests.helpers.made_replays import MadeReplay
from tests.helpers.typed import spec_of

OUT_OF_MEMORY: dict[str, Any] = {"phases": {}, "error": "CUDA out of memory", "error_type": "OutOfMemoryError"}


class WindowReplayer:
    """In the place of a replayer: which passes are in the open window, and which window ended last."""

    def __init__(self, grad_accumulation: int, open_passes: Sequence[int] = ()) -> None:
        self.grad_accumulation = grad_accumulation
        self.open_passes = list(open_passes)
        self.ended: list[list[int]] = []

    @property
    def window(self) -> Any:
        return SimpleNamespace(num_passes_ended=len(self.open_passes))

    def reopen_after_failure(self) -> None:
        pass

    def replay(self, index: int, path: Path, observers: Sequence[Any]) -> tuple[Any, None]:
        self.open_passes.append(int(path.stem))
        if len(self.open_passes) == self.grad_accumulation:
            self.ended.append(self.open_passes)
            self.open_passes = []
        return None, None


def make_reruns(replayer: WindowReplayer, *typed: str, rank: int = 0) -> Reruns:
    spec = MadeReplay.of(spec_of(["--grad-accumulation", str(replayer.grad_accumulation), *typed]))
    parts: dict[str, Any] = {declared.name: None for declared in fields(Reruns)} | {
        "spec": spec,
        "world": SimpleNamespace(rank=rank, world_size=2),
        "inputs": [Path(f"{index}.pkl") for index in range(10)],
        "replayer": replayer,
        "watch": SimpleNamespace(tracker=SimpleNamespace(enter_phase_after_passes=lambda *_: None)),
    }
    return Reruns(**parts)


def make_passes(kinds: str, grad_accumulation: int) -> list[PassRecord]:
    """Passes of two ranks: t trains, r is a rollout, f trains and fails; windows end with a norm."""
    records: list[PassRecord] = []
    num_in_window = 0
    for index, kind in enumerate(kinds):
        num_in_window += kind == "t"
        ends = kind == "t" and num_in_window == grad_accumulation
        num_in_window = 0 if ends else num_in_window
        changes: dict[str, Any] = {"trains": kind != "r", "grad_norm": 1.0 if ends else None}
        changes |= OUT_OF_MEMORY if kind == "f" else {}
        records += [record(index, rank=rank, **changes) for rank in range(2)]
    return records


@pytest.mark.parametrize(
    ("kinds", "index", "before"),
    [
        ("tttttt", 0, []),
        ("tttttt", 2, [0, 1]),
        ("tttttt", 3, []),
        ("tttttt", 4, [3]),
        ("tttttt", 5, [3, 4]),
        ("ttrttrt", 4, []),  # rollouts leave nothing in a window
        ("ttrttrt", 5, [4]),
        ("ttrttrt", 6, [4]),
        ("tttfttt", 5, [4]),  # nor does a pass that failed
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pass_that_runs_once_more_finds_the_window_as_it_was(
    kinds: str, index: int, before: list[int], rank: int
) -> None:
    replayer = WindowReplayer(3)
    make_reruns(replayer, rank=rank).restore_window(make_passes(kinds, 3), index)
    assert (replayer.ended, replayer.open_passes) == ([], before)


def test_a_window_that_the_run_left_open_is_filled_and_ends_first() -> None:
    replayer = WindowReplayer(4, open_passes=[4, 5])
    make_reruns(replayer).restore_window(make_passes("tttttt", 4), 2)
    assert (replayer.ended, replayer.open_passes) == ([[4, 5, 5, 5]], [0, 1])


def test_a_window_that_began_behind_a_shorter_one_begins_there_again() -> None:
    """A window that lacks passes ends without a norm: of the next one its first pass is recorded."""
    replayer = WindowReplayer(3)
    records = [
        replace(one, window=0 if one.index < 2 else 2, result=replace(one.result, grad_norm=None))
        for one in make_passes("ttttt", 3)
    ]
    make_reruns(replayer).restore_window(records, 4)
    assert replayer.open_passes == [2, 3]


@pytest.mark.parametrize("typed", [("--no-backward",), ()])
def test_without_windows_nothing_runs_before(typed: tuple[str, ...]) -> None:
    replayer = WindowReplayer(3 if typed else 1)
    make_reruns(replayer, *typed).restore_window(make_passes("tttt", 3), 2)
    assert (replayer.ended, replayer.open_passes) == ([], [])


def make_peak(index: int, peak: float, fed_tokens: int = 80, **changes: Any) -> PassRecord:
    return record(index, phases={"forward": cost(1.0, peak)}, fed_tokens=fed_tokens, **changes)


@pytest.mark.parametrize(
    ("records", "on_cuda", "on_cpu"),
    [
        ([make_peak(0, 2.0), make_peak(1, 3.0), make_peak(2, 1.0)], 1, 1),
        # On a CPU what a pass frees stays resident, so that of peaks within a hundredth the most tokens count.
        ([make_peak(0, 2.99, 90), make_peak(1, 3.0, 80), make_peak(2, 2.9, 100)], 1, 0),
        # A pass that does not count is taken where none does.
        ([make_peak(0, 9.0, warmup=True), make_peak(1, 3.0), make_peak(2, 4.0)], 2, 0),
        ([make_peak(0, 9.0, warmup=True), make_peak(1, 3.0, warmup=True)], 0, 0),
        # The first pass that ran out is of more interest than any that finished; of another failure nothing is.
        ([make_peak(0, 9.0), record(1, **OUT_OF_MEMORY), record(2, **OUT_OF_MEMORY)], 1, 1),
        ([make_peak(0, 9.0), make_peak(1, 99.0, error="boom", error_type="RuntimeError")], 0, 0),
        ([make_peak(0, 9.0, error="boom", error_type="RuntimeError")], None, None),
        ([make_peak(0, 2.0), make_peak(0, 3.0, rank=1), make_peak(1, 2.5), make_peak(1, 2.5, rank=1)], 0, 0),
    ],
)
def test_the_pass_to_look_at_is_that_with_the_highest_peak(
    records: list[PassRecord], on_cuda: int | None, on_cpu: int | None
) -> None:
    assert (find_highest_peak(records, "cuda"), find_highest_peak(records, "cpu")) == (on_cuda, on_cpu)
