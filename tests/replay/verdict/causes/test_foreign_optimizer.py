"""An optimizer that holds other parameters than are trained: made before the adapter, it has a state at no step."""

from dataclasses import replace

import pytest

from replay.tolerances.job_bounds import STEPPED
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.step_rules import find_left_out_parameters
from replay.verdict.findings import judge_number
from tests.replay.lint.recorded import make_pass, make_sample, make_samples, make_step
from tests.replay.verdict.causes.made_evidence import (
    draw_gradients,
    make_forward_evidence,
    make_verdict,
    make_window,
)

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "num_parameters": 25}


@pytest.mark.parametrize(
    ("moves", "has_state", "rate", "has_gradient", "is_found"),
    [
        (False, False, 1e-3, True, True),
        # It is made anew for each step.
        (True, False, 1e-3, True, False),
        (False, True, 1e-3, True, False),
        # A rate of 0 is another cause, and so is a loss without a gradient.
        (False, False, 0.0, True, False),
        (False, False, 1e-3, False, False),
    ],
)
def test_an_optimizer_without_a_state_whose_trained_weights_never_move_holds_none_of_them(
    moves: bool, has_state: bool, rate: float, has_gradient: bool, is_found: bool
) -> None:
    passes = []
    for number in range(3):
        step = make_step(
            number,
            settings=({**ADAMW, "lr": rate},),
            has_state=has_state and number > 0,
            gradients=make_samples(make_sample()) if has_gradient else None,
        )
        weights = make_samples(make_sample(value=1.0 + number * moves))
        [compared] = make_window([draw_gradients()], draw_gradients(), index=number)
        passes.append(replace(compared, recorded=make_pass(number=number, step=step, weights=weights)))
    wrong = judge_number(STEPPED, 0.0, 1.0, difference=1.0, bound=0.1)
    evidence = replace(make_forward_evidence(), passes=passes, verdicts=[make_verdict(0, [wrong], optimizer_step=0)])
    cause = find_left_out_parameters(evidence)
    assert (cause is not None) is is_found
    if cause is not None:
        assert (cause.name, cause.sureness) == (CauseName.OPTIMIZER, Sureness.IS)
        assert cause.sentence.startswith("the optimizer holds none of the parameters that are trained (1)")
