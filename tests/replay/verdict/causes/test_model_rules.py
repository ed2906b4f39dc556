"""Which cause explains a wrong forward, by what the recording states of the job's model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from actor_init.spec import ActorSpec
from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT, LOG_PROBS, LOSS, TOKEN_LOG_PROBS
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.model_rules import (
    ALL_FINDINGS,
    COMPUTE_BUFFERS,
    GRADIENT_SYNC,
    choose_cause_name,
    describe_model_difference,
    find_gradient_code,
    find_model_difference,
    find_other_loss_function,
    find_other_masks,
    find_other_versions,
    find_unstated_difference,
)
from replay.verdict.causes.table import find_causes
from replay.verdict.causes.trial import TrialReport, TrialResult
from replay.verdict.dropout_masks import JOB_IN_EVAL_MODE, MASKS
from replay.verdict.findings import FindingStatus, judge_number
from replay.verdict.model_facts import ALL_ZEROS, OTHER_TEXT, ModelDifference, ModelDifferenceKind
from replay.verdict.outcomes import Outcome
from replay.verdict.recorded_pass import NOTED_LOSS
from replay.verdict.token_traits import TokenTraits
from replay.verdict.tried_losses import TriedLoss, TriedLosses
from tests.replay.verdict.causes.made_evidence import (
    draw_gradients,
    make_forward_evidence,
    make_gradient_evidence,
    make_verdict,
    make_window,
)

Kind = ModelDifferenceKind

SCALING = ModelDifference(
    kind=ModelDifferenceKind.ATTRIBUTE, where="model.layers.*.self_attn", key="scaling", job="0.125", replay="0.25"
)
HOOK = ModelDifference(
    kind=ModelDifferenceKind.HOOK, where="model.layers.1", key="forward hook", job="spy in train.py", replay=None
)


def test_one_setting_that_is_computed_with_is_the_cause() -> None:
    cause = find_causes(make_forward_evidence(LOSS, TOKEN_LOG_PROBS, model_differences=[SCALING]))[0]
    assert (cause.name, cause.sureness) == (CauseName.MODEL_CODE, Sureness.IS)
    assert "scaling of model.layers.*.self_attn is 0.125 in the job, 0.25 here" in cause.sentence


def test_a_hook_may_only_look_so_it_probably_is_the_cause() -> None:
    cause = find_causes(make_forward_evidence(LOSS, TOKEN_LOG_PROBS, model_differences=[HOOK]))[0]
    assert (cause.name, cause.sureness) == (CauseName.MODEL_CODE, Sureness.PROBABLY)


def test_labels_that_are_the_tokens_themselves_are_the_cause_of_a_gradient_alone() -> None:
    gradients = draw_gradients()
    [compared] = make_window([draw_gradients(1)], gradients)
    traits = TokenTraits(rows=(), has_mask=True, largest_id=9, has_shifted_labels=True, label_offset=0)
    for offset, name in ((0, CauseName.OTHER_TOKENS), (1, CauseName.GRADIENTS_CHANGED)):
        tokens = replace(traits, label_offset=offset)
        window = [replace(compared, recorded=replace(compared.recorded, trains=True, tokens=tokens))]
        cause = find_unstated_difference(make_gradient_evidence(window))
        assert cause is not None
        assert cause.name is name
        assert ("nothing that was recorded says why" in cause.sentence) is bool(offset)


def test_of_two_differences_neither_is_sure() -> None:
    cause = find_causes(make_forward_evidence(LOSS, TOKEN_LOG_PROBS, model_differences=[HOOK, SCALING]))[0]
    assert cause.sureness is Sureness.PROBABLY
    assert "; also the attribute scaling of model.layers.*.self_attn is 0.125 in the job, 0.25 here" in cause.sentence


def test_a_loss_alone_is_not_explained_by_a_setting_of_attention() -> None:
    """Tokens' log-probs agree, so no module of the forward is at fault."""
    cause = find_causes(make_forward_evidence(LOSS, model_differences=[SCALING]))[0]
    assert (cause.name, cause.sureness) == (CauseName.OBJECTIVE, Sureness.PROBABLY)


def test_without_another_cause_versions_may_be_it() -> None:
    cause, *_ = find_causes(make_forward_evidence(LOSS, TOKEN_LOG_PROBS))
    assert (cause.name, cause.sureness) == (CauseName.VERSIONS, Sureness.MAY_BE)
    assert "torch 2.11.0 in the job, 2.13.0 here" in cause.sentence


def test_where_nothing_is_known_it_says_so() -> None:
    evidence = replace(make_forward_evidence(LOSS, TOKEN_LOG_PROBS), environment={})
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
    cause = find_causes(make_forward_evidence(LOSS, TOKEN_LOG_PROBS, model_differences=[rounded]))[0]
    assert (cause.name, cause.sureness) == (CauseName.POSITIONS, Sureness.PROBABLY)
    assert "the buffer dtype of model.rotary_emb.inv_freq is bfloat16 in the job, float32 here" in cause.sentence


def test_a_buffer_of_zeros_was_never_computed() -> None:
    zeros = differ(Kind.BUFFER, "model.rotary_emb.inv_freq", job=ALL_ZEROS)
    cause = find_causes(make_forward_evidence(LOSS, TOKEN_LOG_PROBS, model_differences=[zeros]))[0]
    assert (cause.name, cause.sureness) == (CauseName.POSITIONS, Sureness.IS)
    assert "inv_freq is all zeros in the job, b here: the job never computed it" in cause.sentence
    assert cause.try_next == COMPUTE_BUFFERS


def test_a_setting_with_which_another_pass_has_the_jobs_numbers_is_hardly_the_cause() -> None:
    evidence = make_forward_evidence(LOSS, TOKEN_LOG_PROBS, model_differences=[SCALING])
    [wrong] = evidence.verdicts
    agreeing = [judge_number(LOSS, 1.0, 1.0, difference=0.0, bound=1e-4)]
    sound = replace(wrong, index=0, outcome=Outcome.REPRODUCED, findings=agreeing)
    gradients = draw_gradients()
    passes = [*make_window([gradients], gradients), *make_window([gradients], gradients, index=1)]
    evidence = replace(evidence, passes=passes, verdicts=[sound, replace(wrong, index=1)])
    cause = next(cause for cause in find_causes(evidence) if "scaling" in cause.sentence)
    assert cause.sureness is Sureness.MAY_BE


def differ(
    kind: ModelDifferenceKind, where: str = "model.layers.*.mlp", key: str = "", job: str | None = "a", **rest: Any
) -> ModelDifference:
    return replace(ModelDifference(kind=kind, where=where, key=key, job=job, replay="b"), **rest)


@pytest.mark.parametrize(
    ("difference", "name", "name_of_gradient"),
    [
        (differ(Kind.TIED), CauseName.TIED_WEIGHTS, None),
        (differ(Kind.FROZEN), CauseName.FROZEN, None),
        (differ(Kind.DTYPE), CauseName.DTYPE, None),
        (differ(Kind.LOSS_FUNCTION), CauseName.OBJECTIVE, None),
        (differ(Kind.ATTENTION_FUNCTION), CauseName.KERNEL, None),
        (differ(Kind.FUNCTION, "torch.nn.functional.scaled_dot_product_attention"), CauseName.KERNEL, None),
        (differ(Kind.FUNCTION, "torch.nn.functional.silu"), CauseName.MODEL_CODE, CauseName.GRADIENTS_CHANGED),
        (differ(Kind.PARAMETER_HOOK), CauseName.GRADIENTS_CHANGED, None),
        (differ(Kind.WRAPPER, key=GRADIENT_SYNC), CauseName.NOT_REDUCED, None),
        (differ(Kind.ATTRIBUTE, "q_proj.lora_A", "scaling"), CauseName.ADAPTER_SCALE, None),
        (differ(Kind.ATTRIBUTE, "q_proj", "scaling", "{'default': 2.0}"), CauseName.ADAPTER_SCALE, None),
        (differ(Kind.ATTRIBUTE, "self_attn", "scaling", "0.5"), CauseName.MODEL_CODE, None),
        (differ(Kind.ATTRIBUTE, "self_attn", "scaling", None), CauseName.MODEL_CODE, None),
        (differ(Kind.ATTRIBUTE, "mlp", "router_jitter_noise", "{}"), CauseName.DROPOUT, None),
        (differ(Kind.CONFIG, "attention_dropout"), CauseName.DROPOUT, None),
        (differ(Kind.CONFIG, "rope_scaling.factor", job="2.0"), CauseName.POSITIONS, None),
        (differ(Kind.BUFFER, "model.rotary_emb.inv_freq"), CauseName.POSITIONS, None),
        (differ(Kind.CONFIG, "sliding_window"), CauseName.MASK, None),
        (differ(Kind.ATTRIBUTE, "self_attn", "is_causal"), CauseName.MASK, None),
        (differ(Kind.CONFIG, "router_aux_loss_coef"), CauseName.ROUTER_LOSS, None),
        (differ(Kind.CONFIG, "norm_topk_prob"), CauseName.ROUTES, None),
        (differ(Kind.CONFIG, "_attn_implementation"), CauseName.KERNEL, None),
        (differ(Kind.CONFIG, "tie_word_embeddings"), CauseName.TIED_WEIGHTS, None),
        (differ(Kind.CONFIG, "rms_norm_eps"), CauseName.MODEL_CONFIG, None),
        (differ(Kind.BUFFER, "model.scale"), CauseName.MODEL_CODE, None),
        (differ(Kind.CLASS), CauseName.MODEL_CODE, CauseName.GRADIENTS_CHANGED),
        (differ(Kind.HOOK), CauseName.MODEL_CODE, CauseName.GRADIENTS_CHANGED),
    ],
    ids=lambda value: f"{value.kind} {value.where}.{value.key}" if isinstance(value, ModelDifference) else None,
)
def test_a_difference_is_called_by_what_it_is_of(
    difference: ModelDifference, name: CauseName, name_of_gradient: CauseName | None
) -> None:
    assert choose_cause_name(difference, is_forward=True) is name
    assert choose_cause_name(difference, is_forward=False) is (name_of_gradient or name)


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (differ(Kind.CONFIG, "rope_theta", job="1e4"), "the config's rope_theta is 1e4 in the job, b here"),
        (differ(Kind.ATTRIBUTE, "mlp", "eps", None), "the attribute eps of mlp is none in the job, b here"),
        (differ(Kind.HOOK, "mlp", "forward hook"), "the job has a forward hook of mlp: a"),
        (differ(Kind.PARAMETER_HOOK, "w", ranks=(1, 2)), "the job has w: a (rank 1, 2)"),
        (differ(Kind.FORWARD, "mlp"), "the job runs another forward of mlp: a"),
        (differ(Kind.CLASS, "mlp"), "the class of mlp is a in the job, b here"),
        (differ(Kind.LOSS_FUNCTION), "the loss function is a in the job, b here"),
        (differ(Kind.ATTENTION_FUNCTION, replay=None), "the attention function is a in the job, the usual one here"),
        (differ(Kind.FROZEN, "w"), "w: a in the job, b here"),
        (differ(Kind.FORWARD, "mlp", job=OTHER_TEXT), "the source of mlp in the job is not that of b here"),
    ],
)
def test_a_difference_is_described_in_a_line(difference: ModelDifference, text: str) -> None:
    assert describe_model_difference(difference) == text


LOSS_FUNCTION = differ(Kind.LOSS_FUNCTION, "the model")
CONFIG = differ(Kind.CONFIG, "rms_norm_eps")


@pytest.mark.parametrize(
    ("wrong", "differences", "name", "sureness"),
    [
        ([LOSS], [LOSS_FUNCTION], CauseName.OBJECTIVE, Sureness.PROBABLY),
        # It computes the loss alone, and here tokens are wrong.
        ([LOSS, TOKEN_LOG_PROBS], [LOSS_FUNCTION], None, None),
        ([LOSS], [CONFIG], CauseName.MODEL_CONFIG, Sureness.IS),
        ([LOSS, TOKEN_LOG_PROBS], [differ(Kind.TIED)], CauseName.TIED_WEIGHTS, Sureness.IS),
        ([LOSS, TOKEN_LOG_PROBS], [differ(Kind.MODULE)], CauseName.MODEL_CODE, Sureness.IS),
        ([LOSS, TOKEN_LOG_PROBS], [differ(Kind.CLASS)], CauseName.MODEL_CODE, Sureness.PROBABLY),
        # What a wrapper does to gradients and what is frozen change no first forward.
        ([LOSS, TOKEN_LOG_PROBS], [differ(Kind.WRAPPER, key=GRADIENT_SYNC)], None, None),
        ([LOSS, TOKEN_LOG_PROBS], [differ(Kind.FROZEN)], None, None),
        ([LOSS, TOKEN_LOG_PROBS], [], None, None),
        ([], [CONFIG], None, None),
    ],
)
def test_which_differences_may_make_a_forward_wrong(
    wrong: Sequence[str], differences: Sequence[ModelDifference], name: CauseName | None, sureness: Sureness | None
) -> None:
    cause = find_model_difference(make_forward_evidence(*wrong, model_differences=differences))
    assert (name, sureness) == (None, None) if cause is None else (cause.name, cause.sureness) == (name, sureness)
    assert cause is None or cause.explains == ALL_FINDINGS


def test_the_first_difference_from_cause_to_consequence_is_named_and_the_others_are_counted() -> None:
    differences = [differ(Kind.DTYPE), differ(Kind.BUFFER), differ(Kind.ATTRIBUTE), CONFIG]
    cause = find_model_difference(make_forward_evidence(LOSS, TOKEN_LOG_PROBS, model_differences=differences))
    assert cause is not None
    assert cause.name is CauseName.MODEL_CONFIG
    assert "; also the attribute" in cause.sentence
    assert cause.sentence.endswith("; 2 more in run.json")


def make_trials(*, agrees: bool) -> TrialReport:
    result = TrialResult(
        name="the job's config", cause=CauseName.MODEL_CONFIG, says="", try_next="", agrees=agrees, is_stated=True
    )
    return TrialReport(index=0, results=[result])


def test_a_trial_of_the_jobs_config_names_or_acquits_it() -> None:
    evidence = make_forward_evidence(LOSS, TOKEN_LOG_PROBS, model_differences=[CONFIG, HOOK])
    # The rule of trials names it.
    assert find_model_difference(replace(evidence, trials=make_trials(agrees=True))) is None
    cause = find_model_difference(replace(evidence, trials=make_trials(agrees=False)))
    assert cause is not None
    assert cause.sentence.startswith("the job has a forward hook of model.layers.1")
    assert "rms_norm_eps" not in cause.sentence


def make_passes_around(
    difference: ModelDifference, *, agreeing: Sequence[int] = (0,), steps: bool = False
) -> Sequence[Sureness]:
    """The sureness of a difference, where passes 0 to 2 are those of ranks 0 to 2 and forward 0 to 2; 2 is wrong."""
    gradients = draw_gradients()
    passes = [make_window([gradients] * 3, gradients, index=index)[index] for index in range(3)]
    evidence = make_forward_evidence(LOSS, TOKEN_LOG_PROBS, model_differences=[difference])
    [wrong] = evidence.verdicts
    sound = [judge_number(LOSS, 1.0, 1.0, difference=0.0, bound=1e-4)]
    verdicts = [
        replace(wrong, index=index, rank=index, outcome=Outcome.REPRODUCED, findings=sound) for index in agreeing
    ]
    verdicts.append(replace(wrong, index=2, rank=2))
    settings = replace(evidence.settings, stepping_actor=ActorSpec() if steps else None)
    windows = [[compared] for compared in passes]
    evidence = replace(evidence, passes=passes, windows=windows, verdicts=verdicts, settings=settings)
    cause = find_model_difference(evidence)
    return [] if cause is None else [cause.sureness]


@pytest.mark.parametrize(
    ("changes", "agreeing", "sureness"),
    [
        ({}, [0], Sureness.MAY_BE),
        ({}, [], Sureness.IS),
        ({"ranks": (2,)}, [0], Sureness.IS),
        ({"ranks": (0,)}, [0], Sureness.MAY_BE),
        ({"forward": 1}, [0], Sureness.IS),
        ({"forward": 1}, [0, 1], Sureness.MAY_BE),
    ],
)
def test_a_pass_that_agrees_acquits_what_was_at_work_in_it(
    changes: dict[str, Any], agreeing: Sequence[int], sureness: Sureness
) -> None:
    assert make_passes_around(replace(SCALING, **changes), agreeing=agreeing) == [sureness]


def test_code_that_may_only_look_is_acquitted_by_no_pass() -> None:
    assert make_passes_around(HOOK) == [Sureness.PROBABLY]


def test_a_frozen_parameter_makes_a_forward_wrong_behind_a_step_alone() -> None:
    assert make_passes_around(differ(Kind.FROZEN), steps=True) == [Sureness.IS]
    assert make_passes_around(differ(Kind.FROZEN), steps=False) == []


@pytest.mark.parametrize(
    ("difference", "stated", "code"),
    [
        (differ(Kind.WRAPPER, key=GRADIENT_SYNC), Sureness.PROBABLY, None),
        (differ(Kind.WRAPPER, key="divide factor"), None, Sureness.PROBABLY),
        (differ(Kind.FROZEN), Sureness.IS, None),
        (differ(Kind.TIED), Sureness.IS, None),
        (differ(Kind.PARAMETER_HOOK), None, Sureness.PROBABLY),
        (differ(Kind.HOOK), None, Sureness.PROBABLY),
        # Its backward may not be that of its forward.
        (differ(Kind.LOSS_FUNCTION), None, Sureness.PROBABLY),
        (differ(Kind.MODULE), Sureness.PROBABLY, None),
        (CONFIG, None, None),
    ],
)
def test_which_differences_may_make_a_gradient_wrong(
    difference: ModelDifference, stated: Sureness | None, code: Sureness | None
) -> None:
    gradients = draw_gradients()
    evidence = make_gradient_evidence(make_window([gradients], gradients))
    evidence = replace(evidence, settings=replace(evidence.settings, model_differences=[difference]))
    causes = (find_model_difference(evidence), find_gradient_code(evidence))
    assert [None if cause is None else cause.sureness for cause in causes] == [stated, code]
    # A wrong forward before it is told otherwise.
    assert find_gradient_code(make_forward_evidence(LOSS, model_differences=[difference])) is None


@pytest.mark.parametrize(
    ("wrong", "agreeing", "is_found"),
    [
        ([LOSS], [TOKEN_LOG_PROBS], True),
        ([LOSS], [LOG_PROBS], True),
        ([LOSS], [], False),
        ([LOSS, LOG_PROBS], [TOKEN_LOG_PROBS], False),
        ([LOG_PROBS], [TOKEN_LOG_PROBS], False),
    ],
)
def test_a_loss_is_another_function_of_tokens_that_agree(
    wrong: Sequence[str], agreeing: Sequence[str], is_found: bool
) -> None:
    findings = [judge_number(name, 2.0, 1.0, difference=1.0, bound=0.1) for name in wrong]
    findings += [judge_number(name, 1.0, 1.0, difference=0.0, bound=0.1) for name in agreeing]
    evidence = replace(make_forward_evidence(), verdicts=[make_verdict(0, findings)])
    cause = find_other_loss_function(evidence)
    assert (cause is not None) is is_found
    assert cause is None or "the loss is 2 in the job, 1 here, since pass 1" in cause.sentence
    # The loss in a window's verdict is none of a forward.
    assert find_other_loss_function(replace(evidence, verdicts=[make_verdict(0, findings, optimizer_step=0)])) is None


@pytest.mark.parametrize(
    ("text", "dropout", "advice"),
    [
        (f"the job's model was {JOB_IN_EVAL_MODE}", ["attn_pdrop"], "call model.train()"),
        ("the job draws 64 numbers, the replay none", [], "look for noise"),
        ("the job draws 64 numbers, the replay none", ["attn_pdrop"], "compare the dropout settings"),
    ],
)
def test_other_random_draws_are_dropout(text: str, dropout: Sequence[str], advice: str) -> None:
    finding = judge_number(MASKS, 1.0, 0.0, difference=1.0, bound=0.0, doubt=text)
    evidence = replace(make_forward_evidence(dropout=dropout), verdicts=[make_verdict(2, [finding])])
    cause = find_other_masks(evidence)
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.DROPOUT, Sureness.IS)
    assert cause.sentence == f"{text}, since pass 3"
    assert str(cause.try_next).startswith(advice)
    assert {MASKS, LOSS, GRADIENT} <= set(cause.explains)
    assert find_other_masks(make_forward_evidence(LOSS)) is None


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"torch": ("2.4", "2.5"), "device": ("A100", "H200")}, "torch 2.4 in the job, 2.5 here; device A100"),
        ({"hostname": ("a", "b")}, None),
    ],
)
def test_versions_that_compute_may_be_the_cause(environment: dict[str, tuple[str, str]], text: str | None) -> None:
    cause = find_other_versions(replace(make_forward_evidence(LOSS), environment=environment))
    assert (cause is None) is (text is None)
    assert cause is None or (cause.sentence.startswith(str(text)) and cause.sureness is Sureness.MAY_BE)
    assert find_other_versions(replace(make_forward_evidence(), environment=environment)) is None


def test_what_is_left_where_nothing_is_stated() -> None:
    gradients = draw_gradients()
    gradient = make_gradient_evidence(make_window([gradients], gradients))
    cause = find_unstated_difference(gradient)
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.GRADIENTS_CHANGED, Sureness.MAY_BE)
    stated = replace(gradient, settings=replace(gradient.settings, model_differences=[HOOK]))
    assert find_unstated_difference(stated) is None
    assert find_unstated_difference(make_forward_evidence()) is None


@pytest.mark.parametrize("outcome", [Outcome.UNSETTLED, Outcome.DIFFERS])
@pytest.mark.parametrize("doubt", ["the adapter is not built. Try: --adapter FOLDER", "of one no sample", None])
@pytest.mark.parametrize("quantity", [LOSS, GRAD_NORM])
def test_weights_in_doubt_may_be_others_where_that_leaves_a_number_unsettled(
    quantity: str, doubt: str | None, outcome: Outcome
) -> None:
    gradients = draw_gradients()
    [compared] = make_window([gradients], gradients)
    compared = replace(compared, weight_comparison=replace(compared.weight_comparison, doubt=doubt))
    evidence = make_forward_evidence(LOSS)
    if quantity == GRAD_NORM:
        evidence = make_gradient_evidence([compared], names=(GRAD_NORM,))
    verdict = replace(evidence.verdicts[0], outcome=outcome)
    cause = find_unstated_difference(replace(evidence, passes=[compared], verdicts=[verdict]))
    assert cause is not None
    is_named = doubt is not None and outcome is Outcome.UNSETTLED
    unstated = CauseName.MODEL_CODE if quantity == LOSS else CauseName.GRADIENTS_CHANGED
    name = CauseName.OTHER_WEIGHTS if is_named else unstated
    assert (cause.name, cause.sureness) == (name, Sureness.MAY_BE)
    if is_named and doubt is not None:
        assert cause.sentence.startswith(doubt.partition(". Try: ")[0])
        assert (cause.try_next == "--adapter FOLDER") is ("adapter" in doubt)


@pytest.mark.parametrize(
    ("doubts", "name"), [(["odd", "odd"], CauseName.OBJECTIVE), (["odd", None], CauseName.MODEL_CODE)]
)
def test_numbers_that_all_have_a_doubt_may_be_of_another_objective(
    doubts: Sequence[str | None], name: CauseName
) -> None:
    findings = [
        judge_number(quantity, 2.0, 1.0, difference=1.0, bound=0.1, doubt=doubt)
        for quantity, doubt in zip((LOSS, TOKEN_LOG_PROBS), doubts, strict=True)
    ]
    cause = find_unstated_difference(replace(make_forward_evidence(), verdicts=[make_verdict(0, findings)]))
    assert cause is not None
    assert (cause.name, cause.sureness) == (name, Sureness.MAY_BE)


@pytest.mark.parametrize("are_tokens_judged", [False, True])
@pytest.mark.parametrize("is_objective", [False, True])
def test_a_noted_loss_alone_does_not_say_that_the_forward_is_another(
    is_objective: bool, are_tokens_judged: bool
) -> None:
    own = TriedLoss(name="", says="", try_next="", loss=1.0, gradient_apart=None)
    gradients = draw_gradients()
    [compared] = make_window([gradients], gradients)
    tried = TriedLosses(own=own, others=[], num_gradients=0) if is_objective else None
    compared = replace(compared, replayed=replace(compared.replayed, tried_losses=tried))
    findings = [judge_number(LOSS, 2.0, 1.0, difference=1.0, bound=0.1)]
    if are_tokens_judged:
        findings.append(judge_number(TOKEN_LOG_PROBS, 1.0, 1.0, difference=0.0, bound=0.1))
    evidence = replace(make_forward_evidence(), passes=[compared], verdicts=[make_verdict(0, findings)])
    cause = find_unstated_difference(evidence)
    assert cause is not None
    is_open = is_objective and not are_tokens_judged
    assert cause.name is (CauseName.OBJECTIVE if is_open else CauseName.MODEL_CODE)
