"""What became of a run of parity, and whether it is to be run: made results of processes."""

from dataclasses import replace
from pathlib import Path

import pytest

from replay.agreement.plan import Cell, Role
from replay.agreement.rows import ParityRow, RowState, folder_name_of, judge_child
from replay.campaign.campaign import EndedRun
from replay.options.option_parsing import build_replay_spec
from replay.processes.pool import ProcessResult
from tests.helpers.made_logs import passed, write_log

CELL = Cell(name="fsdp2", role=Role.CELL, spec=build_replay_spec({}), num_processes=1, reference="ref")


@pytest.mark.parametrize(
    ("state", "seconds", "ran_alone", "is_open"),
    [
        (RowState.PENDING, None, True, True),
        (RowState.DONE, 8.0, False, False),
        (RowState.REFUSED, 1.0, False, False),
        # What failed alone failed; beside others, or since its reference did, it may succeed.
        (RowState.FAILED, 8.0, True, False),
        (RowState.FAILED, 8.0, False, True),
        (RowState.FAILED, None, True, True),
    ],
)
def test_a_run_that_may_still_succeed_is_open(
    state: RowState, seconds: float | None, ran_alone: bool, is_open: bool
) -> None:
    assert ParityRow(cell=CELL, state=state, seconds=seconds, ran_alone=ran_alone).is_open is is_open


def end(folder: Path, exit_code: int | None, output: str = "") -> ProcessResult:
    (folder / "output.txt").write_text(output)
    return ProcessResult(exit_code=exit_code, seconds=7.0, output=folder / "output.txt", logs=folder / "logs")


@pytest.mark.parametrize(
    ("exit_code", "has_log", "state"),
    [
        (0, True, RowState.DONE),
        # Some inputs were damaged, and every pass is done.
        (1, True, RowState.DONE),
        (1, False, RowState.FAILED),
        (2, True, RowState.REFUSED),
        (3, True, RowState.FAILED),
        (-9, True, RowState.FAILED),
        (None, True, RowState.FAILED),
    ],
)
def test_a_run_is_done_if_it_left_a_whole_log(
    exit_code: int | None, has_log: bool, state: RowState, tmp_path: Path
) -> None:
    child = end(tmp_path, exit_code, "replay: rank 0: it broke\n")
    log = write_log(child.logs / "20260301-091244-replay", [passed(0, "x")]) if has_log else None
    found, error, folder = judge_child(child)
    assert found is state
    assert folder == (log if state is RowState.DONE else None)
    said = "not finished within 7 s" if exit_code is None else "" if exit_code == 0 else "it broke"
    assert error.startswith(said)
    assert bool(error) is (exit_code != 0)


def test_a_log_that_cannot_be_read_is_told_in_place_of_the_last_line(tmp_path: Path) -> None:
    child = end(tmp_path, 0)
    write_log(child.logs / "20260301-091244-replay", [passed(0, "x")], exit_code=None)
    state, error, folder = judge_child(child)
    assert (state, folder) == (RowState.FAILED, None)
    assert error


def test_a_row_has_what_came_of_its_run(tmp_path: Path) -> None:
    child = end(tmp_path, 0)
    log = write_log(child.logs / "20260301-091244-replay", [passed(0, "x")])
    row = ParityRow(cell=CELL, error="earlier", ran_alone=True)
    ended = EndedRun(position=0, process_result=child, ran_alone=False, is_new=True)
    assert row.after(ended) == replace(row, state=RowState.DONE, error="", seconds=7.0, ran_alone=False, log=log)


def test_a_cells_folder_has_no_character_that_a_shell_reads() -> None:
    assert folder_name_of("edge rows: fsdp2 fp32, env 2: torch 2.13.0") == "edge-rows-fsdp2-fp32-env-2-torch-2.13.0"
