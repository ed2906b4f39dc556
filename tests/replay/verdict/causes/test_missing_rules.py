"""Which parameters had no gradient in the job's step, and of which module: made steps."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from replay.tolerances.job_bounds import GRADIENT, LOSS
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.missing_rules import find_missing_gradient
from replay.verdict.causes.wrong_gradient import GRADIENT_FINDINGS
from replay.verdict.findings import judge_number
from replay.verdict.recorded_pass import MISSING_GRADIENT
from tests.replay.verdict.causes.made_evidence import (
    NAMES,
    draw_gradients,
    make_forward_evidence,
    make_gradient_evidence,
    make_verdict,
    make_window,
    scale_gradients,
)

SOUND = draw_gradients()
LAYER = [name for name in NAMES if "layers.1." in name]


@pytest.mark.parametrize(
    ("without", "words"),
    [
        (NAMES[:1], "for model.embed_tokens.weight, since the job's step 1"),
        (LAYER[:2], "for model.layers.1.self_attn, since the job's step 1"),
        (LAYER, "for model.layers.1, since the job's step 1"),
        ([NAMES[0], *LAYER], "for model.embed_tokens.weight, model.layers.1, since the job's step 1"),
    ],
)
def test_parameters_without_a_gradient_and_their_module(without: Sequence[str], words: str) -> None:
    window = make_window([SOUND], SOUND, without=without)
    cause = find_missing_gradient(make_gradient_evidence(window, names=(MISSING_GRADIENT,)))
    assert cause is not None
    assert (cause.name, cause.sureness, cause.explains) == (CauseName.NO_GRADIENT, Sureness.IS, GRADIENT_FINDINGS)
    assert cause.sentence == f"the job steps without a gradient {words}"


def test_of_an_adapter_reentrant_checkpointing_is_among_what_to_look_for() -> None:
    lora = {f"model.layers.0.{part}_proj.lora_B.default.weight": SOUND[NAMES[0]] for part in "qv"}
    gradients = {**SOUND, **lora}
    tries = []
    for without in (list(lora), NAMES[:1]):
        window = make_window([gradients], gradients, without=without)
        cause = find_missing_gradient(make_gradient_evidence(window, names=(MISSING_GRADIENT,)))
        assert cause is not None
        tries.append("reentrant gradient checkpointing" in str(cause.try_next))
    assert tries == [True, False]


def test_beside_a_wrong_forward_they_take_no_part_in_the_model() -> None:
    """What is detached computes the same."""
    window = make_window([SOUND], SOUND, without=LAYER)
    evidence = make_gradient_evidence(window, names=(MISSING_GRADIENT,))
    forward = make_verdict(0, [judge_number(LOSS, 2.0, 1.0, difference=1.0, bound=0.1)])
    cause = find_missing_gradient(replace(evidence, verdicts=[forward, *evidence.verdicts]))
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.MODEL_CODE, Sureness.PROBABLY)
    assert cause.sentence.startswith("model.layers.1 takes no part in the job's forward")
    assert {LOSS, GRADIENT, MISSING_GRADIENT} <= set(cause.explains)


def test_a_window_that_is_not_known_has_the_findings_own_words() -> None:
    finding = judge_number(MISSING_GRADIENT, 0.0, 1.0, difference=1.0, bound=0.0, where="model.head")
    evidence = replace(make_forward_evidence(), verdicts=[make_verdict(4, [finding], optimizer_step=4)])
    cause = find_missing_gradient(evidence)
    assert cause is not None
    assert "without a gradient for model.head, since the job's step 5" in cause.sentence


@pytest.mark.parametrize(
    ("part", "factor", "is_zero_here", "is_found"),
    [("mlp", 0.0, False, True), ("mlp", 0.5, False, False), ("mlp", 0.0, True, False), ("", 1.0, False, False)],
)
def test_a_gradient_that_is_zero_in_the_job_alone_is_named(
    part: str, factor: float, is_zero_here: bool, is_found: bool
) -> None:
    job = scale_gradients(SOUND, factor, part)
    window = make_window([job], job if is_zero_here else SOUND)
    cause = find_missing_gradient(make_gradient_evidence(window))
    assert (cause is not None) is is_found
    if cause is not None:
        assert (cause.name, cause.sureness, cause.explains) == (CauseName.NO_GRADIENT, Sureness.IS, GRADIENT_FINDINGS)
        assert cause.sentence.startswith("the gradient of model.layers.*.mlp.up_proj.weight is zero in the job")


def test_a_wrong_forward_alone_is_no_missing_gradient() -> None:
    assert find_missing_gradient(make_forward_evidence(LOSS)) is None


def test_all_parameters_beside_the_head_are_counted_as_the_module_named_model_may_be_taken_for_the_whole() -> None:
    gradients = {**draw_gradients(), "lm_head.weight": draw_gradients(1)[NAMES[0]]}
    window = make_window([{"lm_head.weight": gradients["lm_head.weight"]}], gradients, without=NAMES)
    cause = find_missing_gradient(make_gradient_evidence(window, names=(MISSING_GRADIENT,)))
    assert cause is not None
    assert (
        "without a gradient for 7 of 8 trained parameters, all whose names begin with model., since the job's"
        in cause.sentence
    )
