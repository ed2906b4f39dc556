"""Which clipping makes a gradient another one: of parts of a step, of a rank's shards, by another norm."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT_NORMS, LOSS
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.clipping import (
    clips_under_scale,
    find_clipping_of_parts,
    find_clipping_of_shards,
    find_other_norm,
    find_round_number,
)
from replay.verdict.causes.wrong_gradient import GRADIENT_FINDINGS
from replay.verdict.findings import judge_number
from replay.verdict.gradient_findings import ComparedPass
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from replay.verdict.recorded_pass import WEIGHTING
from tests.replay.verdict.causes.made_evidence import (
    draw_gradients,
    make_forward_evidence,
    make_gradient_evidence,
    make_verdict,
    make_window,
    measure_norm,
    scale_gradients,
)

SOUND = draw_gradients()


def with_steps(window: Sequence[ComparedPass], *changes: dict[str, Any]) -> list[ComparedPass]:
    """The window, with each rank's step changed."""
    made = []
    for compared, change in zip(window, changes, strict=True):
        assert compared.recorded.step_after is not None
        step = replace(compared.recorded.step_after, **change)
        made.append(replace(compared, recorded=replace(compared.recorded, step_after=step)))
    return made


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((None, None), "the job clips its gradients before the last of a step's 2 passes"),
        ((1.0, None), "the job clips its gradients to a norm of 1 before"),
        ((1.0, 2.0), "the job clips its gradients before"),
    ],
)
def test_clipping_before_the_last_pass_is_of_a_part(limits: Sequence[float | None], words: str) -> None:
    changes = [{"clips_early": True, "max_norm": limit} for limit in limits]
    cause = find_clipping_of_parts(make_gradient_evidence(with_steps(make_window([SOUND] * 2, SOUND), *changes)))
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.CLIPPED_EARLY, Sureness.PROBABLY)
    assert cause.sentence.startswith(words)
    assert cause.explains == (*GRADIENT_FINDINGS, WEIGHTING)


def test_clipping_once_is_no_clipping_of_parts() -> None:
    window = make_window([SOUND], SOUND)
    assert find_clipping_of_parts(make_gradient_evidence(with_steps(window, {"max_norm": 1.0}))) is None
    early = with_steps(window, {"clips_early": True})
    assert find_clipping_of_parts(replace(make_gradient_evidence(early), verdicts=[])) is None


@pytest.mark.parametrize(
    ("norms", "is_part", "is_found"),
    [
        ((1.0, 1.0), True, True),
        ((0.5, 0.5), True, True),
        # Not a number that a person clips to; not the same on both; whole gradients; one rank.
        ((1.234, 1.234), True, False),
        ((1.0, 0.5), True, False),
        ((1.0, 1.0), False, False),
        ((1.0,), True, False),
    ],
)
def test_shards_that_are_as_long_on_each_rank_were_clipped_alone(
    norms: Sequence[float], is_part: bool, is_found: bool
) -> None:
    jobs = [scale_gradients(SOUND, norm / measure_norm(SOUND)) for norm in norms]
    window = make_window(jobs, SOUND)
    changes = []
    for compared in window:
        assert compared.recorded.step_after is not None
        signatures = tuple(replace(each, is_part=is_part) for each in compared.recorded.step_after.signatures)
        changes.append({"signatures": signatures})
    cause = find_clipping_of_shards(make_gradient_evidence(with_steps(window, *changes)))
    assert (cause is not None) is is_found
    if cause is not None:
        assert (cause.name, cause.sureness) == (CauseName.CLIPPING, Sureness.PROBABLY)
        assert f"each of 2 ranks' shards has a norm of {norms[0]:g}, since the job's step 1" in cause.sentence
        assert cause.explains == GRADIENT_FINDINGS


def test_nothing_is_said_of_shards_without_a_wrong_gradient_or_behind_a_wrong_forward() -> None:
    assert find_clipping_of_shards(make_forward_evidence(LOSS)) is None
    assert find_clipping_of_shards(make_gradient_evidence(make_window([SOUND], SOUND, without=list(SOUND)))) is None


@pytest.mark.parametrize(
    ("norm", "number"), [(1.0, 1.0), (0.5004, 0.5), (20.0, 20.0), (1.02, None), (0.0, None), (1.5, None)]
)
def test_a_limit_is_a_round_number(norm: float, number: float | None) -> None:
    assert find_round_number(norm) == number


def test_another_norm_is_told_where_it_alone_is_wrong_first() -> None:
    norm = judge_number(GRAD_NORM, 5.0, 4.0, difference=0.25, bound=1e-4)
    parts = judge_number(GRADIENT_NORMS, 1.0, 1.0, difference=0.0, bound=1e-3)
    verdict = make_verdict(0, [norm, parts], optimizer_step=0)
    evidence = replace(make_forward_evidence(), verdicts=[verdict])
    cause = find_other_norm(evidence)
    assert cause is not None
    assert (cause.name, cause.sureness, cause.explains) == (CauseName.CLIPPING, Sureness.IS, GRADIENT_FINDINGS)
    assert cause.sentence.startswith("the job clips by a norm of 5, and its gradient has one of 4, since the job's")
    # The job's norm is of fewer parameters.
    for kind, is_found in ((ModelDifferenceKind.FROZEN, False), (ModelDifferenceKind.HOOK, True)):
        stated = [ModelDifference(kind=kind, where="w", job="a", replay="b")]
        settings = replace(evidence.settings, model_differences=stated)
        assert (find_other_norm(replace(evidence, settings=settings)) is not None) is is_found
    # Something else is wrong before it.
    before = make_verdict(0, [judge_number(LOSS, 2.0, 1.0, difference=1.0, bound=0.1)])
    assert find_other_norm(replace(evidence, verdicts=[before, verdict])) is None
    other = make_verdict(0, [judge_number(GRADIENT_NORMS, 2.0, 1.0, difference=1.0, bound=0.1)], optimizer_step=0)
    assert find_other_norm(replace(evidence, verdicts=[other, replace(verdict, index=1)])) is None
    # The parameters' norms were not recorded.
    assert find_other_norm(replace(evidence, verdicts=[replace(verdict, findings=[norm])])) is None


@pytest.mark.parametrize(
    ("dtypes", "max_norm", "clips"),
    [
        (["float16"], 1.0, True),
        (["float16"], None, False),
        (["bfloat16"], 1.0, True),
        (["float32"], float("inf"), False),
    ],
)
def test_a_job_of_any_dtype_that_clips_may_clip_under_its_loss_scale(
    dtypes: Sequence[str], max_norm: float | None, clips: bool
) -> None:
    [compared] = with_steps(make_window([SOUND], SOUND), {"max_norm": max_norm})
    compared = replace(compared, recorded=replace(compared.recorded, dtypes=dtypes))
    assert clips_under_scale([compared]) is clips
