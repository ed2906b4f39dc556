"""A job that was recorded twice into one folder is not judged as one job."""

from pathlib import Path
from typing import Any

import pytest

from capture import capture_files
from capture.file_format.capture_file import read_call
from replay.command_line.cli import main as replay_main
from replay.runlog.reader import PastRun
from replay.tolerances.job_bounds import LOSS
from replay.verdict.recorded_pass import Claim, RecordedPass, WeightComparison, describe_mixed_recordings
from tests.helpers.made_records import record
from tests.replay.verdict.test_judge import FP32, replay_captures, train


@pytest.mark.parametrize("kept", [{}, {"segment": "1MB"}])
def test_of_two_recordings_in_one_folder_a_replay_takes_the_latest_or_the_one_that_is_named(
    kept: dict[str, Any], tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Either is sound: its passes and its steps are reproduced."""
    train(tmp_path, learning_rate=0.1, reproduce=True, **kept)
    with pytest.warns(RuntimeWarning, match="captures has passes of another recording"):
        train(tmp_path, learning_rate=0.1, reproduce=True, **kept)
    paths = capture_files(tmp_path / "captures")
    first, second = [str(read_call(path).recording) for path in (paths[0], paths[-1])]
    for typed, said in (
        ([], f"recording  2 of 2, begun {second}; --recording 1 takes the other"),
        (["--recording", "1"], f"recording  1 of 2, begun {first}; --recording 2 takes the other"),
    ):
        code, verdict, log = replay_captures(
            tmp_path, tmp_path / f"logs{len(typed)}", *FP32, "--verdict", "strict", *typed
        )
        assert (code, verdict["outcome"], verdict["counts"]) == (0, "REPRODUCED", {"REPRODUCED": 3})
        assert said in capsys.readouterr().out
        log_text = "".join(path.read_text() for path in log.glob("*.jsonl"))
        assert [path.name in log_text for path in paths] == [bool(typed)] * 3 + [not typed] * 3
        assert PastRun.read(log).inputs.recording == (1 if typed else 2)
    code = replay_main(["--inputs", str(tmp_path / "captures"), "--recording", "3"])
    assert code == 2
    said = capsys.readouterr().err
    assert f"--recording 3 is not there: the folder has 2 recordings: 1, begun {first}; 2, begun {second}" in said


def test_passes_of_two_recordings_whose_files_are_mixed_are_not_judged_together() -> None:
    def seen(began: dict[int, str], index: int) -> list[Any]:
        claims = [Claim(name=LOSS, values=[1.5])]
        same: dict[str, Any] = {
            "world_size": 2,
            "trains": True,
            "weight_comparison": WeightComparison(),
            "num_frozen": 0,
        }
        return [
            (
                record(index, rank=rank),
                RecordedPass(rank=rank, forward_number=0, claims=claims, dtypes=[], recording=time, **same),
            )
            for rank, time in began.items()
        ]

    job, restarted = {0: "10:00:01", 1: "10:00:02"}, {0: "11:00:01", 1: "11:00:02"}
    assert describe_mixed_recordings([*seen(job, 0), *seen(job, 1)]) is None
    said = describe_mixed_recordings([*seen(job, 0), *seen(job, 1), *seen(restarted, 2)])
    assert said is not None
    assert "of 2 recordings into one folder, which began 10:00:01 and 11:00:01 and whose files" in said
    said = describe_mixed_recordings([*seen({0: job[0]}, 0), *seen({0: restarted[0]}, 0)])  # dealt to two data ranks
    assert said is not None
    assert "Try: a folder for each" in said
