"""Check in pytest that a model still computes what a recorded job computed.

    pytest_plugins = ["replay.pytest_plugin"]

    def test_the_model_computes_what_the_job_did(replay_capture):
        replay_capture("inputs/my-run", model="runs/start", max_inputs=2)

    @pytest.mark.replay_capture("inputs/my-run", model="runs/start", max_inputs=2)
    def test_the_loss_is_small(replayed_run):
        assert replayed_run.records[0].result.loss < 6

A project asks for it: `pytest_plugins = ["replay.pytest_plugin"]` in its conftest.py. As an entry point it would be in
every session of an environment that has micro-replay, and pytest would rewrite the assertions of the whole package: it
does so for all files of a distribution with a plugin. The file runs where only `capture` is installed, on Python 3.10.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import pytest

if TYPE_CHECKING:
    from replay.api.run import ReplayedRun

MARKER = "replay_capture"
RUN = "replayed_run"


class ReplayCapture(Protocol):
    """What the fixture `replay_capture` is."""

    def __call__(self, inputs: "str | Path | None" = None, **options: Any) -> "ReplayedRun": ...


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(inputs, **options): replay the captures in a folder, as replay.run does, before the test; it fails "
        f"unless the verdict is REPRODUCED. The fixture {RUN} is that run.",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a marked test the run, whether or not it asks for it."""
    if isinstance(item, pytest.Function) and item.get_closest_marker(MARKER) and RUN not in item.fixturenames:
        # A list of its own: a function's tests share one, and of several parameters one may be marked.
        item.fixturenames = [*item.fixturenames, RUN]


@pytest.fixture
def replay_capture(tmp_path: Path) -> ReplayCapture:
    """Replay captures as `replay.run` does, and fail unless the verdict is REPRODUCED. Returns the run."""

    def replay_and_check(inputs: "str | Path | None" = None, **options: Any) -> "ReplayedRun":
        run = _replay(tmp_path, inputs, **options)
        _check(run)
        return run

    return replay_and_check


@pytest.fixture
def replayed_run(request: pytest.FixtureRequest, tmp_path: Path) -> "ReplayedRun":
    """The run that the marker `replay_capture` asks for."""
    marker = request.node.get_closest_marker(MARKER)
    if marker is None:
        pytest.fail(f'{RUN} needs a marker: @pytest.mark.{MARKER}("inputs/my-run", max_inputs=2)', pytrace=False)
    return _replay(tmp_path, *marker.args, **marker.kwargs)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Check the run of a marked test. Here, so that it is a failure of the test, and not an error of its setup."""
    if isinstance(item, pytest.Function) and item.get_closest_marker(MARKER):
        _check(cast("ReplayedRun", item.funcargs[RUN]))


def _replay(logs: Path, *inputs: Any, **options: Any) -> "ReplayedRun":
    """Replay, with the log below `logs` unless the options say where. What cannot be replayed fails in one line."""
    from replay.command_line.entry import complaint

    refusal = complaint([], sys.version_info[:2])
    if refusal is None:
        import replay

        try:
            return replay.run(*inputs, **{"log_folder": logs / "replay", **options})
        except (replay.UsageError, replay.RunFailedError) as error:
            refusal = str(error)
    pytest.fail(refusal, pytrace=False)


def _check(run: "ReplayedRun") -> None:
    """Fail unless every pass was replayed, and the verdict is REPRODUCED.

    CANNOT TELL fails, too: it is the verdict on other weights, and a check that compared nothing must not be green.
    """
    if run.exit_code == 0 and run.verdict.reproduced:
        return
    lines = [run.verdict.explain()] if run.has_verdict else []
    lines += [f"problem    {problem}" for problem in run.problems]
    pytest.fail("\n".join([*lines, f"log        {run.folder}"]), pytrace=False)
