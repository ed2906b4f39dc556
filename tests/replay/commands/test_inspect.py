"""What `replay inspect` finds in a folder."""

import fcntl
import io
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import capture.black_box.flight_recorder
from actor_init.spec import UsageError
from capture import capture_files, recording
from capture.black_box.flight_recorder import find_dead_spools
from capture.black_box.incidents import make_incident, read_incidents, write_incidents
from capture.black_box.salvage import salvage
from capture.cli import main
from capture.file_format.folder_layout import ACTOR_CONFIG_NAME
from capture.record.retention import RetentionSettings
from replay.commands.inspect import text as wording
from replay.commands.inspect.inspection import ValueSpread, inspect_folder
from replay.commands.inspect.text import print_inspection
from tests.helpers.doomed_jobs import TinyModel
from tests.helpers.made_captures import damage, write_config, write_end, write_pass, write_recordings


def test_passes_are_told_apart_and_counted(tmp_path: Path) -> None:
    write_pass(tmp_path, rank=0, step=0, length=10, num_real=8, num_actions=3)
    write_pass(tmp_path, rank=1, step=1, length=20, num_real=20, num_actions=4)
    write_pass(tmp_path, rank=1, step=2, length=30, num_real=20, num_actions=5)
    write_pass(tmp_path, rank=0, step=3, trains=False, num_rows=4, length=5, num_real=1, num_actions=2)
    write_config(tmp_path)
    facts = inspect_folder(tmp_path)
    train, rollout = facts.kinds
    assert (train.name, train.num_passes, train.ranks) == ("train", 3, [0, 1])
    assert train.rows == ValueSpread(least=2, median=2, most=2)
    assert train.row_length == ValueSpread(least=10, median=20, most=30)
    assert (train.padded_tokens, train.real_tokens, train.action_tokens) == (2 * 60, 2 * 48, 2 * 12)
    assert (rollout.name, rollout.num_passes, rollout.ranks) == ("rollout", 1, [0])
    assert (rollout.padded_tokens, rollout.real_tokens, rollout.action_tokens) == (20, 4, 8)
    assert facts.model == "llama, layers 2, hidden 64, vocabulary 1000"
    assert facts.num_by_format == {"of format 1": 4}
    assert facts.first_time == "2026-03-01T09:12:44.000000+00:00"
    assert facts.last_time == "2026-03-01T09:12:47.000000+00:00"
    assert facts.versions == ["torch 2.13.0"]
    assert facts.damaged == []


@pytest.mark.parametrize("number", [1, 2])
def test_the_checks_of_a_recording_read_how_it_ended_and_not_how_another_did(number: int, tmp_path: Path) -> None:
    """Each recording's checks say the same whatever else is in its folder."""
    ends: dict[str, dict[str, Any]] = {"a": {"num_unseen_steps": 5, "unseen_after": 1}, "b": {"num_late_clippings": 4}}
    for folder, recordings in ((tmp_path / "both", "ab"), (tmp_path / "alone", "ab"[number - 1])):
        write_recordings(folder, dict.fromkeys(recordings, "tt"))
        for name in recordings:
            write_end(folder, name, num_passes=2, num_steps=9, **ends[name])
    beside = inspect_folder(tmp_path / "both", recording=number).linting
    alone = inspect_folder(tmp_path / "alone").linting
    assert beside is not None
    assert alone is not None
    assert alone.remarks
    assert [remark.text for remark in beside.remarks] == [remark.text for remark in alone.remarks]
    assert (beside.recording, beside.read) == (number, "all 2 passes")
    both = inspect_folder(tmp_path / "both").recordings
    assert [(one.number, one.num_passes, one.num_files) for one in both] == [(1, 2, 2), (2, 2, 2)]


def test_damaged_files_are_named_with_the_reason(tmp_path: Path) -> None:
    write_pass(tmp_path)
    bad = write_pass(tmp_path, step=1)
    damage(bad)
    facts = inspect_folder(tmp_path)
    [(path, reason)] = facts.damaged
    assert path == bad
    assert "truncated" in reason
    assert facts.num_by_format == {"of format 1": 1, "damaged": 1}


def test_a_folder_of_damaged_files_has_no_kinds(tmp_path: Path) -> None:
    damage(write_pass(tmp_path))
    facts = inspect_folder(tmp_path)
    assert facts.kinds == []
    assert facts.first_time is None


def test_without_actor_json_the_model_is_to_be_named(tmp_path: Path) -> None:
    write_pass(tmp_path)
    assert "--model" in inspect_folder(tmp_path).model


def test_a_damaged_actor_json_is_one_of_the_damaged_files(tmp_path: Path) -> None:
    write_pass(tmp_path)
    (tmp_path / ACTOR_CONFIG_NAME).write_text("{")
    [(path, _)] = inspect_folder(tmp_path).damaged
    assert path == tmp_path / ACTOR_CONFIG_NAME


@pytest.mark.parametrize(
    ("name", "says"), [("absent", "does not exist"), ("file", "is a file"), ("empty", "no captures")]
)
def test_a_folder_without_captures_is_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=says):
        inspect_folder(tmp_path / name)


def test_incidents_come_first_and_odd_passes_last(tmp_path: Path) -> None:
    write_pass(tmp_path, step=0, length=10)
    write_pass(tmp_path, step=1, length=30, num_real=2)
    long = write_pass(tmp_path, step=2, length=40, num_real=39)
    empty = write_pass(tmp_path, step=3, num_real=0)
    found = [
        replace(make_incident("not finite", "loss", 3, "loss is nan"), files=[long.name], num_not_copied=1),
        make_incident("signal", "SIGTERM", 3),
    ]
    write_incidents(tmp_path, found, num_others=4, rank=1, stamp="x")
    facts = inspect_folder(tmp_path)
    assert [(record.rank, record.incident.what) for record in facts.incidents] == [(1, "not finite"), (1, "signal")]
    assert [(odd.source, odd.reason) for odd in facts.longest] == [(long.name, "2 rows of 40, 78 tokens real")]
    assert [odd.reason for odd in facts.odd] == ["93% is padding", "2 of 2 rows have no real token", "100% is padding"]
    assert facts.odd[-1].source == empty.name
    out = io.StringIO()
    print_inspection(facts, out)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("incident   rank 1, pass 4, ")
    assert lines[0].endswith("not finite, loss: loss is nan; 1 file for it, 1 pass not on the host in time")
    assert lines[1].endswith("signal, SIGTERM; 0 files for it")
    assert lines[2] == "incident   4 more like these, for which nothing was written"
    assert lines[-1].startswith(f"odd        {empty.name}")


def test_an_incident_without_a_pass_is_worth_reading(tmp_path: Path) -> None:
    write_incidents(tmp_path, [make_incident("exception", "loop", None, "broke")], num_others=0, rank=0, stamp="x")
    facts = inspect_folder(tmp_path)
    assert (facts.kinds, facts.damaged, len(facts.incidents)) == ([], [], 1)


def test_a_damaged_record_of_incidents_is_one_of_the_damaged_files(tmp_path: Path) -> None:
    write_pass(tmp_path)
    (tmp_path / "incidents_rank0_x.json").write_text("{")
    [(_, reason)] = inspect_folder(tmp_path).damaged
    assert "incidents_rank0_x.json: cannot be read" in reason


def spool_of(process: int, rank: int, folder: Path, shared_memory: Path) -> Path:
    """What that process has in shared memory: a flight recorder of two passes."""
    model = TinyModel()
    with recording(model, folder, flight_recorder=2) as recorder:
        for _ in range(2):
            model(torch.ones(2, 4, dtype=torch.long))
        recorder.flush()
        [own] = [path for path in shared_memory.iterdir() if f"-{os.getpid()}-" in path.name]
        spool = shared_memory / own.name.replace(f"-rank0-{os.getpid()}-", f"-rank{rank}-{process}-")
        # The file `position` names rank 0.
        shutil.copytree(own, spool, ignore=shutil.ignore_patterns("position"))
    return spool


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shared_memory = tmp_path / "shm"
    shared_memory.mkdir()
    monkeypatch.setattr(capture.black_box.flight_recorder, "SHARED_MEMORY", shared_memory)
    return shared_memory


# Linux gives no process so high a number.
DEAD = 2**22 + 1


def test_a_killed_rank_is_salvaged_and_comes_before_those_that_lost_it(tmp_path: Path, shared_memory: Path) -> None:
    folder = tmp_path / "run"
    spool = spool_of(DEAD, 1, folder, shared_memory)
    write_incidents(
        folder,
        [
            make_incident(
                "exception", "forward", 1, "RuntimeError: [pair.cc:553] Connection closed by peer [::1]:2947."
            ),
            make_incident("exception", "loop", 1, "RuntimeError: the optimizer broke"),
        ],
        num_others=0,
        rank=0,
        stamp="x",
    )
    facts = inspect_folder(folder)
    assert not spool.exists()
    assert facts.num_by_format == {"of format 1": 2}
    lines = [text for _, text in wording.list_incidents(facts)]
    assert lines[0].startswith("rank 1, pass 2, ")
    assert lines[0].endswith(": died, without a word; 2 files for it")
    assert "the optimizer broke" in lines[1]
    assert "Connection closed by peer" in lines[2]


def test_salvage_writes_what_a_killed_rank_had(
    tmp_path: Path, shared_memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    spool_of(DEAD, 1, folder, shared_memory)
    assert main(["salvage", str(folder)]) == 0
    assert capsys.readouterr().out == "salvaged   2 passes of processes that died\n"
    assert (len(capture_files(folder)), list(shared_memory.iterdir())) == (2, [])
    assert main(["salvage", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_the_next_recording_writes_the_passes_of_killed_ranks_of_any_number(
    tmp_path: Path, shared_memory: Path
) -> None:
    """A launcher that starts the ranks again may give rank 1's host to rank 0."""
    folder = tmp_path / "run"
    spool = spool_of(DEAD, 1, folder, shared_memory)
    model = TinyModel()
    with recording(model, folder) as recorder:
        model(torch.ones(2, 4, dtype=torch.long))
    assert (recorder.failure, recorder.num_written) == (None, 1)
    assert not spool.exists()
    assert [(record.rank, len(record.incidents[0].files)) for record in read_incidents(folder)] == [(1, 2)]
    assert len(capture_files(folder)) == 3


def test_two_that_salvage_at_once_write_each_pass_once(tmp_path: Path, shared_memory: Path) -> None:
    folder = tmp_path / "run"
    spool_of(DEAD, 1, folder, shared_memory)
    first = find_dead_spools(folder)
    assert len(next(first).calls) == 2
    assert salvage(folder, RetentionSettings()) == 0
    first.close()
    assert salvage(folder, RetentionSettings()) == 2


def test_the_flight_recorder_of_a_process_that_lives_is_left_alone(tmp_path: Path, shared_memory: Path) -> None:
    """One in another container, whose number no process has here: it holds the lock."""
    folder = tmp_path / "run"
    spool = spool_of(DEAD, 1, folder, shared_memory)
    write_pass(folder)
    held = os.open(spool, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert inspect_folder(folder).incidents == []
    assert len(list(spool.iterdir())) == 2
    os.close(held)
    assert [found.rank for found in inspect_folder(folder).incidents] == [1]


def test_a_folder_that_cannot_be_written_is_told_what_to_type(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    folder = tmp_path / "run"
    spool = spool_of(DEAD, 1, folder, shared_memory)
    monkeypatch.setattr("capture.black_box.salvage.salvage", refuse)
    out = io.StringIO()
    print_inspection(inspect_folder(folder), out)
    assert out.getvalue().startswith(
        "incident   rank 1 died without an incident file, and the last passes are in this host's"
    )
    assert f"capture salvage {folder}" in out.getvalue().splitlines()[0]
    assert spool.exists()
