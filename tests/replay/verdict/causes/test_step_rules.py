"""A state of the job's optimizer is the cause of numbers behind its step, and of none before."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from capture.file_format.optimizer_step import OptimizerStep
from replay.tolerances.job_bounds import GRADIENT, LOSS
from replay.verdict.causes.cause import CauseName
from replay.verdict.causes.evidence import Evidence
from replay.verdict.causes.step_rules import find_other_state
from replay.verdict.findings import make_finding
from replay.verdict.outcomes import Outcome, PassVerdict
from replay.verdict.pass_values import OPTIMIZER_STATE
from tests.replay.verdict.causes.made_evidence import SETTINGS

pytestmark = pytest.mark.quick


def make_evidence(*verdicts: PassVerdict, counted: int = 3, **settings: Any) -> Evidence:
    """Make two passes, each before a step; the optimizer began with a state of `counted` steps."""
    passes: list[Any] = []
    for number in range(2):
        step = OptimizerStep(
            number=number, passes=(number,), shares=(1.0,), has_state=True, state_steps=(counted + number,)
        )
        recorded = SimpleNamespace(rank=0, num_steps_before=number, step_after=step)
        passes.append(SimpleNamespace(record=SimpleNamespace(index=number), recorded=recorded))
    return Evidence(
        passes=passes,
        windows=[[member] for member in passes],
        verdicts=verdicts,
        settings=replace(SETTINGS, **settings),
        environment={},
    )


def make_wrong(index: int, name: str, *, optimizer_step: int | None = None) -> PassVerdict:
    return PassVerdict(
        index=index,
        source="",
        rank=0,
        outcome=Outcome.DIFFERS,
        reason=None,
        findings=[make_finding(name, 1.0, 2.0, difference=1.0, bound=0.1)],
        optimizer_step=optimizer_step,
    )


@pytest.mark.parametrize(
    "wrong",
    [make_wrong(1, LOSS), make_wrong(0, OPTIMIZER_STATE, optimizer_step=0), make_wrong(1, GRADIENT, optimizer_step=1)],
)
def test_a_state_explains_what_comes_behind_its_step(wrong: PassVerdict) -> None:
    cause = find_other_state(make_evidence(wrong))
    assert cause is not None
    assert cause.name is CauseName.OPTIMIZER_STATE
    assert cause.sentence.startswith("the optimizer held the state of 3 steps before step 1")


@pytest.mark.parametrize("wrong", [make_wrong(0, LOSS), make_wrong(0, GRADIENT, optimizer_step=0)])
def test_it_explains_nothing_before(wrong: PassVerdict) -> None:
    assert find_other_state(make_evidence(wrong)) is None


def test_a_state_that_the_replay_was_given_explains_nothing() -> None:
    assert find_other_state(make_evidence(make_wrong(1, LOSS), loaded_counts=(3,))) is None


def test_a_job_without_a_wrong_number_has_no_cause() -> None:
    assert find_other_state(make_evidence()) is None
