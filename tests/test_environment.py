"""What tests see of the environment of whoever runs them."""

import os
import subprocess

import pytest

from tests.helpers.commands import LIMIT, ROOT
from tests.warm import warm_bin

USERS = {  # a dumb terminal, a narrow one, no colours; and what GitHub's runners say to typer
    "TERM": "dumb",
    "NO_COLOR": "1",
    "COLUMNS": "40",
    "GITHUB_ACTIONS": "true",
    "RANK": "1",
}


def test_no_test_of_the_console_reads_a_variable_of_the_user() -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [str(warm_bin() / "python"), "-m", "pytest", "-n", "0", "tests/replay/output/test_text.py"],
        cwd=ROOT,
        env=own | USERS,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_with_slow_tests_start_before_others(request: pytest.FixtureRequest) -> None:
    """Where both tiers run at once: a worker that took one of them last would keep the others waiting."""
    items = [item for item in request.session.items if item.get_closest_marker("long") is None]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = [path in slow for path in dict.fromkeys(item.path for item in items)]
    assert order == sorted(order, reverse=True)
