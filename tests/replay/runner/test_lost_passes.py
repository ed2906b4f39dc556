"""A pass that fails in an accumulation window leaves later windows the job's, and the rest of its own makes no step.

About 10 seconds: a recording in this process, and replays of it.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from capture import recording
from capture.file_format.micro_batch import CaptureError
from replay.command_line.cli import main
from replay.runlog.records import PassRecord, ResultSection, parse_line
from replay.runner.accumulation_window import AccumulationWindow
from replay.runner.generator_observer import RandomDrawCounter
from replay.runner.replayer import Replayer
from replay.runner.run_pass import prepare_actor_inputs
from replay.verdict.pass_windows import group_into_windows
from tests.helpers.made_records import record
from tests.helpers.replaced_parts import replace_layout
from tests.trainers.common import make_batches, make_model

SIZE, NUM_STEPS = 3, 3


class CountingBackend:
    """Counts the passes of a window as an engine does, and holds the passes whose gradients it has."""

    def __init__(self) -> None:
        self.count = 0
        self.gradients: list[int] = []

    def skip_passes(self, num_passes: int) -> None:
        self.count += num_passes


@pytest.mark.parametrize("lost", range(2 * SIZE))
@pytest.mark.parametrize("is_run", [False, True])
def test_the_windows_behind_a_lost_pass_are_as_without_it(lost: int, is_run: bool) -> None:
    """Where a pass failed as it ran, a new backend follows; else one where only a new one is rid of a gradient."""
    window, backend = AccumulationWindow(grad_accumulation=SIZE), CountingBackend()
    ends: dict[int, tuple[int, list[int], bool]] = {}
    for index in range(3 * SIZE):
        begins_anew = is_run
        if index != lost or is_run:
            window.begin_pass(index, {}, {}, backend)  # type: ignore[arg-type]
        if index == lost:
            begins_anew |= window.count_failed_pass(index)
            if begins_anew:
                backend = CountingBackend()
                window.reset_for_new_backend()
            continue
        is_last = window.ends_with_this_pass(runs_backward=True)
        assert is_last is ((backend.count + 1) % SIZE == 0)
        backend.gradients.append(index)
        backend.count += 1
        if is_last:
            ends[index] = window.first_index, backend.gradients, window.is_incomplete
            backend.gradients = []
        window.count_pass(runs_backward=True)
    whole = {
        last: list(range(last - SIZE + 1, last + 1)) for last in (2, 5, 8) if lost not in range(last - 2, last + 1)
    }
    assert {last: gradient for last, (_, gradient, is_incomplete) in ends.items() if not is_incomplete} == whole
    assert all(first == last - SIZE + 1 for last, (first, _, _) in ends.items())


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_pass_that_failed_after_it_ran_is_counted_once_and_has_its_window_too(is_counted: bool) -> None:
    window = AccumulationWindow(grad_accumulation=SIZE)
    window.begin_pass(3, {}, {}, CountingBackend())  # type: ignore[arg-type]
    if is_counted:
        window.count_pass(runs_backward=True)
    replayer = SimpleNamespace(
        window=window,
        spec=SimpleNamespace(measure=SimpleNamespace(backward=True)),
        step_follower=SimpleNamespace(stop_following_steps=lambda why: None),
        _is_pass_counted=is_counted,
        _must_reopen=False,
    )
    failed = Replayer.count_failed_pass(cast(Any, replayer), record(3))
    assert (failed.window, window.num_passes_ended, window.is_incomplete) == (3, 1, not is_counted)


@pytest.mark.parametrize("size", [1, 2, SIZE])
def test_a_window_whose_passes_all_fail_leaves_no_gradient(size: int) -> None:
    """Whatever the window before it held: no new backend is needed, in which trained weights would be lost."""
    window, backend = AccumulationWindow(grad_accumulation=size), CountingBackend()
    for index in range(size):
        window.begin_pass(index, {}, {}, backend)  # type: ignore[arg-type]
        window.count_pass(runs_backward=True)
    assert not any(window.count_failed_pass(index) for index in range(size, 2 * size))
    window.begin_pass(2 * size, {}, {}, backend)  # type: ignore[arg-type]
    assert window.first_index == 2 * size


def test_passes_are_grouped_by_the_windows_of_their_records() -> None:
    norms, windows = {2: 1.0, 8: 1.0}, [index // SIZE * SIZE for index in range(9) if index != 5]
    records = [record(index, grad_norm=norms.get(index)) for index in range(9) if index != 5]
    passes = [
        SimpleNamespace(record=replace(each, window=window)) for each, window in zip(records, windows, strict=True)
    ]
    found = [[member.record.index for member in window] for window in group_into_windows(passes)]
    assert found == [[0, 1, 2], [3, 4], [6, 7, 8]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A job whose rate is 0, so that each of its steps can be judged; and the norms of its gradients."""
    folder, norms = tmp_path_factory.mktemp("job"), []
    model: Any = make_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    with recording(model, folder / "captures", reproduce=True):
        batches = iter(make_batches(SIZE * NUM_STEPS))
        for _ in range(NUM_STEPS):
            for _ in range(SIZE):
                (model(**next(batches)).loss / SIZE).backward()
            norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])))
            optimizer.step()
            optimizer.zero_grad()
    return folder, norms


def replay(job: Path, logs: Path, *flags: str) -> tuple[list[PassRecord], Any]:
    assert (
        main(["--inputs", str(job / "captures"), "--model", str(job / "model"), "--log-folder", str(logs), *flags]) == 1
    )
    [folder] = logs.iterdir()
    lines = (folder / "rank0.jsonl").read_text().splitlines()
    return [parse_line(line, source="log") for line in lines], json.loads((folder / "run.json").read_text())["verdict"]


@pytest.mark.usefixtures("one_world", "proofs_once")
@pytest.mark.parametrize(
    ("flags", "lost"), [(("--zero-stage", "1"), 4), (("--zero-stage", "3"), 5), (("--backend", "ddp"), 3)]
)
def test_later_steps_are_judged_where_a_pass_cannot_be_laid_out(
    flags: tuple[str, ...], lost: int, job: tuple[Path, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lay_out_others(batch: Any, *arguments: Any) -> Any:
        if batch.origin.step == lost:
            raise CaptureError(batch.origin.source, ": cannot be laid out")
        return prepare_actor_inputs(batch, *arguments)

    replace_layout(monkeypatch, lay_out_others)
    records, verdict = replay(job[0], tmp_path, "--no-step", *flags)
    assert [each.window for each in records] == [0] * 3 + [3] * 3 + [6] * 3
    norms = {each.index: each.result.grad_norm for each in records if each.result.grad_norm is not None}
    assert norms == {2: pytest.approx(job[1][0], rel=1e-4), 8: pytest.approx(job[1][2], rel=1e-4)}
    assert [(window["index"], window["outcome"]) for window in verdict["windows"]] == [
        (2, "REPRODUCED"),
        (5, "CANNOT TELL"),
        (8, "REPRODUCED"),
    ]


@pytest.mark.usefixtures("one_world", "proofs_once")
def test_a_pass_that_failed_after_its_results_were_collected_has_none_of_them(
    job: tuple[Path, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("the draws cannot be counted")

    monkeypatch.setattr(RandomDrawCounter, "add_counts", fail)
    [failed], _ = replay(job[0], tmp_path / "logs", "--backend", "ddp", "--max-inputs", "1")
    assert (failed.error, failed.result) == ("the draws cannot be counted", ResultSection())


@pytest.mark.usefixtures("one_world", "proofs_once")
def test_what_is_left_of_two_steps_makes_no_step_together(job: tuple[Path, list[float]], tmp_path: Path) -> None:
    shutil.copytree(job[0], tmp_path / "job")
    captures = sorted((tmp_path / "job" / "captures").glob("*.pkl"))
    for number in (1, 4):
        captures[number].write_bytes(b"damaged")
    records, _ = replay(tmp_path / "job", tmp_path / "logs", "--step", "--learning-rate", "0.01")
    # First the whole step; then what is left of the first, which ends without a step; the rest is cut short.
    assert [each.window for each in records] == [0] * 3 + [3] * 2 + [5] * 2
    assert [each.index for each in records if each.result.has_stepped] == [2]
    assert [each.index for each in records if each.result.grad_norm is not None] == [2]
