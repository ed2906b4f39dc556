"""The workflow and .ci/run share their commands; the conda recipe asks for what pyproject.toml asks for."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
SCRIPT = (ROOT / ".ci/run").read_text()
STEPS = set(re.findall(r"^    (\w+)\) commands=", SCRIPT, re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def read_jobs() -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]
    return jobs


def test_each_job_of_the_workflow_is_the_step_of_its_name() -> None:
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in read_jobs().items()}
    assert {name: lines[-1] for name, lines in commands.items()} == {name: f".ci/run {name}" for name in STEPS}
    # Each installs with the pins that .ci/run installs with.
    assert all(lines[0].startswith("pip install -c constraints.txt ") for lines in commands.values())


def test_the_workflow_tests_the_pythons_that_the_metadata_names_and_can_replay() -> None:
    tested = read_jobs()["tests"]["strategy"]["matrix"]["python"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert ["3.10", *tested] == named  # 3.10 records alone
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_without_arguments_the_script_runs_all_but_docs_and_wheel() -> None:
    (by_default,) = re.findall(r"^  set -- (.*)$", SCRIPT, re.MULTILINE)
    assert set(re.split("[ +]", by_default)) == STEPS - {"docs", "wheel"}


def test_both_tiers_in_one_run_are_all_tests(request: pytest.FixtureRequest) -> None:
    (words,) = re.findall(r"^    tests\+slow\) commands=\('pytest (.*)'\)", SCRIPT, re.MULTILINE)
    typed = [*request.config.getini("addopts"), *words.split()]
    assert request.config._parser.parse(typed).markexpr == ""


def test_a_step_that_is_not_there_is_refused_with_those_that_are() -> None:
    done = subprocess.run(["bash", str(ROOT / ".ci/run"), "test"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(".ci/run: test is not a step; steps are lint, tests, slow, docs and wheel. Try: ")


def test_the_conda_recipe_needs_what_the_extra_needs() -> None:
    recipe = yaml.safe_load((ROOT / "deploy/recipe.yaml").read_text())
    of_extra = {re.sub("^torch ", "pytorch ", line.replace(">=", " >=")) for line in EXTRAS["replay"]}
    assert set(recipe["requirements"]["run"]) == {"python >=3.11", *of_extra}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {line.replace(">=", " >=") for line in build} <= set(recipe["requirements"]["host"])
    assert recipe["about"]["summary"] == f"{PROJECT['description']}"
