"""Frozen weights that a job changed are told from those that it trains, and from those that keep their values."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from capture.file_format.optimizer_step import Sample
from replay.tolerances.job_bounds import STEPPED
from replay.verdict.findings import FindingStatus
from replay.verdict.frozen_weights import LEAST_CHANGE, find_frozen_changes
from replay.verdict.gradient_findings import ComparedPass
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from replay.verdict.stepped_weights import compare_stepped_weights
from tests.replay.verdict.causes.made_evidence import NAMES, SETTINGS, draw_gradients, make_window

FROZEN = "model.norm.weight"


def make_passes(values: Sequence[float], name: str = FROZEN, num_frozen: int = 1) -> list[ComparedPass]:
    """Passes before whose steps an element of that parameter had these values; another one is 1."""
    gradients = draw_gradients()
    passes = []
    for index, value in enumerate(values):
        [compared] = make_window([gradients], gradients, index=index)
        weights = replace(compared.recorded.weight_comparison, num_parameters=len(NAMES) + 1)
        sample = Sample(name=name, dtype="float32", shape=(4,), start=8, values=(1.0, value))
        recorded = replace(
            compared.recorded, samples=[sample], num_frozen=num_frozen, weight_comparison=weights, rank=0
        )
        record = replace(compared.record, result=replace(compared.record.result, num_steps=index))
        passes.append(replace(compared, recorded=recorded, record=record))
    return passes


def test_a_change_is_found_with_the_steps_around_it() -> None:
    [change] = find_frozen_changes(make_passes([0.5, 0.5, 0.25, 0.25]), SETTINGS)
    assert (change.name, change.step_before, change.step_after) == (FROZEN, 1, 2)
    assert change.largest == (9, 0.5, 0.25)


@pytest.mark.parametrize(
    "passes",
    [
        make_passes([0.5, 0.5]),
        make_passes([0.5, 0.5 * (1 + LEAST_CHANGE)]),
        make_passes([0.5, float("nan")]),
        # The job trains it.
        make_passes([0.5, 0.25], name=NAMES[0]),
        # It trains another number of parameters than the replay.
        make_passes([0.5, 0.25], num_frozen=0),
    ],
)
def test_weights_that_stay_round_or_are_trained_are_no_change(passes: Sequence[ComparedPass]) -> None:
    assert find_frozen_changes(passes, SETTINGS) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"follows_frozen": True},
        {
            "model_differences": [
                ModelDifference(kind=ModelDifferenceKind.FROZEN, where=FROZEN, job="trained", replay="frozen")
            ]
        },
    ],
)
def test_nothing_is_found_where_the_job_trains_other_parameters(settings: Any) -> None:
    assert find_frozen_changes(make_passes([0.5, 0.25]), replace(SETTINGS, **settings)) == []


def test_the_step_behind_which_they_are_other_ones_differs() -> None:
    passes = make_passes([0.5, 0.5, 0.25, 0.25])
    findings = compare_stepped_weights([[compared] for compared in passes], passes, SETTINGS)
    finding = findings[1]
    assert list(findings) == [1]
    assert (finding.name, finding.status) == (STEPPED, FindingStatus.DIFFERS)
    assert (finding.recorded, finding.replayed) == (0.25, 0.5)
    assert finding.where == f"{FROZEN}, element 9, frozen"
