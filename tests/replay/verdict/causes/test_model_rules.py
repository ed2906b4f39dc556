"""Which cause explains a wrong forward, by what the recording states of the job's model."""

from dataclasses import replace

from replay.tolerances.job_bounds import LOSS, TOKENS
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.table import find_causes
from replay.verdict.findings import FindingStatus, make_finding
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from replay.verdict.outcomes import Outcome
from replay.verdict.pass_values import NOTED_LOSS
from tests.replay.verdict.causes.made_evidence import draw_gradients, make_forward_evidence, make_window

SCALING = ModelDifference(
    kind=ModelDifferenceKind.ATTRIBUTE, where="model.layers.*.self_attn", key="scaling", job="0.125", replay="0.25"
)
HOOK = ModelDifference(
    kind=ModelDifferenceKind.HOOK, where="model.layers.1", key="forward hook", job="spy in train.py", replay=None
)


def test_one_setting_that_is_computed_with_is_the_cause() -> None:
    cause = find_causes(make_forward_evidence(LOSS, TOKENS, model_differences=[SCALING]))[0]
    assert (cause.name, cause.sureness) == (CauseName.MODEL_CODE, Sureness.IS)
    assert "scaling of model.layers.*.self_attn is 0.125 in the job, 0.25 here" in cause.sentence


def test_a_hook_may_only_look_so_it_probably_is_the_cause() -> None:
    cause = find_causes(make_forward_evidence(LOSS, TOKENS, model_differences=[HOOK]))[0]
    assert (cause.name, cause.sureness) == (CauseName.MODEL_CODE, Sureness.PROBABLY)


def test_of_two_differences_neither_is_sure() -> None:
    cause = find_causes(make_forward_evidence(LOSS, TOKENS, model_differences=[HOOK, SCALING]))[0]
    assert cause.sureness is Sureness.PROBABLY
    assert "; also the attribute scaling of model.layers.*.self_attn is 0.125 in the job, 0.25 here" in cause.sentence


def test_a_loss_alone_is_not_explained_by_a_setting_of_attention() -> None:
    """Tokens' log-probs agree, so no module of the forward is at fault."""
    cause = find_causes(make_forward_evidence(LOSS, model_differences=[SCALING]))[0]
    assert (cause.name, cause.sureness) == (CauseName.OBJECTIVE, Sureness.PROBABLY)


def test_without_another_cause_versions_may_be_it() -> None:
    cause, *_ = find_causes(make_forward_evidence(LOSS, TOKENS))
    assert (cause.name, cause.sureness) == (CauseName.VERSIONS, Sureness.MAY_BE)
    assert "torch 2.11.0 in the job, 2.13.0 here" in cause.sentence


def test_where_nothing_is_known_it_says_so() -> None:
    evidence = replace(make_forward_evidence(LOSS, TOKENS), environment={})
    [cause] = find_causes(evidence)
    assert (cause.name, cause.sureness) == (CauseName.MODEL_CODE, Sureness.MAY_BE)
    assert "nothing that was recorded says why" in cause.sentence


def test_a_loss_of_the_loops_own_objective_is_no_other_function_of_the_models() -> None:
    """As where a policy's job is replayed with --passes all, which is of means of log-probs."""
    evidence = make_forward_evidence(LOSS)
    [verdict] = evidence.verdicts
    doubt = f"{NOTED_LOSS}, which may have another objective than the replay's --loss stand-in"
    findings = [
        replace(each, status=FindingStatus.UNSETTLED, doubt=doubt) if each.name == LOSS else each
        for each in verdict.findings
    ]
    evidence = replace(evidence, verdicts=[replace(verdict, outcome=Outcome.UNSETTLED, findings=findings)])
    cause = find_causes(evidence)[0]
    assert (cause.name, cause.sureness) == (CauseName.OBJECTIVE, Sureness.MAY_BE)
    assert cause.sentence.startswith(NOTED_LOSS)


def test_rounded_frequencies_are_probably_the_cause() -> None:
    rounded = ModelDifference(
        kind=ModelDifferenceKind.BUFFER,
        where="model.rotary_emb.inv_freq",
        key="dtype",
        job="bfloat16",
        replay="float32",
    )
    cause = find_causes(make_forward_evidence(LOSS, TOKENS, model_differences=[rounded]))[0]
    assert (cause.name, cause.sureness) == (CauseName.POSITIONS, Sureness.PROBABLY)
    assert "the buffer dtype of model.rotary_emb.inv_freq is bfloat16 in the job, float32 here" in cause.sentence


def test_a_setting_with_which_another_pass_has_the_jobs_numbers_is_hardly_the_cause() -> None:
    evidence = make_forward_evidence(LOSS, TOKENS, model_differences=[SCALING])
    [wrong] = evidence.verdicts
    agreeing = [make_finding(LOSS, 1.0, 1.0, difference=0.0, bound=1e-4)]
    sound = replace(wrong, index=0, outcome=Outcome.REPRODUCED, findings=agreeing)
    gradients = draw_gradients()
    passes = [*make_window([gradients], gradients), *make_window([gradients], gradients, index=1)]
    evidence = replace(evidence, passes=passes, verdicts=[sound, replace(wrong, index=1)])
    cause = next(cause for cause in find_causes(evidence) if "scaling" in cause.sentence)
    assert cause.sureness is Sureness.MAY_BE
