"""`replay check-upgrade`: two environments' replays of the same inputs are judged, from logs that were made here."""

import json
import math
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

import replay
from actor_init.spec import UsageError
from replay.api.logs import PastCampaign
from replay.command_line.cli import main
from replay.commands.check_upgrade import checking
from replay.commands.check_upgrade.result import UpgradeCheck, UpgradeResult
from replay.processes.interpreter import Environment
from replay.processes.pool import ProcessResult, Task
from replay.runlog.records import PassRecord
from replay.verdict.outcomes import Outcome, Verdict
from tests.helpers.children import end_each_task
from tests.helpers.made_logs import VERDICT, WORK, passed, write_log
from tests.helpers.schemas import assert_valid
from tests.warm import warm_bin

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "inputs" / "sample"
CONFIG = {**WORK["config"], "hidden_size": 64}
PYTHONS = ("/old/bin/python", "/new/bin/python")
VERSIONS = {"/old/bin/python": "2.10.0", "/new/bin/python": "2.13.0"}
CANNOT_TELL = replace(VERDICT, outcome=Outcome.CANNOT_TELL, reason="a|b")
# Of each home of a job, the record and the verdict of its log; None: the replay ends without a log.
Logs = Mapping[str, tuple[PassRecord, Verdict] | None]
SAME: Logs = {name: (passed(0, "x"), VERDICT) for name in ("runs/old", "runs/new")}
Begin = Callable[..., list[Task]]


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Let replays in two environments leave made logs. Returns the list of the replays that are asked for."""

    def begin(logs: Logs, dtypes: tuple[str, str] = ("fp32", "fp32")) -> list[Task]:
        tasks: list[Task] = []

        def run(task: Task) -> ProcessResult:
            tasks.append(task)
            task.logs.mkdir(parents=True)
            task.output.write_text("replay: no such kernel\n")
            made = logs.get(home_of(task))
            if made is not None:
                record, verdict = made
                work = {"config": CONFIG}
                typed = f"--dtype {dtypes[home_of(task).endswith('new')]}"
                write_log(task.logs / "1-replay", [record], typed=typed, work=work, verdict=verdict)
            return ProcessResult(exit_code=1 if made is None else 0, seconds=1.0, output=task.output, logs=task.logs)

        end_each_task(run, monkeypatch)
        monkeypatch.setattr(
            checking, "probe", lambda python: Environment(python=python, versions={"torch": VERSIONS[python]})
        )
        return tasks

    return begin


def home_of(task: Task) -> str:
    """Return the folder of a replay's attempts, below that of the check."""
    return "/".join(task.logs.parts[-3:-1])


def check(folder: Path) -> UpgradeCheck:
    return replay.check_upgrade(SAMPLE, python=PYTHONS, log_folder=folder)


def test_the_same_numbers_agree_and_nothing_is_traced(environments: Begin, tmp_path: Path) -> None:
    tasks = environments(SAME)
    result = check(tmp_path)
    assert (result.result, result.exit_code, result.first_difference) == (UpgradeResult.AGREE, 0, None)
    assert [(home_of(task), task.python) for task in tasks] == list(zip(("runs/old", "runs/new"), PYTHONS, strict=True))
    assert [quantity.name for quantity in result.quantities] == ["loss", "log-probs", "gradient norm"]
    past = replay.open(result.folder)
    assert past.to_dict()["result"] == json.loads(json.dumps(result.to_dict(), allow_nan=False))


def test_the_bound_is_what_rounding_explains_in_this_dtype_and_depth(environments: Begin, tmp_path: Path) -> None:
    """A unit roundoff for each of two additions in four layers, and a sum over the hidden size in each."""
    tokens = passed(0, "x").input.real_tokens
    bound = 2**-24 * math.sqrt(2 * 4 * max(64, tokens))
    for share, result in ((0.9, UpgradeResult.AGREE), (1.1, UpgradeResult.DIFFER)):
        environments({**SAME, "runs/new": (passed(0, "x", loss=2.0 * (1 + share * bound)), VERDICT)})
        checked = check(tmp_path / result)
        assert checked.result is result
        assert checked.quantities[0].bound == pytest.approx(bound)


@pytest.mark.parametrize("dtypes", [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_the_bound_is_that_of_the_coarser_dtype(dtypes: tuple[str, str], environments: Begin, tmp_path: Path) -> None:
    """Sums of 16-bit numbers are in fp32, so that two additions in each of four layers are left."""
    environments({**SAME, "runs/new": (passed(0, "x", loss=2.001), VERDICT)}, dtypes)
    checked = check(tmp_path)
    assert checked.quantities[0].bound == pytest.approx(2**-8 * math.sqrt(2 * 4))
    assert checked.result is UpgradeResult.AGREE


def test_one_environment_that_is_given_twice_is_replayed_twice(environments: Begin, tmp_path: Path) -> None:
    tasks = environments(SAME)
    result = replay.check_upgrade(SAMPLE, python=PYTHONS[:1] * 2, log_folder=tmp_path)
    assert result.result is UpgradeResult.AGREE
    assert [(home_of(task), task.python) for task in tasks] == [("runs/old", PYTHONS[0]), ("runs/new", PYTHONS[0])]


def test_where_numbers_differ_both_are_traced(environments: Begin, tmp_path: Path) -> None:
    tasks = environments({**SAME, "runs/new": (passed(0, "x", loss=2.5), VERDICT)})
    result = check(tmp_path)
    assert (result.result, result.exit_code) == (UpgradeResult.DIFFER, 1)
    assert [home_of(task) for task in tasks] == ["runs/old", "runs/new", "traces/old"]
    assert result.first_difference == "not found: the traced replay in the old environment failed: no such kernel"


def test_another_verdict_differs_though_the_numbers_agree(environments: Begin, tmp_path: Path) -> None:
    environments({**SAME, "runs/new": (passed(0, "x"), CANNOT_TELL)})
    result = check(tmp_path)
    assert result.result is UpgradeResult.DIFFER
    lines = result.to_markdown().splitlines()
    assert {"| verdict | REPRODUCED | CANNOT TELL |", "* new: CANNOT TELL: a\\|b"} <= {*lines}


def test_what_both_say_of_the_job_is_said_once_and_no_difference_is_nowhere(
    environments: Begin, tmp_path: Path
) -> None:
    environments({name: (passed(0, "x"), CANNOT_TELL) for name in ("runs/old", "runs/new")})
    result = check(tmp_path)
    page = result.to_markdown()
    assert "\n\n* both: CANNOT TELL: a\\|b\n* repeat: " in page
    assert f"| loss | 0 | {result.quantities[0].bound:.2g} | agrees |  |" in page


def test_both_replay_the_loss_that_the_job_noted(environments: Begin, tmp_path: Path) -> None:
    tasks = environments(SAME)
    result = check(tmp_path)
    asked = [task.job.spec.measure for task in tasks]
    assert [(measure.loss, measure.details) for measure in asked] == [("policy", True)] * 2
    assert "--loss" not in result.command


def test_a_replay_that_fails_in_one_of_them_is_told_beside_the_other(environments: Begin, tmp_path: Path) -> None:
    environments({**SAME, "runs/new": None})
    result = check(tmp_path)
    assert (result.result, result.exit_code) == (UpgradeResult.FAILED, 1)
    assert {"| verdict | REPRODUCED | failed |", "* new: no such kernel"} <= {*result.to_markdown().splitlines()}


def test_other_work_is_not_compared_and_the_reason_is_told(environments: Begin, tmp_path: Path) -> None:
    environments({**SAME, "runs/new": (passed(0, "y"), VERDICT)})
    result = check(tmp_path)
    assert result.result is UpgradeResult.FAILED
    assert "no input in common" in result.notes[0]


def test_a_number_that_is_not_finite_differs_and_is_strict_json(environments: Begin, tmp_path: Path) -> None:
    environments({**SAME, "runs/new": (passed(0, "x", loss=math.nan), VERDICT)})
    result = check(tmp_path)
    assert result.result is UpgradeResult.DIFFER
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["quantities"][0]["distance"] == "inf"


def test_the_page_of_a_ci_job_is_appended_and_json_stands_alone(
    environments: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environments(SAME)
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    pythons = [word for python in PYTHONS for word in ("--python", python)]
    typed = ["check-upgrade", str(SAMPLE), *pythons, "--markdown", str(page), "-o", str(tmp_path), "--json"]
    assert main(typed) == 0
    printed = json.loads(capsys.readouterr().out)
    assert_valid("check-upgrade", printed)
    assert [run["environment"]["versions"]["torch"] for run in printed["runs"]] == ["2.10.0", "2.13.0"]
    lines = page.read_text().splitlines()
    assert lines[:2] == ["before", "## replay check-upgrade: AGREE"]
    assert {"| torch | 2.10.0 | 2.13.0 |", "| forward | 250.0 ms | 250.0 ms |"} <= {*lines}


def test_what_cannot_be_checked_is_refused_before_a_replay(
    environments: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = environments(SAME)
    with pytest.raises(UsageError, match="two environments are compared, and 1 given"):
        replay.check_upgrade(SAMPLE, python=["/old/bin/python"], log_folder=tmp_path)
    assert main(["check-upgrade", str(SAMPLE), "--markdown", str(tmp_path / "no" / "x.md")]) == 2
    assert "x.md: No such file or directory. Give a file that can be written" in capsys.readouterr().err
    assert tasks == []


@pytest.mark.slow
def test_an_environment_that_computes_otherwise_is_found_at_the_tensor(tmp_path: Path) -> None:
    """The other environment is this one with another activation function."""
    own = str(warm_bin() / "python")
    (tmp_path / "other.py").write_text(
        "import sys\nimport torch.nn.functional as F\nfrom tests.warm.server import run_python\n"
        "silu = F.silu\nF.silu = lambda x, inplace=False: 1.01 * silu(x)\nrun_python(sys.argv[1:])\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {own} {tmp_path / "other.py"} "$@"\n')
    python.chmod(0o700)
    command = [own, "-m", "replay", "check-upgrade", str(SAMPLE), "--max-inputs", "2", "--json"]
    done = subprocess.run(
        [*command, "--python", own, "--python", str(python), "-o", str(tmp_path)],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert result["result"] == "DIFFER"
    assert result["first_difference"].startswith("forward, model.layers.0.mlp.")


@pytest.mark.slow
def test_an_environment_agrees_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pythons = [str(warm_bin() / "python")] * 2
    result = replay.check_upgrade(SAMPLE, python=pythons, max_inputs=1, num_layers=1, backend="ddp", warmup=0)
    assert capfd.readouterr() == ("", "")
    assert (result.result, result.exit_code) == (UpgradeResult.AGREE, 0)
    assert {quantity.distance for quantity in result.quantities} == {0.0}
    old, new = (run.environment.versions for run in result.runs)
    assert old == new
    assert old["torch"] == version("torch")
    monkeypatch.chdir("/")
    past = replay.open(result.folder)
    assert isinstance(past, PastCampaign)
    assert {*past} == {"old", "new"}, "the folder is known from everywhere"
