"""A wrong update shows in the weights behind the step that made it, and a turned sign of one element does not."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from replay.tolerances.job_bounds import GRADIENT, STEPPED, NoiseFloor
from replay.verdict.findings import FindingStatus, VerdictSettings, judge_number
from replay.verdict.gradient_findings import ComparedPass
from replay.verdict.gradient_samples import GradientSamples
from replay.verdict.recorded_pass import RecordedPass, ReplayedPass, SteppedSample, WeightComparison
from replay.verdict.stepped_weights import compare_stepped_weights, judge_stepped_samples, measure_drift
from tests.helpers.made_records import record

BEGIN = (0.5, -0.5, 0.25, 1.0)
UPDATE = (0.01, 0.01, -0.01, 0.01)
SETTINGS = VerdictSettings(dtype="float32", num_layers=2, num_data_ranks=1, grad_accumulation=1)
RIGHT = tuple(begin + update for begin, update in zip(BEGIN, UPDATE, strict=True))


def make_sample(job: tuple[float, ...], name: str = "weight", dtype: str = "float32") -> SteppedSample:
    return SteppedSample(name=name, dtype=dtype, start=0, job_values=job, replay_values=RIGHT, initial_values=BEGIN)


def make_pass(
    index: int,
    *samples: SteppedSample,
    norms: Mapping[str, float] = MappingProxyType({}),
    num_steps: int = 0,
    num_steps_of_job: int | None = None,
) -> ComparedPass:
    gradient = GradientSamples(norms={"weight": 1.0, **norms}, sizes=dict.fromkeys(["weight", *norms], 4), values={})
    recorded = RecordedPass(
        rank=0,
        forward_number=0,
        world_size=1,
        trains=True,
        claims=[],
        weight_comparison=WeightComparison(),
        num_frozen=0,
        dtypes=["float32"],
        num_steps_before=num_steps_of_job,
    )
    return ComparedPass(
        record=record(index, num_steps=num_steps),
        recorded=recorded,
        replayed=ReplayedPass(gradient=gradient, weights_before_pass=samples),
        findings=[],
        weight_comparison=WeightComparison(),
        previous_pass_has_grad_norm=False,
    )


def compare(*samples: SteppedSample, settings: VerdictSettings = SETTINGS, **norms: float) -> Any:
    return judge_stepped_samples(samples, [make_pass(0, norms=norms)], settings)


def test_the_same_update_agrees() -> None:
    finding = compare(make_sample(RIGHT))
    assert (finding.name, finding.status, finding.difference) == (STEPPED, FindingStatus.AGREES, 0.0)


@pytest.mark.parametrize("times", [0.0, 0.5, 2.0, -1.0])
def test_another_update_differs(times: float) -> None:
    job = tuple(begin + times * update for begin, update in zip(BEGIN, UPDATE, strict=True))
    finding = compare(make_sample(job))
    assert finding.status is FindingStatus.DIFFERS
    assert finding.difference == pytest.approx(abs(times - 1))


@pytest.mark.parametrize(("num_steps", "is_compared"), [(4, True), (3, False), (5, False), (None, False)])
def test_weights_are_compared_where_job_and_replay_took_one_step(num_steps: int | None, is_compared: bool) -> None:
    """A step of the job between, of which no pass is recorded, moves its weights once more."""
    agreeing = judge_number(GRADIENT, 1.0, 1.0, difference=0.0, bound=1e-3)
    before = replace(make_pass(0, num_steps_of_job=3), window_findings=[agreeing])
    after = make_pass(1, make_sample(RIGHT), num_steps=1, num_steps_of_job=num_steps)
    assert list(compare_stepped_weights([[before]], [before, after], SETTINGS)) == [0] * is_compared


def test_two_elements_that_went_the_other_way_are_rounding() -> None:
    job = (BEGIN[0] - UPDATE[0], BEGIN[1] - UPDATE[1], *RIGHT[2:])
    assert compare(make_sample(job)).status is FindingStatus.AGREES


def test_a_gradient_of_rounding_alone_judges_nothing() -> None:
    assert compare(make_sample(BEGIN, name="bias"), bias=1e-6) is None


def test_where_the_dtype_is_as_coarse_as_the_update_nothing_is_judged() -> None:
    finding = compare(make_sample(RIGHT, dtype="bfloat16"))
    assert (finding.status, finding.is_evidence) == (FindingStatus.NOT_JUDGED, False)


def test_a_parameter_that_the_replay_did_not_move_tells_nothing() -> None:
    sample = SteppedSample(
        name="weight", dtype="float32", start=0, job_values=RIGHT, replay_values=BEGIN, initial_values=BEGIN
    )
    assert measure_drift(sample) is None


@pytest.mark.parametrize(
    ("number", "times", "status"),
    [
        (8, 1.0, FindingStatus.AGREES),
        (8, 0.2, FindingStatus.DIFFERS),
        (7, 0.2, FindingStatus.NOT_JUDGED),
    ],
)
def test_where_rounding_hides_one_parameters_update_half_of_them_are_judged(
    number: int, times: float, status: FindingStatus
) -> None:
    """As an average of the weights that stays in: all parameters come a part of the way."""
    job = tuple(begin + times * update for begin, update in zip(BEGIN, UPDATE, strict=True))
    names = [f"layers.{layer}.weight" for layer in range(number)]
    samples = [make_sample(job, name) for name in names]
    finding = compare(*samples, settings=replace(SETTINGS, dtype="bfloat16"), **dict.fromkeys(names, 1.0))
    assert finding.status is status


def test_one_parameter_of_eight_that_rounding_turned_is_none() -> None:
    names = [f"layers.{layer}.weight" for layer in range(8)]
    turned = tuple(begin - 0.9 * update for begin, update in zip(BEGIN, UPDATE, strict=True))
    samples = [make_sample(RIGHT if layer else turned, name) for layer, name in enumerate(names)]
    settings = replace(SETTINGS, dtype="bfloat16", floors={GRADIENT: NoiseFloor(value=0.5, num_values=9)})
    finding = compare(*samples, settings=settings, **dict.fromkeys(names, 1.0))
    assert (finding.status, finding.difference) == (FindingStatus.AGREES, 0.0)
