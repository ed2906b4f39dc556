"""A pass in whose forward the job broke off has no numbers to judge: the verdict names the incident."""

from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from capture import capture_files, recording
from replay.command_line.cli import main as replay_main
from tests.replay.verdict.test_judge import FP32, replay_captures
from tests.trainers.common import make_batches, make_model

RAISED = "the job broke off in the forward of this pass: RuntimeError: the kernel is not there"


def train(folder: Path, *, num_whole: int, **kept: Any) -> Path:
    """Train until the forward after `num_whole` passes raises."""
    model: Any = make_model(folder).train()

    def breaks(*_: Any) -> NoReturn:
        raise RuntimeError("the kernel is not there")

    with suppress(RuntimeError), recording(model, folder / "captures", **kept):
        for number, batch in enumerate(make_batches()):
            if number == num_whole:
                model.model.layers[1].register_forward_pre_hook(breaks)
            model(**batch).loss.backward()
    return folder


@pytest.mark.parametrize("kept", [{"reproduce": True}, {"flight_recorder": 8}, {"reproduce": True, "segment": "1MB"}])
def test_a_recording_whose_first_forward_raised_names_the_incident(
    kept: dict[str, Any], tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, verdict, _ = replay_captures(train(tmp_path, num_whole=0, **kept), tmp_path / "logs", *FP32)
    assert (verdict["outcome"], verdict["reason"]) == ("CANNOT TELL", RAISED)
    assert f"verdict    CANNOT TELL: {RAISED}" in capsys.readouterr().out


def test_passes_before_the_one_that_raised_are_judged(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, verdict, _ = replay_captures(train(tmp_path, num_whole=2, reproduce=True), tmp_path / "logs", *FP32)
    assert [judged_pass["outcome"] for judged_pass in verdict["passes"]] == ["REPRODUCED", "REPRODUCED", "CANNOT TELL"]
    assert [judged_pass["reason"] for judged_pass in verdict["passes"]] == [None, None, RAISED]
    ended = "broke off on rank 0, forward 2 (in forward): RuntimeError: the kernel is not there"
    assert f"job        {ended}" in capsys.readouterr().out


def test_of_a_folder_without_a_capture_the_incident_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train(tmp_path, num_whole=0, flight_recorder=8) / "captures"
    for path in capture_files(folder):  # as where its copy did not reach the host in time
        path.unlink()
    assert replay_main(["--inputs", str(folder)]) == 2
    assert "no captures, but an incident: exception, forward: RuntimeError: the kernel" in capsys.readouterr().err
