"""The table of published bugs is whole. Its runs need other releases, and are not for here."""

import pytest

from benchmarks.published_bugs.__main__ import JOBS
from benchmarks.published_bugs.bugs import BUGS, Bug
from benchmarks.published_bugs.environments import Environment


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_a_bug_is_shown_in_two_ways(bug: Bug) -> None:
    assert bool(bug.job) != bool(bug.cells), "a job or a matrix"
    assert bug.broken != bug.fixed or bug.fixed_job, "another release, or another job"
    assert all((JOBS / f"{job[0]}.py").is_file() for job in (bug.job, bug.fixed_job) if job)


def test_environments_are_told_apart_by_their_first_package() -> None:
    environments: list[Environment] = [environment for bug in BUGS.values() for environment in (bug.broken, bug.fixed)]
    by_name = {environment.name: environment for environment in environments}
    assert all(by_name[environment.name] == environment for environment in environments)
    assert all("==" in environment.packages[0] for environment in environments if environment.packages)
