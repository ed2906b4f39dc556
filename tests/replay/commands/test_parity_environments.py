"""`parity --python`: what is planned for several environments, what is refused, and who runs a cell."""

import math
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from actor_init.spec import UsageError
from replay.agreement.plan import ParityPlan, Role, repeat_in_environments
from replay.agreement.rows import ParityLog
from replay.campaign.campaign import Campaign
from replay.commands.parity.text import format_header, list_commands
from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import ReplaySpec
from replay.processes.child_job import ChildJob
from replay.processes.interpreter import Environment, probe
from replay.processes.pool import Machine, RunHere, Task
from tests.helpers.planning import planned
from tests.helpers.repeated import repeated_by

OLD = Environment(python="/old/bin/python", versions={"torch": "2.8.0", "transformers": "4.57.6", "deepspeed": None})
NEW = Environment(python="/new/bin/python", versions={"torch": "2.8.0", "transformers": "5.23.0", "deepspeed": None})


def plan() -> ParityPlan:
    return repeat_in_environments(planned([{"backend": "ddp", "dtype": "fp32"}]), [OLD, NEW])


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def test_an_interpreter_is_asked_for_what_it_has() -> None:
    found = probe(sys.executable)
    assert found.versions["torch"] == version("torch")
    assert found.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found.python == sys.executable


def test_what_is_no_environment_for_a_replay_is_refused_in_one_line(tmp_path: Path) -> None:
    bare = program(tmp_path / "bare", f'exec {sys.executable} -S "$@"')
    old = program(tmp_path / "old", "echo '[{}, \"it is too old: Python 3.8\"]'")
    silent = program(tmp_path / "silent", "exit 3")
    for python, line in {
        str(tmp_path / "nowhere"): "No such file or directory. Give the path of an interpreter, such as old/bin/python",
        bare: f"it has no micro-replay. Try: {bare} -m pip install 'micro-replay[replay]'",
        old: "it is too old: Python 3.8. Give an environment of Python 3.11 or later",
        silent: "it does not answer as a Python does. Give the path of one",
    }.items():
        with pytest.raises(UsageError) as refusal:
            probe(python)
        assert format_error_with_flags(refusal.value) == f"--python {python}: {line}"


def test_the_others_run_every_configuration_against_the_first_ones_reference() -> None:
    cells = {cell.name: cell for cell in plan().cells}
    suffix = ", env 2: transformers 5.23.0"
    others = {name: cell for name, cell in cells.items() if name.endswith(suffix)}
    firsts = {name: cell for name, cell in cells.items() if name not in others}
    assert {cell.python for cell in firsts.values()} == {OLD.python}
    assert {cell.python for cell in others.values()} == {NEW.python}
    assert {cell.role for cell in others.values()} == {Role.CELL}
    assert {cell.reference for cell in others.values()} <= {
        name for name, cell in firsts.items() if cell.role is Role.REFERENCE
    }
    repeats = {name for name, cell in firsts.items() if cell.varies in ("the same again", "row order")}
    assert {name.removesuffix(suffix) for name in others} == firsts.keys() - repeats
    assert len(repeats) == 2
    assert all(cell.spec == firsts[name.removesuffix(suffix)].spec for name, cell in others.items())


def test_the_log_keeps_the_environments_and_says_their_versions(tmp_path: Path) -> None:
    machine = Machine(num_devices=2, has_gpus=False)
    campaign = Campaign.begin("parity", tmp_path, plan(), arguments=[], machine=machine)
    again = ParityLog.read(campaign.folder)
    assert again.campaign.plan == campaign.plan
    assert again.campaign.plan.environments == [OLD, NEW]
    said = dict(format_header(again))
    assert said["env 2"] == "/new/bin/python: torch 2.8.0, transformers 5.23.0, no deepspeed"
    shown = list_commands(again)
    assert shown[0].startswith("/old/bin/python -m replay --backend fsdp2")
    assert [repeated_by(line) for line in shown] == [
        (cell.spec, cell.num_processes, cell.python) for cell in again.campaign.plan.cells
    ]


def test_a_run_is_started_by_its_own_interpreter_without_this_ones_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/this/one")
    monkeypatch.setenv("RANK", "0")
    python = program(tmp_path / "python", 'printf "replay: %s|" "$PYTHONPATH" "$RANK" "$@"; exit 2')
    job = ChildJob(spec=ReplaySpec())
    task = Task.for_attempt(tmp_path / "home", job, num_processes=1, limit=math.inf, python=python)
    [(_, child)] = RunHere(at_once=1)([(None, task)])
    assert child.is_refusal
    said = task.output.read_text().replace("replay: ", "").split("|")
    assert said == ["", "", "-u", "-P", "-m", "replay", "--job", str(task.logs / "job.json"), ""]
