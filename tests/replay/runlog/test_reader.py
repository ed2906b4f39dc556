"""What is read of a log: its passes and gradient windows, their partners in another log, and what the log lacks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actor_init.spec import UsageError
from replay.runlog.reader import (
    PastRun,
    describe_missing_passes,
    find_run_folder,
    group_passes_and_windows,
    match_by_key,
    read_lines,
    read_lines_so_far,
    read_records,
    read_run_below,
)
from replay.runlog.records import PassRecord
from replay.runlog.run_file import RunFailure, RunFile
from replay.runlog.summary import summarize
from tests.helpers.made_logs import passed, write_log
from tests.helpers.made_records import record


def make_ranks(
    index: int, names: str, norm: float | None = None, *, peers: int = 1, **changes: Any
) -> list[PassRecord]:
    """A pass on an input a data rank; `peers` ranks share each."""
    return [
        record(
            index,
            source=name,
            rank=data_rank * peers + peer,
            data_rank=data_rank,
            grad_norm=norm,
            row_log_probs=[],
            **changes,
        )
        for data_rank, name in enumerate(names)
        for peer in range(peers)
    ]


def test_a_window_has_the_inputs_of_all_data_ranks_since_the_last_norm_and_a_norm_of_each_rank() -> None:
    records = [
        *make_ranks(0, "db", peers=2),
        *make_ranks(1, "xy", peers=2, trains=False),  # a rollout is in no window
        *make_ranks(2, "ca", 0.5, peers=2),
        *make_ranks(3, "ef", 0.25, peers=2),
        *make_ranks(4, "gh", peers=2),
    ]
    passes, windows = group_passes_and_windows(records)
    assert [(one.source, len(one.peers), one.num_windows_before) for one in passes] == [
        *(("d", 2, 0), ("b", 2, 0), ("x", 2, 0), ("y", 2, 0), ("c", 2, 0), ("a", 2, 0)),
        *(("e", 2, 1), ("f", 2, 1), ("g", 2, 2), ("h", 2, 2)),
    ]
    assert [(window.inputs, window.norms, window.last_pass, window.index) for window in windows] == [
        (("a", "b", "c", "d"), [0.5] * 4, 5, 2),
        (("e", "f"), [0.25] * 4, 7, 3),
    ]
    assert [window.name for window in windows] == ["a and 3 more", "e and 1 more"]


def test_what_a_window_without_a_norm_held_is_in_no_later_one() -> None:
    records = [
        *make_ranks(0, "a", window=0),
        *make_ranks(1, "b", window=1),  # the window of a ended without a step
        *make_ranks(2, "c", 0.5, window=1),
    ]
    _, [window] = group_passes_and_windows(records)
    assert window.inputs == ("b", "c")


def test_a_pass_counts_if_it_counts_on_every_rank() -> None:
    records = [*make_ranks(0, "ab"), *make_ranks(1, "cd")]
    records[1] = record(0, source="b", rank=1, data_rank=1, warmup=True)
    passes, _ = group_passes_and_windows(records)
    assert [one.is_counted for one in passes] == [False, False, True, True]


def test_values_with_one_key_pair_up_in_their_order_and_others_have_no_partner() -> None:
    pairs = match_by_key(["a1", "b1", "a2", "c1", "a3"], ["c2", "a4", "d1", "a5"], key=lambda value: value[0])
    assert pairs == [("a1", "a4"), ("a2", "a5"), ("c1", "c2")]


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    records = [passed(index, "ab"[rank], rank=rank) for index in range(3) for rank in range(2)]
    return write_log(tmp_path / "logs" / "20260301-000000-replay", records, typed="--uneven no")


def test_records_come_by_pass_and_rank_whichever_file_is_read_first(two_ranks: Path) -> None:
    expected = [(index, rank) for index in range(3) for rank in range(2)]
    assert [(one.index, one.rank) for one in read_records(two_ranks)] == expected
    folder, run, records = read_run_below(two_ranks.parent)
    assert (folder, run and run.exit_code, len(records)) == (two_ranks, 0, 6)
    assert [(one.index, one.rank) for one in PastRun.read(two_ranks).records] == expected
    assert read_run_below(two_ranks) == (None, None, [])


def cut_last_line(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def test_a_line_that_is_cut_short_is_passed_over_said_or_refused(two_ranks: Path) -> None:
    path = two_ranks / "rank1.jsonl"
    cut_last_line(path, 5)
    assert [(one.index, one.rank) for one in read_records(two_ranks)][-1] == (2, 0)
    records, wrong = read_lines_so_far(path)
    assert ([one.index for one in records], wrong) == ([0, 1], "rank1.jsonl is cut short in line 3")
    with pytest.raises(UsageError, match=rf"^{path} is cut short in line 3\. Try: replay -x, again$"):
        read_lines(path, "replay -x")
    whole = two_ranks / "rank0.jsonl"
    assert (len(read_lines(whole, "replay")), read_lines_so_far(whole)[1]) == (3, None)


def test_a_damaged_line_is_named_by_its_number(two_ranks: Path) -> None:
    path = two_ranks / "rank0.jsonl"
    first, _, third = path.read_text().splitlines()
    path.write_text(f"{first}\n{{}}\n{third}\n")
    records, wrong = read_lines_so_far(path)
    assert len(records) == 1
    assert wrong is not None
    assert wrong.startswith("rank0.jsonl is damaged in line 2")
    with pytest.raises(UsageError, match=r"rank0\.jsonl is damaged in line 2.*Try: replay -x, again$"):
        read_lines(path, "replay -x")
    with pytest.raises(UsageError, match=r"rank9\.jsonl cannot be read: .*Try: replay -x, again$"):
        read_lines(two_ranks / "rank9.jsonl", "replay -x")


@pytest.mark.parametrize(
    ("typed", "num_ranks", "exit_code", "num_lines", "lack"),
    [
        ("", 1, 0, 3, None),
        ("", 1, 0, 2, "is cut short: it has 2 of 3 passes"),
        ("", 2, 0, 2, "is cut short: it has 2 of 3 passes"),
        # With --uneven some ranks have fewer, but none has more; of one rank there is no other.
        ("--uneven yes", 2, 0, 2, None),
        ("--uneven yes", 1, 0, 2, "is cut short: it has 2 of 3 passes"),
        ("--uneven yes", 2, 0, 4, "is cut short: it has 4 of 3 passes"),
        # A run with a failed pass went through all of them; one that was interrupted did not.
        ("", 1, 1, 2, "is cut short: it has 2 of 3 passes"),
        ("", 1, 130, 2, None),
        ("", 1, None, 2, None),
    ],
)
def test_a_log_lacks_what_a_run_that_went_through_should_have(
    typed: str, num_ranks: int, exit_code: int | None, num_lines: int, lack: str | None, tmp_path: Path
) -> None:
    records = [passed(index, "a", rank=rank) for index in range(3) for rank in range(num_ranks)]
    folder = write_log(tmp_path / "log", records, typed=typed, exit_code=exit_code)
    assert describe_missing_passes(RunFile.read(folder), num_lines) == lack


@pytest.mark.parametrize(
    ("runs", "named", "says"),
    [
        (["x"], "x", None),
        (["x"], "", None),
        ([], "", "holds no run (no run.json)"),
        (["b", "a"], "", "holds 2 runs. Name one of them, such as {logs}/b"),
        (["runs/1/a", "runs/2/b"], "", "holds no run of its own (no run.json), but {logs}/runs/2/b is one. Give that"),
        (["x", "runs/1/a"], "", None),
    ],
)
def test_a_folder_names_its_only_run(runs: Sequence[str], named: str, says: str | None, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in runs:
        (logs / name).mkdir(parents=True)
        (logs / name / "run.json").write_text("{}")
    if says is None:
        assert find_run_folder(logs / named) == logs / "x"
    else:
        with pytest.raises(UsageError) as refusal:
            find_run_folder(logs / named)
        assert says.format(logs=logs) in str(refusal.value)


def test_a_run_without_a_pass_and_a_damaged_run_file_are_refused(two_ranks: Path, tmp_path: Path) -> None:
    empty = write_log(tmp_path / "empty", [record(0)])
    (empty / "rank0.jsonl").write_text("")
    run = RunFile.read(empty)
    assert run.end is not None
    replace(run, end=replace(run.end, statistics=summarize([]))).write(empty)
    with pytest.raises(UsageError, match=r"no pass was replayed\. Try: replay with other inputs"):
        PastRun.read(empty)
    whole = RunFile.read(two_ranks)
    for damaged, missing in (
        (replace(whole, start=None), "devices is"),
        (replace(whole, end=None), "statistics is"),
    ):
        damaged.write(two_ranks)
        with pytest.raises(UsageError, match=f"is damaged: {missing} missing. Try: replay"):
            PastRun.read(two_ranks)
        assert describe_missing_passes(RunFile.read(two_ranks), 2) is None
    assert describe_missing_passes(replace(whole, failure=RunFailure(kind="died")), 2) is None


def test_the_passes_of_each_rank_are_there_one_by_one(two_ranks: Path) -> None:
    path = two_ranks / "rank1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for kept, says in (
        ([0, 1], "is cut short: it has 2 of 3 passes"),
        ([0, 2], "one by one"),
        ([0, 1, 1], "one by one"),
    ):
        path.write_text("".join(lines[number] for number in kept))
        with pytest.raises(UsageError, match=rf"rank1\.jsonl (does not hold the passes of rank 1 )?{says}"):
            PastRun.read(two_ranks)


@pytest.mark.parametrize(
    ("typed", "chosen", "loss"),
    [
        ("", "sft", "sft"),
        ("", "stand-in", "stand-in"),
        ("--loss sft", "stand-in", "sft"),
        ("--loss stand-in", "sft", "stand-in"),
    ],
)
def test_the_loss_is_what_was_typed_or_what_the_run_chose(typed: str, chosen: str, loss: str, tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log", [passed(0, "a")], typed=typed, chosen_loss=chosen)
    assert PastRun.read(folder).measure.loss == loss


def test_of_several_runs_below_a_folder_the_first_is_read(tmp_path: Path) -> None:
    for name, number in (("20260301-000000-replay", 1), ("20260302-000000-replay", 2)):
        write_log(tmp_path / name, [passed(index, "a") for index in range(number)])
    folder, run, records = read_run_below(tmp_path)
    assert folder == tmp_path / "20260301-000000-replay"
    assert (run is not None, len(records)) == (True, 1)


def test_a_window_of_one_input_has_its_name() -> None:
    _, [window] = group_passes_and_windows(make_ranks(0, "a", 0.5))
    assert window.name == "a"


def test_the_first_pass_that_failed_on_any_rank_is_why_runs_are_not_compared(tmp_path: Path) -> None:
    boom: dict[str, Any] = {"error": "boom", "error_type": "ValueError"}
    records = [
        *(passed(0, "a", rank=rank) for rank in range(2)),
        *(passed(1, "b", rank=rank, **(boom if rank else {})) for rank in range(2)),
        *(passed(2, "c", rank=rank, **boom) for rank in range(2)),
    ]
    folder = write_log(tmp_path / "log", records, exit_code=1)
    with pytest.raises(UsageError, match=r"pass 2 failed on rank 1 \(b\.pkl: ValueError: boom\)"):
        PastRun.read(folder)


@pytest.mark.parametrize(
    ("failure", "where"),
    [
        (RunFailure(kind="died", rank=0), " on rank 0"),
        (RunFailure(kind="failed", rank=3), " on rank 3"),
        (RunFailure(kind="terminated"), ""),
    ],
)
def test_a_run_that_broke_off_is_not_read_and_the_rank_is_named(
    failure: RunFailure, where: str, two_ranks: Path
) -> None:
    run = RunFile.read(two_ranks)
    replace(run, failure=failure).write(two_ranks)
    with pytest.raises(UsageError, match=rf"^{two_ranks}: the run broke off{where}, see {two_ranks}/failure\.txt\. "):
        PastRun.read(two_ranks)


@pytest.mark.parametrize(
    ("exit_code", "says"),
    [(None, "it has no end, so the run goes on or was killed"), (130, "the run was interrupted")],
)
def test_a_log_without_its_end_is_not_read(exit_code: int | None, says: str, tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log", [passed(0, "a")], exit_code=exit_code)
    with pytest.raises(UsageError, match=f"the log is cut short: {says}. Try: replay"):
        PastRun.read(folder)


@pytest.mark.parametrize(
    ("typed", "has_stepped", "steps"),
    [("--step on", False, True), ("--step off", False, False), ("--step auto", True, True)],
)
def test_whether_a_run_stepped_is_told_by_what_was_typed_or_by_any_pass(
    typed: str, has_stepped: bool, steps: bool, tmp_path: Path
) -> None:
    records = [passed(index, "a", has_stepped=has_stepped and index == 1) for index in range(3)]
    assert PastRun.read(write_log(tmp_path / "log", records, typed=typed)).measure.steps is steps


@pytest.mark.parametrize(("typed", "num_data_ranks"), [("", 4), ("--tp 2", 2), ("--ring 2", 2), ("--tp 2 --ring 2", 1)])
def test_peers_of_tp_and_ring_are_one_data_rank(typed: str, num_data_ranks: int, tmp_path: Path) -> None:
    backend = "--backend fsdp2 " if typed else ""
    folder = write_log(tmp_path / "log", [passed(0, "a", rank=rank) for rank in range(4)], typed=backend + typed)
    assert PastRun.read(folder).num_data_ranks == num_data_ranks
