"""A gradient parameter by parameter: which are the replay's, how sure that is, and what several are called."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from replay.tolerances.job_bounds import GRADIENT, LOSS
from replay.verdict.causes.wrong_gradient import find_wrong_gradient, name_parameters
from tests.replay.verdict.causes.made_evidence import (
    NAMES,
    draw_gradients,
    make_forward_evidence,
    make_gradient_evidence,
    make_window,
)
from tests.replay.verdict.causes.test_factors import compare, make_wrong

SOUND = draw_gradients()
Q_PROJ, O_PROJ, UP_PROJ = "self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (NAMES, "all 7 parameters"),
        (["model.embed_tokens.weight"], "model.embed_tokens.weight"),
        ([f"model.layers.0.{Q_PROJ}"], f"model.layers.0.{Q_PROJ}"),
        ([f"model.layers.{layer}.{Q_PROJ}" for layer in (0, 1)], f"model.layers.*.{Q_PROJ}"),
        ([f"model.layers.1.{part}" for part in (Q_PROJ, O_PROJ)], "model.layers.1.self_attn"),
        ([f"model.layers.1.{part}" for part in (Q_PROJ, O_PROJ, UP_PROJ)], "model.layers.1"),
        ([name for name in NAMES if "layers" in name], "model.layers"),
        ([f"model.layers.0.{Q_PROJ}", f"model.layers.1.{O_PROJ}"], f"model.layers.0.{Q_PROJ}, model.layers.1.{O_PROJ}"),
    ],
)
def test_parameters_are_named_by_their_module_or_their_kind(names: Sequence[str], text: str) -> None:
    assert name_parameters(names, NAMES) == text


def test_a_model_of_one_parameter_has_its_name() -> None:
    assert name_parameters(["w"], ["w"]) == "w"


@pytest.mark.parametrize(
    ("job", "cosine", "is_coarse", "is_same"),
    [
        (1.0, 1.0, False, True),
        (1.0005, 1.0, False, True),
        (1.002, 1.0, False, False),
        (1.0, 0.99, False, False),
        (1.0, -1.0, False, False),
        (None, 1.0, False, False),
        (1.05, 0.95, True, True),
        (1.1, 0.95, True, False),
        (1.0, 0.85, True, False),
    ],
)
def test_a_gradient_is_the_replays_within_rounding(
    job: float | None, cosine: float, is_coarse: bool, is_same: bool
) -> None:
    gradient = compare(job, cosine=cosine)
    assert make_wrong({"w": gradient}, is_coarse=is_coarse).is_same(gradient) is is_same


@pytest.mark.parametrize(
    ("job", "cosine", "factor", "is_coarse", "is_off", "is_sure"),
    [
        # Rounding takes a norm 0.1 from itself, in a coarse dtype.
        (1.05, 1.0, 1.0, True, True, False),
        (1.2, 1.0, 1.0, True, True, True),
        (1.05, 1.0, 1.0, True, False, True),
        (1.2, 1.0, 1.0, True, False, False),
        (2.1, 1.0, 2.0, True, False, True),
        (1.0, 0.5, 1.0, True, True, True),
        (None, 1.0, 1.0, True, False, False),
        (1.05, 1.0, 1.0, False, True, True),
    ],
)
def test_what_rounding_may_give_is_not_sure(
    job: float | None, cosine: float, factor: float, is_coarse: bool, is_off: bool, is_sure: bool
) -> None:
    gradient = compare(job, cosine=cosine)
    wrong = make_wrong({"w": gradient}, is_coarse=is_coarse)
    assert wrong.is_sure([gradient], factor, is_off=is_off) is is_sure


def test_the_first_wrong_window_is_compared() -> None:
    windows = [make_window([SOUND], SOUND, index=index) for index in range(2)]
    evidence = make_gradient_evidence(*windows)
    wrong = find_wrong_gradient(evidence)
    assert wrong is not None
    assert (wrong.window, wrong.is_coarse, set(wrong.gradient.parameters)) == (windows[1], False, set(NAMES))
    coarse = find_wrong_gradient(make_gradient_evidence(make_window([SOUND], SOUND, dtype="bfloat16")))
    assert coarse is not None
    assert coarse.is_coarse
    assert min(coarse.norm_bounds.values()) > 10 * max(wrong.norm_bounds.values())


def test_without_signatures_or_behind_a_wrong_forward_no_gradient_is_compared() -> None:
    unsigned = make_gradient_evidence(make_window([SOUND], SOUND, without=NAMES), names=(GRADIENT,))
    assert find_wrong_gradient(unsigned) is None
    forward = make_forward_evidence(LOSS)
    evidence = make_gradient_evidence(make_window([SOUND], SOUND, index=1))
    assert find_wrong_gradient(evidence) is not None
    assert find_wrong_gradient(replace(evidence, verdicts=[*forward.verdicts, *evidence.verdicts])) is None
