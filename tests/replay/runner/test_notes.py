"""The notes under a verdict: what the checks remark on the passes of a real job, which changes no outcome."""

import json
from pathlib import Path

import pytest
import torch

from actor_init.as_json import to_json
from capture import recording
from capture.file_format.optimizer_step import OptimizerStep
from replay.command_line.cli import main as replay_main
from replay.runlog.run_file import RunFile
from replay.runner.notes import TRAINER_STATE, explain_lost_state
from tests.replay.verdict.test_judge import FP32, replay_captures
from tests.trainers.common import make_batches, make_model


def test_padding_under_the_mask_is_a_note_and_the_job_is_reproduced_all_the_same(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows end in two tokens of padding that the mask calls real, and are the same in each step."""
    model = make_model(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = make_batches(1)[0]
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    batch["input_ids"][:, 6:] = 0
    batch["labels"][:, 6:] = -100
    with recording(model, tmp_path / "captures", reproduce=True):
        for _ in range(3):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    code, verdict, log = replay_captures(tmp_path, tmp_path / "logs", *FP32, "--verdict", "strict")
    assert (code, verdict["outcome"]) == (0, "REPRODUCED")
    said = capsys.readouterr().out
    notes = [line for line in said.splitlines() if line.startswith("note")]
    assert notes == [
        "note       trained: the learning rate was 0 in all 3 recorded steps",
        "note       padding: 6 of 6 rows begin or end in padding (id 0, if that is padding) that the attention mask "
        "calls real: 24 tokens",
        "note       rows: each of the 3 steps was fed the same rows",
    ]
    # run.json has all of it.
    remarks = json.loads((log / "run.json").read_text())["remarks"]
    assert [(remark["topic"], remark["cause"]) for remark in remarks] == [
        ("trained", None),
        ("padding", "another attention mask"),
        ("rows", None),
    ]
    assert [f"note       {remark['topic']}: {remark['text']}" for remark in remarks] == notes
    end = RunFile.read(log).end
    assert end is not None
    assert to_json(end.remarks) == remarks
    assert replay_main(["inspect", str(tmp_path / "captures")]) == 0
    said = capsys.readouterr().out
    assert "checked    all 3 passes\ntrained    the learning rate was 0" in said
    assert "\npadding    6 of 6 rows" in said


def test_a_job_that_broke_off_is_not_said_to_lack_steps(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path)

    def run_job() -> None:
        with recording(model, tmp_path / "captures", reproduce=True):
            for batch in make_batches(2):
                model(**batch).loss.backward()
            raise ValueError(f"the norm\nin {tmp_path} is wrong")

    with pytest.raises(ValueError, match="the norm"):
        run_job()
    replay_captures(tmp_path, tmp_path / "logs", *FP32)
    said = capsys.readouterr().out
    assert "job        broke off on rank 0, forward 1 (after backward): ValueError: the norm" in said
    assert "\ntrained" not in said
    assert replay_main(["inspect", str(tmp_path / "captures")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("incident   rank 0, pass 2, ")
    assert "checked    all 2 passes: no remark\n" in said


def test_what_another_recording_in_the_folder_ended_with_is_no_note(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first job clips behind its steps, and the second one, which went on in the same folder, before them."""
    model = make_model(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run_job(*, clips_late: bool) -> None:
        with recording(model, tmp_path / "captures", reproduce=True):
            for batch in make_batches(2):
                model(**batch).loss.backward()
                for is_behind in (False, True):
                    if is_behind == clips_late:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    if not is_behind:
                        optimizer.step()
                optimizer.zero_grad()

    run_job(clips_late=True)
    with pytest.warns(RuntimeWarning, match="has passes of another recording"):
        run_job(clips_late=False)
    said = {}
    for number in (1, 2):
        replay_captures(tmp_path, tmp_path / f"logs-{number}", *FP32, "--recording", str(number))
        said[number] = "gradients are clipped after the step, in 2 steps" in capsys.readouterr().out
    assert said == {1: True, 2: False}


def make_step(number: int = 0, has_state: bool | None = False) -> OptimizerStep:
    return OptimizerStep(number=number, passes=(0,), shares=(1.0,), has_state=has_state)


def test_an_optimizer_that_begins_anew_at_a_trainers_checkpoint_is_said(tmp_path: Path) -> None:
    table = tmp_path / TRAINER_STATE
    assert explain_lost_state(make_step(), str(tmp_path)) == ""
    table.write_text('{"global_step": 4}')
    text = explain_lost_state(make_step(), str(tmp_path))
    assert text.startswith(f"it began without a state, and {tmp_path} is of step 4 of a job")
    for other in (make_step(has_state=True), make_step(has_state=None), make_step(number=1)):
        assert explain_lost_state(other, str(tmp_path)) == ""
    for content in ('{"global_step": 0}', "{}", "[]", "{"):
        table.write_text(content)
        assert explain_lost_state(make_step(), str(tmp_path)) == ""
