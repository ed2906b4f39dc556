"""What trials say of a cause, on made-up results and findings."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from replay.tolerances.job_bounds import GRADIENT, LOSS, TOKEN_LOG_PROBS
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence
from replay.verdict.causes.table import find_causes
from replay.verdict.causes.trial import (
    TrialMatch,
    TrialReport,
    TrialResult,
    confirm_results,
    join_matches,
    match_coarse_findings,
    match_findings,
    needs_confirmation,
)
from replay.verdict.causes.trial_rules import RULES
from replay.verdict.findings import Finding, VerdictSettings, judge_number
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from replay.verdict.outcomes import Outcome, PassVerdict

Kind = ModelDifferenceKind


def find(
    name: str, difference: float, *, bound: float = 1e-5, num_values: int = 1, doubt: str | None = None
) -> Finding:
    return judge_number(
        name, 5.0, 5.0 + difference, difference=difference, bound=bound, num_values=num_values, doubt=doubt
    )


def make_result(
    name: str = "the next token is seen",
    cause: CauseName = CauseName.MASK,
    *,
    agrees: bool = True,
    gain: float = 1e5,
    num_values: int = 20,
    is_stated: bool = False,
    is_of_stated_code: bool = False,
) -> TrialResult:
    return TrialResult(
        name=name,
        cause=cause,
        says=f"the job does: {name}",
        try_next=f"mend {name}",
        agrees=agrees,
        gain=gain if agrees else 0.0,
        num_values=num_values,
        is_stated=is_stated,
        is_of_stated_code=is_of_stated_code,
    )


def make_evidence(*results: TrialResult, step: int | None = None, wrong: Sequence[Finding] = ()) -> CauseEvidence:
    verdict = PassVerdict(
        index=0,
        source="a.pkl",
        rank=0,
        outcome=Outcome.DIFFERS,
        reason=None,
        findings=wrong or [find(LOSS, 1e-2), find(TOKEN_LOG_PROBS, 1e-1, num_values=20)],
        first_index=step,
        optimizer_step=step,
    )
    settings = VerdictSettings(dtype="float32", num_layers=2, num_data_ranks=1, grad_accumulation=1)
    return CauseEvidence(
        passes=(),
        windows=(),
        verdicts=[verdict],
        settings=settings,
        environment={},
        trials=TrialReport(index=0, results=results),
    )


def name_causes(*results: TrialResult, step: int | None = None) -> list[tuple[CauseName, Sureness]]:
    return [(cause.name, cause.sureness) for cause in find_trial_causes(make_evidence(*results, step=step))]


def find_trial_causes(evidence: CauseEvidence) -> list[Cause]:
    return find_causes(evidence, RULES)


def test_the_only_trial_that_agrees_is_the_cause() -> None:
    other = make_result("padding is seen", agrees=False)

    [cause] = find_trial_causes(make_evidence(other, make_result()))

    assert (cause.name, cause.sureness) == (CauseName.MASK, Sureness.IS)
    assert cause.sentence == "the job does: the next token is seen (pass 1, run again)"
    assert cause.try_next == "mend the next token is seen"
    assert {LOSS, TOKEN_LOG_PROBS, GRADIENT} <= set(cause.explains)


def test_two_causes_that_give_the_same_numbers_are_each_probable() -> None:
    positions = make_result("from 1", CauseName.POSITIONS)

    [cause] = find_trial_causes(make_evidence(make_result(), positions))

    # Each explains the same findings, so the first stands alone, and names the other.
    assert (cause.name, cause.sureness) == (CauseName.MASK, Sureness.PROBABLY)
    assert "; or the job does: from 1, which gives the same numbers" in cause.sentence


def test_two_trials_of_one_cause_are_one_sure_cause() -> None:
    [cause] = find_trial_causes(make_evidence(make_result("a", gain=2e5), make_result("b")))

    assert cause.sureness is Sureness.IS
    assert "the job does: a; or the job does: b" in cause.sentence


def test_a_trial_much_farther_off_is_no_rival() -> None:
    far = make_result("from 1", CauseName.POSITIONS, gain=50.0)

    assert name_causes(make_result(), far) == [(CauseName.MASK, Sureness.IS)]


def test_what_the_recording_states_goes_before_guesses() -> None:
    stated = make_result("rope_theta", CauseName.POSITIONS, is_stated=True, gain=1e4)

    assert name_causes(make_result(gain=1e6), stated) == [(CauseName.POSITIONS, Sureness.IS)]


@pytest.mark.parametrize(
    ("kind", "where", "key", "name", "sureness"),
    [
        (Kind.FUNCTION, "llama:apply_rotary_pos_emb", "", CauseName.POSITIONS, Sureness.PROBABLY),
        (Kind.FORWARD, "model.layers.*.self_attn", "", CauseName.MASK, Sureness.PROBABLY),
        (Kind.CONFIG, "sliding_window", "", CauseName.DOCUMENTS_MEET, Sureness.PROBABLY),
        (Kind.BUFFER, "model.rotary_emb.inv_freq", "", CauseName.POSITIONS, Sureness.MAY_BE),
        # What is computed elsewhere, and a setting that says the same.
        (Kind.BUFFER, "model.rotary_emb.inv_freq", "", CauseName.MASK, Sureness.IS),
        (Kind.FORWARD, "model.layers.*.mlp", "", CauseName.POSITIONS, Sureness.IS),
        (Kind.ATTRIBUTE, "model.layers.*.self_attn", "is_causal", CauseName.MASK, Sureness.IS),
        (Kind.HOOK, "model.layers.*.self_attn", "forward hook", CauseName.MASK, Sureness.IS),
    ],
)
def test_a_guess_is_not_sure_beside_a_known_difference_that_may_give_its_numbers(
    kind: ModelDifferenceKind, where: str, key: str, name: CauseName, sureness: Sureness
) -> None:
    known = ModelDifference(kind=kind, where=where, key=key, job="a", replay="b")
    for result, expected in (
        (make_result(cause=name), sureness),
        (make_result(cause=name, is_stated=True), Sureness.IS),
        (make_result(cause=name, is_of_stated_code=True), Sureness.IS),
    ):
        evidence = make_evidence(result)
        evidence = replace(evidence, settings=replace(evidence.settings, model_differences=[known]))
        [cause] = find_trial_causes(evidence)
        assert (cause.name, cause.sureness) == (name, expected)
        assert (", which may give them" in cause.sentence) is (expected is not Sureness.IS)


def test_settings_of_the_config_that_were_tried_are_no_rival_of_a_guess() -> None:
    known = ModelDifference(kind=Kind.CONFIG, where="sliding_window", job="4", replay="8")
    evidence = make_evidence(make_result(), make_result("config: sliding_window", agrees=False))
    [cause] = find_trial_causes(replace(evidence, settings=replace(evidence.settings, model_differences=[known])))
    assert cause.sureness is Sureness.IS


def test_a_mistake_of_code_that_is_another_one_goes_before_a_guess_and_is_not_sure() -> None:
    rotation = make_result("nothing rotated", CauseName.POSITIONS, is_of_stated_code=True)
    [cause] = find_trial_causes(make_evidence(make_result("all 0", CauseName.POSITIONS, gain=2e5), rotation))
    assert cause.sureness is Sureness.PROBABLY
    assert cause.sentence.startswith("the job does: nothing rotated; or the job does: all 0")


@pytest.mark.parametrize(
    ("gain", "num_values", "sureness"),
    [
        (50.0, 20, Sureness.IS),
        (5.0, 20, Sureness.PROBABLY),
        (1.5, 20, Sureness.MAY_BE),
        (1e5, 1, Sureness.IS),
        (900.0, 1, Sureness.PROBABLY),
        (25.0, 1, Sureness.MAY_BE),
    ],
)
def test_one_number_alone_has_to_come_nearer_the_more_trials_there_are(
    gain: float, num_values: int, sureness: Sureness
) -> None:
    others = [make_result(f"guess {number}", agrees=False) for number in range(9)]

    assert name_causes(make_result(gain=gain, num_values=num_values), *others) == [(CauseName.MASK, sureness)]


def confirm(result: TrialResult, *confirmed_by: int) -> list[tuple[Sureness, str]]:
    evidence = make_evidence(result)
    report = TrialReport(index=0, results=[result], confirmed_by=confirmed_by)
    return [(cause.sureness, cause.sentence) for cause in find_trial_causes(replace(evidence, trials=report))]


def test_a_loss_that_is_near_for_a_reason_is_near_in_every_pass() -> None:
    # Eight times nearer in each of three passes: another loss like it may be the job's.
    assert confirm(make_result(gain=8.0**3, num_values=3), 1, 2)[0][0] is Sureness.PROBABLY
    [(sureness, sentence)] = confirm(make_result(gain=40.0**3, num_values=3), 1, 2)
    assert sureness is Sureness.IS
    assert sentence.endswith("(passes 1, 2, 3, run again)")


def test_further_passes_decide_between_losses_that_agree() -> None:
    right, chance = make_result("all tokens", gain=50.0, num_values=1), make_result("twice", gain=100.0, num_values=1)
    wrong, untold = make_result("sum", agrees=False), make_result("own tokens", gain=4.0, num_values=1)
    assert needs_confirmation([right, chance, wrong, untold])

    more = [make_result("all tokens", gain=80.0, num_values=1), make_result("twice", agrees=False), make_result("sum")]
    found = {result.name: result for result in confirm_results([right, chance, wrong, untold], more)}

    assert (found["all tokens"].gain, found["all tokens"].num_values) == (4000.0, 2)
    assert not found["twice"].agrees
    assert not found["sum"].agrees
    assert found["own tokens"] == untold


def test_what_is_sure_needs_no_further_pass() -> None:
    assert not needs_confirmation([make_result(gain=1e5, num_values=1), make_result("sum", agrees=False)])
    assert needs_confirmation([make_result(gain=150.0, num_values=1), make_result("sum", agrees=False)])
    assert not needs_confirmation([make_result("sum", agrees=False)])


def test_what_the_recording_states_need_not_come_as_near() -> None:
    assert name_causes(make_result(gain=4.0, is_stated=True)) == [(CauseName.MASK, Sureness.IS)]
    assert name_causes(make_result(gain=2.0, is_stated=True)) == [(CauseName.MASK, Sureness.MAY_BE)]


def test_no_trial_agrees() -> None:
    assert not name_causes(make_result(agrees=False))


def test_trials_say_nothing_of_a_gradient_that_is_wrong_first() -> None:
    assert not name_causes(make_result(), step=0)


def test_no_trials_ran() -> None:
    evidence = make_evidence()

    assert not find_trial_causes(evidence)


# Matching


def test_a_match_puts_right_all_that_is_wrong() -> None:
    unchanged = [find(LOSS, 1e-2), find(TOKEN_LOG_PROBS, 1e-1, num_values=20)]

    match = match_findings(unchanged, [find(LOSS, 1e-8), find(TOKEN_LOG_PROBS, 1e-6, num_values=20)])

    assert match.agrees
    assert match.num_values == 21
    assert match.gain == pytest.approx(1e4 / 0.1)


def test_a_loss_that_comes_out_beside_wrong_tokens_is_no_match() -> None:
    unchanged = [find(LOSS, 1e-2), find(TOKEN_LOG_PROBS, 1e-1)]

    assert not match_findings(unchanged, [find(LOSS, 1e-8), find(TOKEN_LOG_PROBS, 1e-2)]).agrees
    assert not match_findings(unchanged, [find(LOSS, 1e-2), find(TOKEN_LOG_PROBS, 1e-1)]).agrees


def test_a_number_that_becomes_wrong_is_no_match() -> None:
    unchanged = [find(LOSS, 1e-2), find(TOKEN_LOG_PROBS, 1e-8)]

    assert not match_findings(unchanged, [find(LOSS, 1e-8), find(TOKEN_LOG_PROBS, 1e-2)]).agrees


def test_nothing_was_wrong() -> None:
    assert not match_findings([find(LOSS, 1e-8)], [find(LOSS, 1e-8)]).agrees


def test_a_number_that_is_unsettled_can_be_put_right() -> None:
    unchanged = [find(LOSS, 1e-2, doubt="the routers")]

    assert match_findings(unchanged, [find(LOSS, 1e-8, doubt="the routers")]).agrees


def test_a_hypothesis_holds_on_every_rank_that_is_wrong() -> None:
    near, far = TrialMatch(agrees=True, gain=1e4, num_values=3), TrialMatch(agrees=True, gain=10.0, num_values=3)

    assert join_matches([near, far]) == TrialMatch(agrees=True, gain=10.0, num_values=6)
    assert not join_matches([near, TrialMatch(agrees=False)]).agrees
    assert not join_matches([]).agrees


def test_in_a_coarser_dtype_a_number_has_to_come_much_nearer() -> None:
    unchanged = [find(LOSS, 1e-3), find(TOKEN_LOG_PROBS, 1e-2, num_values=20)]
    tokens = find(TOKEN_LOG_PROBS, 1e-3, bound=1e-1, num_values=20)

    near = match_coarse_findings(unchanged, [find(LOSS, 1e-5, bound=1e-2), tokens])
    far = match_coarse_findings(unchanged, [find(LOSS, 5e-4, bound=1e-2), tokens])

    assert near.agrees
    assert near.gain == pytest.approx(10.0)
    assert not far.agrees
