"""The plugin: a fixture and a marker that replay captures in a test, and fail with the verdict's explanation."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import replay
from replay.api import logs, running
from replay.command_line import entry
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.findings import Finding, FindingStatus
from replay.verdict.outcomes import Outcome, PassVerdict, Verdict
from tests.helpers.machine import lack_package
from tests.helpers.made_logs import VERDICT, passed, write_log
from tests.helpers.made_records import record

pytest_plugins = "pytester"

# An inner session forgets the modules that it imports. These take seconds, so they are here before.
IMPORTED = (entry, logs, running)
ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "inputs" / "sample"
CAUSE = Cause(name=CauseName.OBJECTIVE, sureness=Sureness.IS, sentence="the loss is another one", explains=[])
WRONG_LOSS = PassVerdict(
    index=0,
    source="x.pkl",
    rank=0,
    outcome=Outcome.DIFFERS,
    reason=None,
    findings=[
        Finding(name="loss", status=FindingStatus.DIFFERS, recorded=2.0, replayed=3.0, difference=0.5, bound=0.1)
    ],
)
WRONG = replace(VERDICT, outcome=Outcome.DIFFERS, reason="why", first=WRONG_LOSS, causes=[CAUSE])
FAILED_PASS = record(0, source="x.pkl", phases={}, loss=None, grad_norm=None, error="out of range", error_type="E")


def run_tests(pytester: pytest.Pytester, text: str) -> pytest.RunResult:
    pytester.makepyfile(f"import pytest\n{text}")
    return pytester.runpytest_inprocess("-p", "replay.pytest_plugin", "--disable-plugin-autoload", "--strict-markers")


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Let each replay come to a made verdict. Returns the list of what replays are asked for."""

    def come_to(verdict: Verdict, *records: Any, exit_code: int = 0) -> list[dict[str, Any]]:
        folder = write_log(tmp_path / "log", records or [passed(0, "x")], verdict=verdict, exit_code=exit_code)
        calls: list[dict[str, Any]] = []

        def run(inputs: Any = None, **options: Any) -> Any:
            calls.append({"inputs": inputs, **options})
            return replay.open(folder)

        monkeypatch.setattr(replay, "run", run, raising=False)
        return calls

    return come_to


def test_a_reproduced_run_passes_and_its_log_lies_below_the_test_s_folder(
    pytester: pytest.Pytester, replayed: Callable[..., list[dict[str, Any]]]
) -> None:
    calls = replayed(VERDICT)
    done = run_tests(
        pytester,
        """
def test_default(replay_capture, tmp_path):
    run = replay_capture("inputs/my-run", model="runs/start", max_inputs=2)
    assert run.verdict.reproduced
    (tmp_path / "own").touch()

def test_given(replay_capture):
    replay_capture("inputs/my-run", log_folder="elsewhere")
""",
    )
    done.assert_outcomes(passed=2)
    first, second = calls
    assert (first["inputs"], first["model"], first["max_inputs"]) == ("inputs/my-run", "runs/start", 2)
    assert (first["log_folder"].parent / "own").exists()
    assert second["log_folder"] == "elsewhere"


@pytest.mark.parametrize("outcome", [Outcome.DIFFERS, Outcome.UNSETTLED, Outcome.CANNOT_TELL])
def test_any_other_verdict_fails_with_its_explanation_and_no_traceback(
    outcome: Outcome, pytester: pytest.Pytester, replayed: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    replayed(replace(WRONG, outcome=outcome))
    done = run_tests(pytester, 'def test_it(replay_capture):\n    replay_capture("inputs/my-run")')
    done.assert_outcomes(failed=1)
    run = replay.open(tmp_path / "log")
    assert isinstance(run, replay.ReplayedRun)
    shown = done.stdout.str().partition("test_it ___")[2].partition("\n")[2].partition("\n====")[0]
    assert shown == f"{run.verdict.explain()}\nlog        {run.folder}"
    assert "\ncause      the loss is another one\n" in shown


def test_a_failed_pass_fails_whatever_the_verdict_on_the_others(
    pytester: pytest.Pytester, replayed: Callable[..., list[dict[str, Any]]]
) -> None:
    replayed(VERDICT, FAILED_PASS, passed(1, "y"), exit_code=1)
    done = run_tests(pytester, "def test_it(replay_capture):\n    replay_capture()")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["problem    1 pass failed"])


def test_a_marked_test_is_the_check_whether_or_not_it_asks_for_the_run(
    pytester: pytest.Pytester, replayed: Callable[..., list[dict[str, Any]]]
) -> None:
    calls = replayed(VERDICT)
    done = run_tests(
        pytester,
        """
@pytest.mark.replay_capture("inputs/my-run", max_inputs=2)
def test_check():
    pass

@pytest.mark.replay_capture("inputs/my-run", max_inputs=3)
def test_run(replayed_run):
    assert replayed_run.verdict.reproduced

@pytest.mark.parametrize("number", [pytest.param(4, marks=pytest.mark.replay_capture(max_inputs=4)), 5])
def test_one_of_two(number):
    pass
""",
    )
    done.assert_outcomes(passed=4)
    assert [call["max_inputs"] for call in calls] == [2, 3, 4]


def test_a_marked_test_fails_before_its_body(
    pytester: pytest.Pytester, replayed: Callable[..., list[dict[str, Any]]]
) -> None:
    replayed(WRONG)
    done = run_tests(pytester, "@pytest.mark.replay_capture()\ndef test_it(replayed_run):\n    raise SystemExit")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["cause      the loss is another one"])


def test_what_cannot_be_replayed_is_one_line(pytester: pytest.Pytester) -> None:
    done = run_tests(
        pytester,
        """
def test_folder(replay_capture):
    replay_capture("nowhere")

def test_option(replay_capture):
    replay_capture(max_input=3)

def test_no_marker(replayed_run):
    pass
""",
    )
    done.assert_outcomes(failed=2, errors=1)
    lines = done.stdout.str().splitlines()
    for heading, line in (
        (
            "test_folder ___",
            "inputs='nowhere': no such folder. Try: replay, for the sample that ships with the project",
        ),
        ("test_option ___", "a replay has no option max_input. Did you mean max_inputs?"),
        ("setup of test_no_marker ___", "replayed_run needs a marker: @pytest.mark.replay_capture("),
    ):
        [place] = [number for number, text in enumerate(lines) if heading in text]
        assert lines[place + 1].startswith(line)
        assert lines[place + 2].startswith(("___", "==="))


def test_where_only_capture_can_be_used_a_test_says_what_to_install(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack_package("jinja2", monkeypatch)
    done = run_tests(pytester, "def test_it(replay_capture):\n    replay_capture()\ndef test_other():\n    pass")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["replaying needs jinja2, * Try: pip install 'micro-replay?replay?'"])


def test_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, pytest; before = {*sys.modules}; import replay.pytest_plugin;"
        "print(sorted(name for name in {*sys.modules} - before if name not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['replay', 'replay.pytest_plugin']\n"


def test_pytest_rewrites_the_assertions_of_its_file_alone(pytester: pytest.Pytester) -> None:
    done = run_tests(
        pytester,
        """
def test_it(request):
    import replay.api
    hook = request.config.pluginmanager.rewrite_hook
    assert hook.find_spec("replay.pytest_plugin", replay.__path__) is not None
    assert hook.find_spec("replay.api.run", replay.api.__path__) is None
""",
    )
    done.assert_outcomes(passed=1)


def test_an_installed_package_is_in_no_session_that_does_not_ask_for_it() -> None:
    """With such an entry point pytest would rewrite the assertions of all files of the distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "pytest11" not in project.get("entry-points", {})


@pytest.mark.slow
def test_the_sample_is_replayed_and_another_actor_fails_with_the_cause(pytester: pytest.Pytester) -> None:
    done = run_tests(
        pytester,
        f"""
INPUTS = {str(SAMPLE)!r}

@pytest.mark.replay_capture(INPUTS, max_inputs=2)
def test_same():
    pass

def test_shorter(replay_capture):
    replay_capture(INPUTS, max_inputs=2, num_layers=1)

def test_other_weights(replay_capture):
    replay_capture(INPUTS, max_inputs=2, weights_seed=3)
""",
    )
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(
        [
            "verdict    UNSETTLED: loss of pass 1, *",
            "cause      *",
            "verdict    CANNOT TELL: other weights",
            "cause      the replay runs on other weights than pass 1 did: *",
        ]
    )
