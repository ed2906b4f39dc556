"""What the judge concludes from what it has concluded before: made passes of a job, and a replay that steps too."""

from dataclasses import replace

import pytest

from actor_init.spec import ActorSpec
from replay.tolerances.job_bounds import LOSS
from replay.verdict.judge import PassEvidence, judge
from replay.verdict.outcomes import Outcome, Verdict
from replay.verdict.recorded_pass import Claim
from tests.replay.verdict.causes.made_evidence import (
    SETTINGS,
    draw_gradients,
    make_window,
    measure_norm,
    scale_gradients,
)

STEPPING = ActorSpec(optimizer="adamw", learning_rate=1e-6).with_step_defaults()
RIGHT_LOSS, WRONG_LOSS = 1.5, 1.6
GROUP = {"num_parameters": 1, "lr": 1e-6, "weight_decay": 0.01}


def judge_steps(*passes: tuple[float, float | None], rates: tuple[float, ...] = (), follows: bool = True) -> Verdict:
    """Judge passes of which each ends a step; the replay, whose loss is 1.5, steps as well if it `follows`.

    passes  the job's loss, and by what factor a part of its gradient is off; None: nothing of it was recorded
    rates   the job's learning rate in each step; empty: the replay's
    """
    evidence: list[PassEvidence] = []
    for index, (loss, factor) in enumerate(passes):
        gradients = draw_gradients(index)
        of_job = scale_gradients(gradients, 1.0 if factor is None else factor, only="layers.1.mlp")
        [member] = make_window([of_job], gradients, index=index)
        step = member.recorded.step_after
        assert step is not None
        group = {**GROUP, "lr": rates[index]} if rates else GROUP
        step = replace(step, optimizer="AdamW", library="torch", settings=(group,), has_state=index > 0)
        step = replace(step, signatures=()) if factor is None else replace(step, grad_norm=measure_norm(of_job))
        claim = Claim(name=LOSS, values=[loss], num_tokens=[80])
        result = replace(
            member.record.result,
            loss=RIGHT_LOSS,
            row_action_tokens=[30, 50],
            has_stepped=follows,
            num_steps=index if follows else 0,
        )
        evidence.append(
            PassEvidence(
                record=replace(member.record, result=result),
                recorded=replace(member.recorded, claims=(claim,), step_after=step),
                replayed=member.replayed,
            )
        )
    return judge(evidence, replace(SETTINGS, stepping_actor=STEPPING if follows else None))


def test_where_losses_and_gradients_are_the_jobs_all_is_reproduced() -> None:
    verdict = judge_steps(*[(RIGHT_LOSS, 1.0)] * 3)
    assert [judged.outcome for judged in (*verdict.passes, *verdict.windows)] == [Outcome.REPRODUCED] * 6


@pytest.mark.parametrize("follows", [True, False])
def test_what_comes_first_is_named_first_and_the_gradient_of_a_pass_behind_its_loss(follows: bool) -> None:
    wrong_gradient = judge_steps((RIGHT_LOSS, 1.0), (RIGHT_LOSS, 1.5), (WRONG_LOSS, 1.0), follows=follows)
    assert wrong_gradient.outcome is Outcome.DIFFERS
    assert wrong_gradient.first is not None
    assert (wrong_gradient.first.index, wrong_gradient.first.is_window) == (1, True)
    wrong_loss = judge_steps((RIGHT_LOSS, 1.0), (WRONG_LOSS, 1.5), (RIGHT_LOSS, 1.0), follows=follows)
    assert wrong_loss.first is not None
    assert (wrong_loss.first.index, wrong_loss.first.is_window) == (1, False)


def test_behind_steps_with_the_jobs_gradients_the_weights_are_the_jobs_so_a_wrong_loss_differs() -> None:
    verdict = judge_steps((RIGHT_LOSS, 1.0), (RIGHT_LOSS, 1.0), (WRONG_LOSS, 1.0))
    assert [judged.outcome for judged in verdict.passes] == [Outcome.REPRODUCED, Outcome.REPRODUCED, Outcome.DIFFERS]


def test_behind_a_step_whose_gradient_could_not_be_judged_a_wrong_loss_is_in_doubt() -> None:
    verdict = judge_steps((RIGHT_LOSS, None), (WRONG_LOSS, 1.0), (WRONG_LOSS, 1.0))
    assert [judged.outcome for judged in verdict.passes] == [Outcome.REPRODUCED, *[Outcome.UNSETTLED] * 2]
    reasons = [str(judged.reason) for judged in verdict.passes[1:]]
    assert ["the gradient of the job's step 1 could not be judged" in reason for reason in reasons] == [True, True]
    # The first pass ran before any step.
    assert judge_steps((WRONG_LOSS, None)).passes[0].outcome is Outcome.DIFFERS


@pytest.mark.parametrize("rate", [5e-7, 1.001e-6, 0.0])
def test_behind_a_step_at_another_rate_a_wrong_loss_is_in_doubt_however_small_the_rates_are(rate: float) -> None:
    verdict = judge_steps((RIGHT_LOSS, 1.0), (WRONG_LOSS, 1.0), rates=(rate, 1e-6))
    assert verdict.passes[1].outcome is Outcome.UNSETTLED
    assert f"learning rate {rate:g} in the job, 1e-06 here" in str(verdict.passes[1].reason)
    window = verdict.windows[0]
    assert [
        f"learning rate {rate:g} in" in str(finding.values_as_text)
        for finding in window.findings
        if finding.values_as_text
    ] == [True]
