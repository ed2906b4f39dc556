"""An objective that is one file and one entry in the registry is computed, named, listed and refused like others."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from actor_init.spec import UsageError
from replay.command_line.cli import main
from replay.objective.objective import Objective
from replay.options.declarations import OBJECTIVES
from replay.options.option_parsing import (
    build_replay_spec,
    format_command_line,
    format_error_with_flags,
    spec_from_dict,
    spec_to_dict,
)
from replay.options.spec import ObjectiveSpec
from tests.helpers.made_captures import write_config, write_pass
from tests.helpers.policy_job import train
from tests.helpers.read_logs import read_log
from tests.helpers.toy_objective import FORMULA, TOY

ROOT = Path(__file__).parents[3]
# A step's gradient is the mean over its two passes, where the toy's passes add up.
OWN = """
def loss(inputs):
    total = (inputs.log_probs_BA * inputs.of_tokens("advantages")).sum()
    return -3.0 * inputs.num_window_passes * total / inputs.num_window_tokens
"""


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, TOY.name, TOY)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("job"))


def replay(job: Path, logs: Path, *typed: str) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, gradient norms and run.json."""
    command = ["--inputs", str(job / "captures"), "--model", str(job / "model"), "--backend", "ddp", "--dtype", "fp32"]
    assert main([*command, "--grad-accumulation", "2", "--log-folder", str(logs), *typed]) == 0
    (log,) = logs.iterdir()
    results = [record.result for record in read_log(log)[1]]
    losses = [result.loss for result in results if result.loss is not None]
    norms = [result.grad_norm for result in results if result.grad_norm is not None]
    return losses, norms, json.loads((log / "run.json").read_text())


@pytest.mark.usefixtures("one_world", "register")
def test_it_is_computed_as_the_same_function_of_a_user_s_and_is_named(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, norms, run = replay(job, tmp_path / "toy", "--loss", "toy", "--kl-coefficient", "3")
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("loss"))
    assert header.split(maxsplit=1)[1] == "toy, times 3"
    assert run["spec"]["measure"]["loss"] == "toy"
    (tmp_path / "own.py").write_text(OWN)
    of_user, norms_of_user, _ = replay(job, tmp_path / "own", "--loss", f"{tmp_path}/own.py:loss")
    assert (len(losses), len(norms)) == (4, 2)
    # fp32 sums of some twenty tokens' log-probs, in another order
    assert [2 * loss for loss in losses] == pytest.approx(of_user, rel=1e-5)
    assert norms == pytest.approx(norms_of_user, rel=1e-5)


@pytest.mark.usefixtures("one_world", "register")
def test_what_a_capture_lacks_is_said_before_a_model_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pass(tmp_path)
    write_config(tmp_path)
    assert main(["--inputs", str(tmp_path), "--loss", "toy"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("replay: --loss toy: ")
    assert "no advantages in this capture" in said
    assert said.endswith("(docs/objectives.md); or --loss sft\n")


@pytest.mark.usefixtures("register")
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"loss": "tou"}, "Give one of auto, stand-in, sft, policy, dpo, recorded, toy, or FILE.py:FUNCTION"),
        ({"loss": "toy", "dpo_beta": "0.3"}, "--dpo-beta is a setting of --loss dpo. Try: --loss dpo"),
        ({"loss": "dpo", "kl_coefficient": "1"}, "--kl-coefficient is a setting of --loss policy. Try: --loss policy"),
        ({"loss": "toy", "window": "mean-of-means"}, "--loss toy weighs each pass by its own reduction"),
    ],
)
def test_settings_that_it_does_not_take_are_refused(typed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as refusal:
        build_replay_spec(typed)
    assert said in format_error_with_flags(refusal.value)


@pytest.mark.usefixtures("register")
def test_specs_know_it() -> None:
    spec = build_replay_spec({"loss": "toy", "kl_coefficient": "2"})
    assert format_command_line(spec) == ["--loss", "toy", "--kl-coefficient", "2.0"]
    assert spec_from_dict(spec_to_dict(spec)) == spec
    objective = Objective.open(spec)
    assert objective is not None
    assert (objective.formula, objective.needs_logits_or_entropies, objective.sums_over_window) == (
        FORMULA,
        False,
        True,
    )


def test_help_lists_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.toy_objective", "--help-all"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    words = " ".join(done.stdout.split())
    assert "--loss auto|stand-in|sft|policy|dpo|recorded|toy|FILE.py:FUNCTION" in words
    assert "recorded: the job's own, read from its gradient. toy: the advantages' share of the window. FILE.py" in words


def test_without_its_entry_nobody_knows_it() -> None:
    with pytest.raises(
        UsageError, match=r"'toy' is not allowed. Give one of auto, stand-in, sft, policy, dpo, recorded, or FILE"
    ):
        build_replay_spec({"loss": "toy"})


def test_every_setting_is_some_objective_s_and_every_declared_one_is_there() -> None:
    declared = [option for objective in OBJECTIVES.values() for option in objective.own_options]
    assert {field.name for field in fields(ObjectiveSpec)} == set(declared)
