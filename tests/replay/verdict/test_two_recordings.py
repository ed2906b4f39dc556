"""A job that was recorded twice into one folder is not judged as one job."""

from pathlib import Path
from typing import Any

import pytest

from capture import capture_files
from capture.file_format.capture_file import read_call
from replay.tolerances.job_bounds import LOSS
from replay.verdict.pass_values import Claim, RecordedPass, WeightComparison, describe_mixed_recordings
from tests.helpers.made_records import record
from tests.replay.verdict.test_judge import FP32, replay_captures, train


@pytest.mark.parametrize("kept", [{}, {"segment": "1MB"}])
def test_two_recordings_in_one_folder_are_not_judged_together_and_each_is_alone(
    kept: dict[str, Any], tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Either is sound: what its first pass computed is reproduced, and its step has moved the weights of the others."""
    train(tmp_path, learning_rate=0.1, reproduce=True, **kept)
    with pytest.warns(RuntimeWarning, match="captures has passes of another recording"):
        train(tmp_path, learning_rate=0.1, reproduce=True, **kept)
    first, second = sorted({str(read_call(path).recording) for path in capture_files(tmp_path / "captures")})
    code, verdict, _ = replay_captures(tmp_path, tmp_path / "both", *FP32, "--verdict", "strict")
    assert (code, verdict["outcome"], verdict["counts"]) == (0, "CANNOT TELL", {"CANNOT TELL": 6})
    assert f"which began {first} and {second}. Try: --max-inputs 3, for those of one" in capsys.readouterr().out
    for typed in (["--max-inputs", "3"], ["--skip-inputs", "3"]):
        code, verdict, _ = replay_captures(tmp_path, tmp_path / typed[0], *FP32, "--verdict", "strict", *typed)
        assert (code, verdict["outcome"], verdict["counts"]) == (0, "REPRODUCED", {"REPRODUCED": 1, "CANNOT TELL": 2})


def test_the_ranks_of_a_job_have_each_a_recording_of_its_own() -> None:
    def seen(began: dict[int, str], index: int) -> list[Any]:
        claims = [Claim(name=LOSS, values=[1.5])]
        same: dict[str, Any] = {"world_size": 2, "trains": True, "weights": WeightComparison(), "num_frozen": 0}
        return [
            (
                record(index, rank=rank),
                RecordedPass(rank=rank, forward=0, claims=claims, dtypes=[], recording=time, **same),
            )
            for rank, time in began.items()
        ]

    job, restarted = {0: "10:00:01", 1: "10:00:02"}, {0: "11:00:01", 1: "11:00:02"}
    assert describe_mixed_recordings([*seen(job, 0), *seen(job, 1)]) is None
    said = describe_mixed_recordings([*seen(job, 0), *seen(job, 1), *seen(restarted, 2)])
    assert said is not None
    assert "of 2 recordings in one folder, which began 10:00:01 and 11:00:01. Try: --max-inputs 2," in said
    said = describe_mixed_recordings([*seen({0: job[0]}, 0), *seen({0: restarted[0]}, 0)])  # dealt to two data ranks
    assert said is not None
    assert "Try: a folder for each" in said
