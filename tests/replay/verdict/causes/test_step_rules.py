"""Steps that are taken twice or left out, and clipping by another norm: made steps."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from actor_init.spec import ActorSpec
from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT_NORMS, LOSS
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.clipping import find_other_norm
from replay.verdict.causes.evidence import Evidence
from replay.verdict.causes.step_rules import (
    find_other_moments,
    find_other_state,
    find_repeated_steps,
    find_untaken_passes,
)
from replay.verdict.findings import make_finding
from replay.verdict.pass_values import MISSING_GRADIENT, OPTIMIZER, OPTIMIZER_STATE
from replay.verdict.pass_weights import find_miscounted_steps
from tests.replay.verdict.causes.made_evidence import (
    SETTINGS,
    draw_gradients,
    make_forward_evidence,
    make_verdict,
    make_window,
)

SOUND = draw_gradients()


def make_steps(
    counts: Sequence[tuple[int, ...]], left_out: Sequence[int] = (), *, begins_with_state: bool = True
) -> Evidence:
    """Passes of which each ends a step before which the optimizer had counted so many; some are in no step."""
    passes = []
    for index, state_steps in enumerate(counts):
        [compared] = make_window([SOUND], SOUND, index=index)
        step = compared.recorded.step_after
        assert step is not None
        step = (
            None
            if index in left_out
            else replace(step, has_state=begins_with_state or index > 0, state_steps=state_steps)
        )
        passes.append(replace(compared, recorded=replace(compared.recorded, step_after=step)))
    return replace(make_forward_evidence(LOSS), passes=passes)


def test_an_optimizer_that_counts_two_for_each_step_takes_two() -> None:
    cause = find_repeated_steps(make_steps([(1,), (2, 3), (4, 5), (6, 7)]))
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.STEPS_SKIPPED, Sureness.IS)
    assert "takes 2 steps for each" in cause.sentence


@pytest.mark.parametrize(
    ("counts", "name", "sureness"),
    [
        # As where the job goes on with the module inside of its wrapper: no pass of the last three steps is recorded.
        ([(0,), (1,), (2, 5)], CauseName.STEPS_SKIPPED, Sureness.PROBABLY),
        ([(0,), (1, 5), (2, 6)], CauseName.OPTIMIZER_STATE, Sureness.IS),
    ],
)
def test_uneven_counts_of_the_last_recorded_step_may_be_of_steps_behind_it(
    counts: Sequence[tuple[int, ...]], name: CauseName, sureness: Sureness
) -> None:
    evidence = make_steps(counts)
    wrong = make_finding(OPTIMIZER_STATE, 2.0, 1.0, difference=1.0, bound=0.1)
    evidence = replace(evidence, verdicts=[make_verdict(9, [wrong], optimizer_step=2)])
    cause = find_other_state(evidence)
    assert cause is not None
    assert (cause.name, cause.sureness) == (name, sureness)
    assert (find_other_moments(evidence) is None) is (name is CauseName.STEPS_SKIPPED)


def test_an_optimizer_without_a_state_had_counted_no_step() -> None:
    assert find_repeated_steps(make_steps([(), (2,), (4,)])) is None
    evidence = make_steps([(), (2,), (4,)], begins_with_state=False)
    cause = find_repeated_steps(evidence)
    assert cause is not None
    assert "it has counted 0 before step 1 and 4 before step 3" in cause.sentence
    assert find_miscounted_steps([evidence.passes[0]], evidence.passes, SETTINGS)


@pytest.mark.parametrize("counts", [[(0,), (1,), (2,)], [(0,), (2,)], [(0,), (2,), (3,)], [(), (), ()]])
def test_an_optimizer_that_counts_as_it_steps_has_no_such_cause(counts: Sequence[tuple[int, ...]]) -> None:
    assert find_repeated_steps(make_steps(counts)) is None


@pytest.mark.parametrize(
    ("counts", "numbers"),
    [
        ([(1,), (2, 3), (4, 5)], [0, 1]),  # as where each step of two optimizers is taken twice
        ([(0,), (1,), (2,)], []),
        ([(4,), (4, 5), (3, 6)], []),  # an expert that no token took counts fewer
        ([(), (1,), (2,)], []),
        ([(2,), (1,), (2,)], []),
    ],
)
def test_a_step_behind_which_more_are_counted_is_unsettled_where_none_is_replayed(
    counts: Sequence[tuple[int, ...]], numbers: Sequence[int]
) -> None:
    passes = make_steps(counts).passes
    stepping = replace(SETTINGS, steps=ActorSpec())

    found = [find_miscounted_steps([compared], passes, SETTINGS) for compared in passes]

    assert [index for index, findings in enumerate(found) if findings] == numbers
    assert all((finding.name, finding.is_evidence) == (OPTIMIZER, False) for findings in found for finding in findings)
    assert not any(find_miscounted_steps([compared], passes, stepping) for compared in passes)


def test_a_pass_between_others_that_no_step_took_is_named() -> None:
    cause = find_untaken_passes(make_steps([(0,), (1,), (1,), (2,)], left_out=[1]))
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.STEPS_SKIPPED, Sureness.PROBABLY)
    assert "the gradient of pass 2" in cause.sentence
    # The last pass of a recording may have been cut off before its step.
    assert find_untaken_passes(make_steps([(0,), (1,), (2,), (3,)], left_out=[3])) is None


@pytest.mark.parametrize(
    ("off", "missing", "is_found"), [(0.0, [], True), (1.0, [], False), (0.0, [MISSING_GRADIENT], False)]
)
def test_a_norm_that_is_not_that_of_the_parts_is_one_of_another_clipping(
    off: float, missing: Sequence[str], is_found: bool
) -> None:
    """Where parameters have no gradient in the job, its norm is of the others."""
    findings = [
        *(make_finding(name, 0.0, 3.0, difference=1.0, bound=0.0) for name in missing),
        make_finding(GRAD_NORM, 5.0, 4.0, difference=0.25, bound=1e-4),
        make_finding(GRADIENT_NORMS, 1.0 + off, 1.0, difference=off, bound=1e-3),
    ]
    evidence = Evidence(
        passes=[], windows=[], verdicts=[make_verdict(0, findings, optimizer_step=0)], settings=SETTINGS, environment={}
    )
    cause = find_other_norm(evidence)
    assert (cause is not None) is is_found
    assert cause is None or cause.name is CauseName.CLIPPING


@pytest.mark.parametrize(("off", "is_found"), [(0.0, True), (1.0, False)])
def test_moments_of_another_gradient_are_told_where_the_gradient_agrees(off: float, is_found: bool) -> None:
    findings = [
        make_finding(GRADIENT_NORMS, 1.0 + off, 1.0, difference=off, bound=1e-3),
        make_finding(OPTIMIZER_STATE, 0.1, 0.9, difference=1.0, bound=1e-3),
    ]
    evidence = Evidence(
        passes=[], windows=[], verdicts=[make_verdict(1, findings, optimizer_step=1)], settings=SETTINGS, environment={}
    )
    cause = find_other_moments(evidence)
    assert (cause is not None) is is_found
    assert cause is None or (cause.name, cause.sureness) == (CauseName.GRADIENTS_CHANGED, Sureness.PROBABLY)
