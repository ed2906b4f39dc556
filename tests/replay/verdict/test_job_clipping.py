"""A norm that several steps share shows the limit of a clipping that no recording sees: made steps."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from capture.file_format.gradient_signature import GradientSignature
from capture.file_format.optimizer_step import OptimizerStep
from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT_NORMS, LOSS
from replay.verdict.gradient_findings import collect_gradient_evidence
from replay.verdict.gradient_samples import GradientSamples
from replay.verdict.job_clipping import clip_as_the_job, infer_own_clipping_limit
from replay.verdict.judge import PassEvidence, judge
from replay.verdict.outcomes import Verdict
from replay.verdict.recorded_pass import Claim
from tests.replay.verdict.causes.made_evidence import (
    SETTINGS,
    draw_gradients,
    make_window,
    measure_norm,
    scale_gradients,
)


def make_step(number: int, norms: Sequence[float], *, is_part: bool = False, **step: float) -> OptimizerStep:
    signatures = tuple(
        GradientSignature(name=str(place), shape=(8,), is_part=is_part, norm=norm, start=0, stride=1, values=())
        for place, norm in enumerate(norms)
    )
    return OptimizerStep(number=number, passes=(number,), shares=(1.0,), signatures=signatures, **step)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("norms", "limit"),
    [
        ([0.5, 0.3, 0.499999], 0.5),
        ([0.5, 0.3, 0.2], None),
        ([0.5, 0.7, 0.5], None),
        # The same batch again and again, at next to no rate.
        ([0.6173, 0.6173, 0.6173], None),
    ],
)
def test_two_steps_of_one_round_norm_that_none_is_above_were_clipped(
    norms: Sequence[float], limit: float | None
) -> None:
    steps = [[make_step(number, [0.6 * norm, 0.8 * norm])] for number, norm in enumerate(norms)]
    assert infer_own_clipping_limit(steps) == limit
    assert infer_own_clipping_limit([[replace(step, max_norm=9.0) for step in ranks] for ranks in steps]) is None


def test_the_norms_of_shards_add_up_and_those_of_whole_gradients_are_one() -> None:
    ranks = [make_step(0, [0.6]), make_step(0, [0.8])]
    sharded = [make_step(0, [0.6], is_part=True), make_step(0, [0.8], is_part=True)]
    assert infer_own_clipping_limit([sharded, sharded]) == 1.0
    assert infer_own_clipping_limit([ranks, ranks]) != 1.0


def test_the_replays_gradient_is_clipped_as_the_jobs_was() -> None:
    gradients = draw_gradients()
    window = make_window([scale_gradients(gradients, 0.5 / measure_norm(gradients))], gradients)
    clipped = clip_as_the_job(window, replace(SETTINGS, job_code_clip_norm=0.5))
    evidence = collect_gradient_evidence(clipped)
    assert evidence is not None
    assert all(parameter.ratio == pytest.approx(1.0) for parameter in evidence.parameters.values())
    assert [member.record.result.grad_norm for member in clipped] == [0.5]
    # A shorter gradient stays as it is.
    assert clip_as_the_job(window, replace(SETTINGS, job_code_clip_norm=1e9)) == window


def test_all_that_is_known_of_the_replays_gradient_is_clipped() -> None:
    """A norm of 5 is clipped to 1, so that each number becomes a fifth; sizes are no gradient."""
    [member] = make_window([draw_gradients()], draw_gradients())
    gradient = GradientSamples(
        norms={"a": 3.0, "b": 4.0},
        sizes={"a": 10, "b": 20},
        values={("a", 5): (1.0, -2.0)},
        signatures={("b", 0): (0.5, 4.0)},
    )
    result = replace(member.record.result, grad_norm=5.0)
    member = replace(
        member,
        record=replace(member.record, result=result),
        replayed=replace(member.replayed, gradient=gradient),
    )
    [clipped] = clip_as_the_job([member], replace(SETTINGS, job_code_clip_norm=1.0))
    found = clipped.replayed.gradient
    assert found is not None
    assert clipped.record.result.grad_norm == 1.0
    assert found.norms == pytest.approx({"a": 0.6, "b": 0.8})
    assert found.sizes == {"a": 10, "b": 20}
    assert found.values == {("a", 5): pytest.approx((0.2, -0.4))}
    assert found.signatures == {("b", 0): pytest.approx((0.1, 0.8))}
    # Without a norm nothing is known of its length.
    bare = replace(member, record=replace(member.record, result=replace(result, grad_norm=None)))
    assert clip_as_the_job([bare], replace(SETTINGS, job_code_clip_norm=1.0)) == [bare]


def judge_clipping_job(limit: float | None, factors: Sequence[float] = (1.0, 1.0, 1.0)) -> Verdict:
    """Judge three steps of a job that clipped to a norm of 2 by code of its own, beside a replay that does not.

    Of the gradients, which a replay has as they are, the last is shorter than that.

    limit    what the replay's are clipped to before they are compared; None: they are not
    factors  what else the job did to the gradient of a parameter in each step
    """
    passes: list[PassEvidence] = []
    for index, (norm, factor) in enumerate(zip((6.0, 8.0, 1.5), factors, strict=True)):
        drawn = draw_gradients(index)
        gradients = scale_gradients(drawn, norm / measure_norm(drawn))
        of_job = scale_gradients(gradients, min(1.0, 2.0 / norm))
        [member] = make_window([scale_gradients(of_job, factor, only="layers.1.mlp")], gradients, index=index)
        step = member.recorded.step_after
        assert step is not None
        # The loss agrees, so that the replay computes the job's objective.
        loss = Claim(name=LOSS, values=[1.5], num_tokens=[80])
        of_step = replace(step, grad_norm=min(norm, 2.0))
        recorded = replace(member.recorded, claims=(loss,), step_after=of_step)
        result = replace(member.record.result, loss=1.5, row_action_tokens=[30, 50])
        record = replace(member.record, result=result)
        passes.append(PassEvidence(record=record, recorded=recorded, replayed=member.replayed))
    return judge(passes, replace(SETTINGS, job_code_clip_norm=limit))


@pytest.mark.parametrize(
    ("limit", "factors", "outcomes"),
    [
        (2.0, (1.0, 1.0, 1.0), ["REPRODUCED", "REPRODUCED", "REPRODUCED"]),
        # That it is clipped hides no other fault.
        (2.0, (1.0, 1.1, 1.0), ["REPRODUCED", "DIFFERS", "REPRODUCED"]),
        (2.0, (1.0, 1.0, 1.1), ["REPRODUCED", "REPRODUCED", "DIFFERS"]),
        (1.0, (1.0, 1.0, 1.0), ["DIFFERS", "DIFFERS", "DIFFERS"]),
        (None, (1.0, 1.0, 1.0), ["DIFFERS", "DIFFERS", "REPRODUCED"]),
    ],
)
def test_the_gradients_of_a_job_that_clips_by_its_own_code_are_compared_behind_the_clipping(
    limit: float | None, factors: Sequence[float], outcomes: list[str]
) -> None:
    verdict = judge_clipping_job(limit, factors)
    assert [window.outcome for window in verdict.windows] == outcomes
    assert verdict.outcome == ("DIFFERS" if "DIFFERS" in outcomes else "REPRODUCED")
    names = {finding.name for window in verdict.windows for finding in window.findings}
    assert {GRAD_NORM, GRADIENT_NORMS} <= names
