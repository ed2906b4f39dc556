"""A norm that several steps share shows the limit of a clipping that no recording sees: made steps."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from capture.file_format.gradient_signature import GradientSignature
from capture.file_format.optimizer_step import OptimizerStep
from replay.verdict.gradient_findings import collect_gradient_evidence
from replay.verdict.job_clipping import clip_as_the_job, infer_own_clipping_limit
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
