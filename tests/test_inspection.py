"""What `replay inspect` finds in a folder."""

from pathlib import Path

import pytest

from actor_init.spec import UsageError
from capture.capture_file import ACTOR_CONFIG_NAME
from replay.inspection import Spread, inspect_folder
from tests.made_captures import damage, write_config, write_pass


def test_passes_are_told_apart_and_counted(tmp_path: Path) -> None:
    write_pass(tmp_path, rank=0, step=0, length=10, num_real=8, num_actions=3)
    write_pass(tmp_path, rank=1, step=1, length=20, num_real=20, num_actions=4)
    write_pass(tmp_path, rank=1, step=2, length=30, num_real=20, num_actions=5)
    write_pass(tmp_path, rank=0, step=3, trains=False, num_rows=4, length=5, num_real=1, num_actions=2)
    write_config(tmp_path)
    facts = inspect_folder(tmp_path)
    train, rollout = facts.kinds
    assert (train.name, train.num_files, train.ranks) == ("train", 3, [0, 1])
    assert train.rows == Spread(least=2, median=2, most=2)
    assert train.row_length == Spread(least=10, median=20, most=30)
    assert (train.padded_tokens, train.real_tokens, train.action_tokens) == (2 * 60, 2 * 48, 2 * 12)
    assert (rollout.name, rollout.num_files, rollout.ranks) == ("rollout", 1, [0])
    assert (rollout.padded_tokens, rollout.real_tokens, rollout.action_tokens) == (20, 4, 8)
    assert facts.model == "llama, layers 2, hidden 64, vocabulary 1000"
    assert facts.num_by_format == {"of format 1": 4}
    assert facts.first_time == "2026-03-01T09:12:44.000000+00:00"
    assert facts.last_time == "2026-03-01T09:12:47.000000+00:00"
    assert facts.versions == ["torch 2.13.0"]
    assert facts.damaged == []


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
