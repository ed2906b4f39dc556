"""`replay scan` as it is typed: every input in one group, one group's failure alone, going on, the exit code."""

import json
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import replay
from capture import capture_files
from replay.api.logs import PastCampaign
from replay.command_line.cli import main
from replay.commands.scan.runs import ScanPlan
from replay.options.spec import find_sample_folder
from replay.processes.pool import ProcessResult, Task
from replay.runlog.records import PassRecord
from replay.verdict.outcomes import Outcome
from tests.helpers.children import end_each_task, run_quietly
from tests.helpers.made_captures import damage, write_passes
from tests.helpers.made_logs import VERDICT, write_log
from tests.helpers.made_records import record
from tests.helpers.read_logs import read_log
from tests.helpers.schemas import assert_valid
from tests.helpers.typed import spec_of

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Some captures of the sample, and its model."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    shutil.copy(find_sample_folder() / "actor.json", folder)
    for path in capture_files(find_sample_folder())[-14:]:
        shutil.copy(path, folder)
    return folder


class Runs:
    """In the place of the processes: a replay in this process, or what happens to the group with this number."""

    def __init__(self, one_world: None) -> None:
        self.happens: dict[int, Any] = {}
        self.made: list[int] = []

    def __call__(self, task: Task) -> ProcessResult:
        number = int(task.logs.parent.name) - 1  # of its group, from 0
        self.made.append(number)
        event = self.happens.pop(number, None)
        if isinstance(event, BaseException):
            raise event
        task.output.parent.mkdir(parents=True, exist_ok=True)
        task.output.write_text("")
        code = run_quietly(task) if event is None else None if event == "late" else int(event)
        return ProcessResult(exit_code=code, seconds=1.0, output=task.output, logs=task.logs)


@pytest.fixture
def runs(one_world: None, monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs(one_world)
    end_each_task(made, monkeypatch)
    return made


def scan(*typed: str, logs: Path) -> int:
    return main(["scan", *typed, "--dtype", "fp32", "--log-folder", str(logs)])


def written(logs: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = logs.glob("*/scan.json")
    return path.parent, json.loads(path.read_text())["result"]


def sources(folder: Path, group: dict[str, Any]) -> list[str]:
    records: list[PassRecord] = read_log(folder / group["log"])[1]
    return [record.source for record in records]


def test_every_input_is_in_one_group(inputs: Path, runs: Runs, tmp_path: Path, capsys: Captured) -> None:
    assert main(["--inputs", str(inputs), "--dtype", "fp32", "--quiet", "--log-folder", str(tmp_path / "whole")]) == 0
    (whole,) = (tmp_path / "whole").iterdir()
    result = replay.scan(inputs, group=3, dtype="fp32", log_folder=tmp_path / "logs")
    folder, log = written(tmp_path / "logs")
    assert (result.exit_code, result.folder, result.result) == (0, folder, log)
    assert result.command == f"replay scan --group 3 --dtype fp32 --inputs {inputs} --log-folder {tmp_path / 'logs'}"
    assert list(result.to_frame().outcome) == [group["outcome"] for group in log["groups"]]
    capsys.readouterr()
    runs.made.clear()
    assert main(["scan", "--continue", str(folder), "--json"]) == 0
    assert (json.loads(capsys.readouterr().out), runs.made) == (result.to_dict(), [])
    assert_valid("scan", result.to_dict())
    past = replay.open(folder)
    assert isinstance(past, PastCampaign)
    assert past.result == log
    assert [record.source for name in past for record in past[name].records] == [
        name for group in log["groups"] for name in sources(folder, group)
    ]
    assert [name for group in log["groups"] for name in sources(folder, group)] == [
        record.source for record in read_log(whole)[1]
    ]
    assert {len(sources(folder, group)) for group in log["groups"][:-1]} == {3}
    assert {group["state"] for group in log["groups"]} == {"done"}


def test_what_fails_fails_alone_and_the_rest_goes_on(
    inputs: Path, runs: Runs, tmp_path: Path, capsys: Captured
) -> None:
    runs.happens = {0: "late", 1: -signal.SIGKILL, 3: KeyboardInterrupt()}
    assert scan("--inputs", str(inputs), "--group", "2", logs=tmp_path / "logs") == 130
    folder, log = written(tmp_path / "logs")
    states = [group["state"] for group in log["groups"]]
    assert states[:4] == ["failed", "failed", "done", "pending"]
    assert log["groups"][0]["said"].startswith("not finished within ")
    assert log["groups"][1]["said"].startswith("ended by SIGKILL")
    assert f"go on      replay scan --continue {folder}" in capsys.readouterr().out.splitlines()
    first = log["groups"][2]
    runs.happens = {4: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt) as interruption:
        replay.scan(continue_=folder)
    assert interruption.value.__notes__ == [f"What ran is in {folder}. replay.open({str(folder)!r}) reads it"]
    assert [group["state"] for group in written(tmp_path / "logs")[1]["groups"]][3:5] == ["done", "pending"]
    runs.made.clear()
    assert main(["scan", "--continue", str(folder)]) == 1  # two groups have failed
    assert runs.made == list(range(4, len(states)))
    again = written(tmp_path / "logs")[1]["groups"]
    assert again[2] == first
    assert [group["state"] for group in again] == ["failed", "failed", *["done"] * (len(states) - 2)]


def test_a_failed_pass_is_named_and_a_damaged_file_is_no_groups_fault(inputs: Path, runs: Runs, tmp_path: Path) -> None:
    damaged, _, _, _, too_large, *_ = capture_files(inputs)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    (tmp_path / "loss.py").write_text(OUT_OF_MEMORY.format(source=too_large.name))
    typed = ("--group", "2", "--no-noise-floor", "--loss", f"{tmp_path / 'loss.py'}:mean")
    assert scan("--inputs", str(inputs), *typed, logs=tmp_path / "logs") == 1
    folder, log = written(tmp_path / "logs")
    states = [group["state"] for group in log["groups"]]
    assert states == ["done", "failed", *["done"] * (len(states) - 2)]
    second = sources(folder, log["groups"][1])[1]
    assert log["groups"][1]["said"] == f"pass 2, {second}: OutOfMemoryError: on purpose"
    plan = json.loads((folder / "scan.json").read_text())["plan"]
    assert [text.split(":")[0] for text in plan["damaged"]] == [damaged.name]
    # What the screen says of it, and the exit code comes from, is in the result too.
    assert log["damaged"] == plan["damaged"]


OUT_OF_MEMORY = """
import torch

def mean(inputs):
    if inputs.recorded.source == {source!r}:
        raise torch.OutOfMemoryError("on purpose")
    return -inputs.log_probs_BA.sum() / inputs.action_mask_BA.sum().clamp(min=1)
"""


class LoggedRuns:
    """In the place of the processes: a log of each group, with its outcome and its failed passes, by their index.

    not_finite  by the number of a group, the tensor of its second pass that is not finite
    """

    def __init__(self, *ends: tuple[Outcome, Sequence[int]], not_finite: Mapping[int, str] | None = None) -> None:
        self.ends = ends
        self.not_finite = not_finite or {}
        self.tasks: list[Task] = []

    def __call__(self, task: Task) -> ProcessResult:
        outcome, failed = self.ends[len(self.tasks)]
        tensor = self.not_finite.get(len(self.tasks))
        self.tasks.append(task)
        boom: dict[str, Any] = {"error": "boom", "error_type": "RuntimeError"}
        records = [record(index, **(boom if index in failed else {})) for index in range(3)]
        records[1] = replace(records[1], first_non_finite=tensor)
        task.output.parent.mkdir(parents=True, exist_ok=True)
        task.output.write_text("")
        verdict = replace(VERDICT, outcome=outcome, counts={outcome: 3})
        write_log(task.logs / "20261123-000000-replay", records, spec=task.job.spec, verdict=verdict, exit_code=1)
        return ProcessResult(exit_code=1, seconds=1.0, output=task.output, logs=task.logs)


@pytest.mark.parametrize(
    ("outcome", "failed", "is_damaged", "exit_code", "says"),
    [
        (Outcome.REPRODUCED, [], False, 0, "3 REPRODUCED"),
        (Outcome.CANNOT_TELL, [], False, 0, "3 CANNOT TELL"),
        (Outcome.DIFFERS, [], False, 1, "3 DIFFERS"),
        (Outcome.UNSETTLED, [], False, 1, "3 UNSETTLED"),
        (Outcome.REPRODUCED, [], True, 1, "3 REPRODUCED"),
        (Outcome.REPRODUCED, [1], False, 1, "pass 2, input_1.pkl: RuntimeError: boom"),
        (Outcome.REPRODUCED, [0, 2], False, 1, "pass 1, input_0.pkl: RuntimeError: boom, and 1 more pass"),
        (Outcome.REPRODUCED, [0, 1, 2], False, 1, "pass 1, input_0.pkl: RuntimeError: boom, and 2 more passes"),
    ],
)
def test_each_fault_by_itself_decides_the_exit_code(
    outcome: Outcome,
    failed: list[int],
    is_damaged: bool,
    exit_code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = write_passes(tmp_path / "inputs", {0: "ttttttt"})[0]
    if is_damaged:
        damage(paths[6])
    good = (Outcome.REPRODUCED, ())
    end_each_task(LoggedRuns(good, (outcome, failed), good), monkeypatch)
    result = replay.scan(tmp_path / "inputs", group=3, log_folder=tmp_path / "logs")
    assert result.exit_code == exit_code
    assert [group["said"] for group in result.result["groups"]][:2] == ["3 REPRODUCED", says]
    assert [group["state"] for group in result.result["groups"]][1] == ("failed" if failed else "done")
    assert len(result.result["damaged"]) == is_damaged


def test_a_group_with_a_nan_is_named_though_the_job_had_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The verdict of such a group is REPRODUCED, and who scans for the NaN of a job has to find it."""
    write_passes(tmp_path / "inputs", {0: "tttttt"})
    reproduced = (Outcome.REPRODUCED, ())
    end_each_task(LoggedRuns(reproduced, reproduced, not_finite={1: "output of model.norm"}), monkeypatch)
    assert main(["scan", "--inputs", str(tmp_path / "inputs"), "--group", "3", "--log-folder", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "not finite inputs 4 to 6: pass 2, input_1.pkl: output of model.norm\n" in said
    (path,) = tmp_path.glob("*/scan.json")
    groups = json.loads(path.read_text())["result"]["groups"]
    assert [group["not_finite"] for group in groups] == ["", "pass 2, input_1.pkl: output of model.norm"]


def test_groups_are_whole_windows_of_the_inputs_that_are_not_skipped() -> None:
    spec = spec_of(["--tp", "2", "--ring", "3", "--skip-inputs", "5", "--backend", "fsdp2"])
    plan = ScanPlan.from_inputs(spec, 4, num_inputs=14, window=3, damaged=())
    assert [(group.first, group.size) for group in plan.groups] == [(5, 6), (11, 6), (17, 2)]
    assert [
        (run.home, run.spec.inputs.skip_inputs, run.spec.inputs.max_inputs, run.num_processes)
        for run in plan.planned_runs
    ] == [("groups/0001", 5, 6, 6), ("groups/0002", 11, 6, 6), ("groups/0003", 17, 2, 6)]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--group 0", "invalid value for '--group'"),
        ("--step", "unknown option --step"),
        ("--continue nowhere", "--continue nowhere holds no scan.json. Give a folder that `replay scan` left"),
        ("--continue nowhere --tp 2", "--continue takes its options from that folder. Leave out --tp"),
        ("--continue nowhere --group 8", "--continue takes its options from that folder. Leave out --group"),
        ("--tp 2 --address auto", "--address is for a Ray cluster. Try: --launcher ray --address auto"),
        ("--inputs nowhere", "--inputs nowhere: no such folder."),
    ],
)
def test_bad_input_is_one_line(typed: str, says: str, capsys: Captured) -> None:
    assert main(["scan", *typed.split()]) == 2
    assert capsys.readouterr().err.startswith(f"replay: {says}")
